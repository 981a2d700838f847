"""Claims with several requests: each container sees the devices of the requests that it names, and
nothing of a sibling's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec import structs

from support.gateway_rig import Rig, make_rig
from support.kubelet_plugins import TrivialPlugin
from support.kubelet_plugins import device as listed
from support.node_plane import NODE
from topobus.devicekit.host.isolation import IsolatedDriver
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.verbs.device_hands import DeviceHands
from topobus.devicekit.verbs.prepare import Preparer
from topobus.formats.containers.cdi import parse
from topobus.formats.containers.oci import CdiFile, HostNode, OciResult, device_paths, oci_spec
from topobus.formats.messages.catalogue import MACHINE
from topobus.formats.messages.messages import ApiObject
from topobus.gateway.claims.claims import WHOLE_CLAIM
from topobus.gateway.config import ForeignSettings
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.process.clock import SystemClock
from topobus.simulation.machines import RecordedMachine, build
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.kubelet import (
    Admission,
    ClaimReference,
    Container,
    Pod,
    PreparedClaim,
)
from topobus.values.device import Device
from topobus.values.dra_names import DRIVER
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine, NumaNode

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

PROFILE = Path(__file__).parents[3] / "data" / "profiles" / "h100-pair.toml"
UID = "3cec39ef-a300-4ce1-90fc-10e64dcb86ca"
BIG, SMALL = "gpu-0000-18-00-0", "gpu-0000-1a-00-0"


@dataclass
class Gpus:
    """A node with two H100 behind the real driver."""

    rig: Rig
    recorded: RecordedMachine
    devices: tuple[Device, ...]

    async def show(self, *devices: Device) -> None:
        """Publish these GPUs, and have them prepared by the driver."""
        self.devices = devices
        tree = Tree(HardwareSettings(root=str(self.recorded.root)))
        known_devices = {device.name: device for device in devices}
        drivers = {"nvidia": IsolatedDriver(NvidiaDriver(), timeout_s=10.0)}
        journal = Journal(self.recorded.root.parent / "journal")
        hands = DeviceHands(drivers, tree, known_devices.get, journal, clock=SystemClock(), wait_s=10.0)
        self.rig.plane.prepare_by = Preparer("gpu", hands, known_devices.get).prepare
        await self.rig.plane.show("gpu", *devices)


@dataclass(frozen=True)
class View:
    """What a container has after kubelet and a runtime did their part."""

    env: dict[str, str]
    nodes: set[str]


@pytest_asyncio.fixture
async def gpus(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Gpus]:
    """Kubelet and gateway are started by the test."""
    async with make_rig(nats_server.url) as rig:
        recorded = build(PROFILE, tmp_path / "machine")
        tree = Tree(HardwareSettings(root=str(recorded.root)))
        made = Gpus(rig, recorded, ())
        await made.show(*NvidiaDriver().discover(tree, read_machine(tree, NODE)).devices)
        yield made


async def store_claim(rig: Rig, **requests: str) -> ClaimReference:
    """Store a claim with one device a request."""
    results = [
        {"request": request, "driver": DRIVER, "pool": NODE, "device": device} for request, device in requests.items()
    ]
    metadata = {"name": "training", "namespace": "default", "uid": UID}
    status = {"allocation": {"devices": {"results": results}}}
    await rig.plane.store(
        ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata=metadata, status=status)
    )
    return ClaimReference(name="training", uid=UID, drivers=(DRIVER,))


async def prepare(rig: Rig, reference: ClaimReference) -> PreparedClaim:
    """Prepare the claim through kubelet."""
    await rig.kubelet.wait_for_driver(reference.drivers[0])
    (prepared,) = await rig.kubelet.prepare_claims([reference])
    assert prepared.error == ""
    return prepared


def view(prepared: PreparedClaim, file: Path, *requests: str) -> View:
    """See a container that names these requests of the claim (none: the claim as a whole), by
    kubelet's rule and a runtime's.

    Source: kubelet pkg/kubelet/cm/dra/claiminfo.go (cdiDevicesAsList), once for each entry of the
    container's `resources.claims`.
    """
    names = [
        name
        for request in requests or ("",)
        for device in prepared.devices
        if request == "" or not device.requests or request in device.requests
        for name in device.cdi_devices
    ]
    files = [CdiFile(path=str(file), spec=parse(file.read_bytes()))]
    nodes = {path: HostNode(kind="c", major=1, minor=3) for path in device_paths((), names, files)}
    base = {"ociVersion": "1.0.2", "process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}}
    made = oci_spec(base, cdi_devices=names, files=files, nodes=nodes)
    assert isinstance(made, OciResult)
    env = dict(entry.split("=", 1) for entry in made.spec["process"]["env"])
    return View(env, {device["path"] for device in made.spec["linux"]["devices"]})


@pytest.mark.parametrize(
    "unknown", [(), (SMALL,), (BIG, SMALL)], ids=["uuids-known", "one-uuid-unknown", "no-uuid-known"]
)
async def test_container_sees_the_gpus_of_its_requests_alone_when_a_claim_has_two(
    gpus: Gpus, unknown: tuple[str, ...]
) -> None:
    """One request, the other, both, or none named: nodes and lists are of exactly those devices,
    and NVIDIA's runtime is told to add no other.
    """
    rig = gpus.rig
    await gpus.show(*(structs.replace(gpu, uuid="") if gpu.name in unknown else gpu for gpu in gpus.devices))
    async with rig.kubelet, rig.gateway(edits={}):
        reference = await store_claim(rig, big=BIG, small=SMALL)
        prepared = await prepare(rig, reference)
        again = await prepare(rig, reference)
        file = rig.cdi_dir / f"topobus.dev-gpu_{UID}.json"
        views = {
            names: view(prepared, file, *names)
            for names in ((), ("big",), ("small",), ("big", "small"), ("small", "big"))
        }

    lists = {names: each_view.env["TOPOBUS_GPU_DEVICES"] for names, each_view in views.items()}
    assert lists == {
        (): f"{BIG},{SMALL}",
        ("big",): BIG,
        ("small",): SMALL,
        ("big", "small"): SMALL,
        ("small", "big"): BIG,
    }
    big, small = (gpu.uuid for gpu in gpus.devices)
    whole = f"{big},{small}" if big and small else "void"
    assert {names: seen.env["NVIDIA_VISIBLE_DEVICES"] for names, seen in views.items()} == {
        (): whole,
        ("big",): big or "void",
        ("small",): small or "void",
        # A later variable replaces an earlier one; the nodes of both come from the CDI file.
        ("big", "small"): small or "void",
        ("small", "big"): big or "void",
    }
    assert views["big",].nodes & {"/dev/nvidia0", "/dev/nvidia1"} == {"/dev/nvidia0"}
    assert views["small",].nodes & {"/dev/nvidia0", "/dev/nvidia1"} == {"/dev/nvidia1"}
    for names in ((), ("big", "small"), ("small", "big")):
        assert views[names].nodes >= {"/dev/nvidia0", "/dev/nvidia1"}
        assert (views[names].env["TOPOBUS_GPU_DEVICES_BIG"], views[names].env["TOPOBUS_GPU_DEVICES_SMALL"]) == (
            BIG,
            SMALL,
        )
    # Nothing tells of the sibling.
    alone = " ".join(f"{key}={value}" for key, value in views["small",].env.items())
    assert not [
        word
        for word in ("big", "BIG", BIG, BIG.upper().replace("-", "_"), "18:00", gpus.devices[0].uuid or "?")
        if word in alone
    ]
    assert again == prepared


async def test_kubelet_gets_a_name_of_its_own_for_each_device_when_a_claim_has_two_requests(gpus: Gpus) -> None:
    """Kubelet writes the first CDI name of each entry into the pod's status, where none may be
    there twice.

    The extra entry is for no request's name.
    """
    rig = gpus.rig
    async with rig.kubelet, rig.gateway(edits={}):
        prepared = await prepare(rig, await store_claim(rig, big=BIG, small=SMALL))

    assert [device.requests for device in prepared.devices] == [("big",), ("small",), (WHOLE_CLAIM,)]
    assert [device.device for device in prepared.devices] == [BIG, SMALL, SMALL]
    first = [device.cdi_devices[0] for device in prepared.devices]
    assert len(set(first)) == len(first)
    assert first[:2] == [f"topobus.dev/gpu=claim-{UID}-{BIG}", f"topobus.dev/gpu=claim-{UID}-{SMALL}"]


async def test_claim_is_prepared_as_a_whole_alone_when_it_has_one_request(gpus: Gpus) -> None:
    """Nothing is asked twice, and kubelet gets a device each, where there
    is nothing to keep apart.
    """
    rig = gpus.rig
    async with rig.kubelet, rig.gateway(edits={}):
        prepared = await prepare(rig, await store_claim(rig, big=BIG))
        seen = view(prepared, rig.cdi_dir / f"topobus.dev-gpu_{UID}.json", "big")

    assert len(rig.plane.asks.requests("prepare")) == 1
    assert [device.cdi_devices for device in prepared.devices] == [(f"topobus.dev/gpu=claim-{UID}-{BIG}",)]
    assert seen.env["TOPOBUS_GPU_DEVICES"] == BIG
    assert seen.env["NVIDIA_VISIBLE_DEVICES"] == gpus.devices[0].uuid


@pytest.mark.parametrize(
    ("unknown", "says"), [((), "GPU-"), ((BIG, SMALL), "void")], ids=["uuids-known", "uuids-unknown"]
)
async def test_pod_gets_the_variable_of_its_own_gpu_when_kubelet_allocates(
    gpus: Gpus, unknown: tuple[str, ...], says: str
) -> None:
    """An Allocate answer is for one container: its GPU's UUID, or none at all, and never nothing
    said, for an image's own word may be "all".
    """
    rig = gpus.rig
    await gpus.show(*(structs.replace(gpu, uuid="") if gpu.name in unknown else gpu for gpu in gpus.devices))
    async with rig.kubelet, rig.gateway(edits={}):
        await rig.kubelet.wait_for_resource("topobus.dev/gpu", allocatable=2)
        admitted = await rig.kubelet.admit(
            Pod(name="p", uid="pod-u", containers=(Container(name="main", resources={"topobus.dev/gpu": 1}),))
        )

    assert isinstance(admitted, Admission), admitted
    env = admitted.container("main").edits.env
    given = next(gpu for gpu in gpus.devices if gpu.name == env["TOPOBUS_GPU_DEVICES"])
    assert env["NVIDIA_VISIBLE_DEVICES"] == (given.uuid or "void")
    assert env["NVIDIA_VISIBLE_DEVICES"].startswith(says)


async def test_container_sees_its_requests_answer_alone_when_a_plugin_of_others_has_one(
    nats_server: NatsServer,
) -> None:
    """A plugin answers for a container as a whole: it is asked for each request, so that its list
    is the request's.
    """
    async with make_rig(nats_server.url) as rig:
        nodes = tuple(NumaNode(id=node, cpus=CpuSet(), memory_bytes=1) for node in (0, 1))
        await rig.bus.put(MACHINE, Machine(node=NODE, numa_nodes=nodes, cpus=()), node=NODE)
        folder = rig.root / "others"
        folder.mkdir()
        async with rig.kubelet, rig.gateway(foreign=ForeignSettings(dir=str(folder), look_s=0.05)):
            await rig.readiness.until(lambda report: report.get("foreign-plugins", "").startswith("ready"))
            async with ListingPlugin(
                folder, "acme.example/widget", (listed("w-0", 0), listed("w-1", 1)), socket="p.sock"
            ) as plugin:
                assert await plugin.register() == ""
                prepared = await prepare(rig, await store_claim(rig, left="widget-acme--w-0", right="widget-acme--w-1"))
                file = rig.cdi_dir / f"topobus.dev-widget-acme_{UID}.json"
                views = {names: view(prepared, file, *names) for names in ((), ("left",), ("right",))}

    assert {names: each_view.env["WIDGETS"] for names, each_view in views.items()} == {
        (): "w-0,w-1",
        ("left",): "w-0",
        ("right",): "w-1",
    }
    assert {names: each_view.nodes for names, each_view in views.items()} == {
        (): {"/dev/w-0", "/dev/w-1"},
        ("left",): {"/dev/w-0"},
        ("right",): {"/dev/w-1"},
    }
    first = [device.cdi_devices[0] for device in prepared.devices]
    assert len(set(first)) == len(first)


class ListingPlugin(TrivialPlugin):
    """Names all devices of a call in one variable, with a node each, as plugins do."""

    async def Allocate(self, request: pb.AllocateRequest, context: object) -> pb.AllocateResponse:  # type: ignore[override]  # noqa: N802
        """Answer with what was asked for."""
        ids = sorted(request.container_requests[0].devices_ids)
        nodes = [pb.DeviceSpec(container_path=f"/dev/{id_}", host_path=f"/dev/{id_}", permissions="rw") for id_ in ids]
        return pb.AllocateResponse(
            container_responses=[pb.ContainerAllocateResponse(envs={"WIDGETS": ",".join(ids)}, devices=nodes)]
        )
