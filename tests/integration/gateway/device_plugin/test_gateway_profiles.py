"""A gateway in place of a vendor's device plugin: pods shaped like the vendors' own samples run,
exporters find them, and no two plugins have one resource.

The samples: NVIDIA's pod of one CUDA program (limits of `nvidia.com/gpu: 1`, restartPolicy
OnFailure) and the SR-IOV plugin's pod-tc1 (requests and limits of
`intel.com/intel_sriov_netdevice: '1'`, a network of Multus).
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from msgspec import structs

from support.gateway_rig import Rig, make_rig
from support.kubelet_plugins import TrivialPlugin
from support.kubelet_plugins import device as listed_device
from support.looks import until
from support.node_plane import device
from topobus.bus.bus import Bus
from topobus.cli.exits import UsageError
from topobus.cli.objects.vendor_names import by_our_names
from topobus.devicekit.driver import PrepareContext
from topobus.formats.messages.messages import Prepared, PrepareReply, PrepareRequest
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.kubeletpb.podresources.v1 import api_pb2 as pb
from topobus.kubeletpb.podresources.v1 import api_pb2_grpc as rpc
from topobus.process.config import NatsSettings
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.kubelet import Admission, Container, Pod
from topobus.values.device import Device
from topobus.values.outcome import Refusal
from topobus.values.pci import PciAddress
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

GPU, MIG, VF = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "intel.com/intel_sriov_netdevice"
_OWNER = Owner(kind=OwnerKind.POD, namespace="default", name="a", uid="u")
CUDA_POD = Pod(name="cuda-vectoradd", uid="p-1", containers=(Container(name="cuda-vectoradd", resources={GPU: 1}),))
SRIOV_POD = Pod(name="testpod1", uid="p-2", containers=(Container(name="appcntr1", resources={VF: 1}),))
MIG_POD = Pod(name="mig", uid="p-3", containers=(Container(name="main", resources={MIG: 1}),))
_PROFILES = Path(__file__).resolve().parents[3] / "data" / "profiles"
_MIG_UUID = "MIG-2c6b6f2e-0b4c-5a3a-9b0d-6f2f6e3d9c11"


class Gpus:
    """The recorded machine with two H100s, and NVIDIA's driver for it."""

    def __init__(self, folder: Path) -> None:
        build(_PROFILES / "h100-pair.toml", folder)
        self.tree = Tree(HardwareSettings(root=str(folder)))
        self.devices = tuple(NvidiaDriver().discover(self.tree, read_machine(self.tree, "demo-node")).devices)

    async def prepare(self, request: PrepareRequest) -> PrepareReply:
        """Prepare as the gpu service does."""
        devices = [gpu for gpu in self.devices if gpu.name in request.devices]
        edits = NvidiaDriver().prepare(self.tree, devices, PrepareContext(owner=request.owner))
        assert not isinstance(edits, Refusal), edits
        return PrepareReply(
            result=Prepared(edits={name: edit for name, edit in edits.items() if name}, common=edits[""])
        )


def mig_instance() -> Device:
    """One of a MIG GPU's instances, as a service lists those that are there for good."""
    return structs.replace(
        device("gpu-mig-0", 0), vendor="nvidia", uuid=_MIG_UUID, attributes={"type": "mig", "profile": "1g.10gb"}
    )


def function(address: str) -> Device:
    """A virtual function in the sample's pool."""
    name = "nic-" + address.replace(":", "-").replace(".", "-")
    return structs.replace(
        device(name, 0), pci=PciAddress.parse(address), pool="nic-intel-sriov-netdevice", parent=name[:-1] + "0"
    )


@pytest.fixture
def gpus(tmp_path: Path) -> Gpus:
    """Two H100s."""
    return Gpus(tmp_path / "machine")


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """A node whose gateway stands in for three plugins, and a running kubelet."""
    async with make_rig(nats_server.url) as made:
        made.settings = structs.replace(
            made.settings, profiles=("nvidia", "intel-sriov"), device_info_dir=str(made.root / "devinfo"), edits={}
        )
        async with made.kubelet:
            yield made


async def admit(rig: Rig, pod: Pod) -> Admission:
    """Admit a pod that must be admitted."""
    answer = await rig.kubelet.admit(pod)
    assert isinstance(answer, Admission), answer
    return answer


async def pod_resources(rig: Rig) -> pb.ListPodResourcesResponse:
    """Ask kubelet as an exporter does."""
    async with grpc.aio.insecure_channel(f"unix:{rig.kubelet.pod_resources_socket}") as channel:
        return await rpc.PodResourcesListerStub(channel).List(pb.ListPodResourcesRequest())


def pods_by_gpu(answer: pb.ListPodResourcesResponse) -> dict[str, str]:
    """Find the pod of a GPU or MIG instance by the rule of NVIDIA's exporter.

    It takes resources called nvidia.com/gpu or beginning with nvidia.com/mig-, keeps each device id
    as it is, and a MIG instance's id without its prefix, too; a GPU's metrics carry its UUID, and a
    MIG instance's are found by NVML with that id. Source: dcgm-exporter
    internal/pkg/transformation/kubernetes.go, toDeviceToPod.
    """
    pods: dict[str, str] = {}
    for pod in answer.pod_resources:
        for container in pod.containers:
            for entry in container.devices:
                if entry.resource_name == "nvidia.com/gpu" or entry.resource_name.startswith("nvidia.com/mig-"):
                    for device_id in entry.device_ids:
                        pods[device_id] = pods[device_id.removeprefix("MIG-")] = (
                            f"{pod.namespace}/{pod.name}/{container.name}"
                        )
    return pods


async def test_nvidias_sample_pod_runs_with_its_own_gpu(rig: Rig, gpus: Gpus) -> None:
    """The resource's name as it is in charts, the GPU's nodes, and the variable that NVIDIA's
    runtime reads: this GPU's UUID alone.
    """
    rig.plane.prepare_by = gpus.prepare
    async with rig.gateway():
        await rig.plane.show("gpu", *gpus.devices)
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        grant = (await admit(rig, CUDA_POD)).container("cuda-vectoradd")
        pods = await rig.pods()

    (uuid,) = grant.devices[GPU]
    given = next(gpu for gpu in gpus.devices if gpu.uuid == uuid)
    assert grant.edits.env["NVIDIA_VISIBLE_DEVICES"] == uuid
    assert {"/dev/nvidiactl", "/dev/nvidia-uvm"} < {node.path for node in grant.edits.device_nodes}
    assert sum(node.path in ("/dev/nvidia0", "/dev/nvidia1") for node in grant.edits.device_nodes) == 1
    assert [(used.resource, [held.name for held in used.devices]) for used in pods.containers] == [(GPU, [given.name])]
    assert rig.kubelet.capacity().keys() == {GPU}


async def test_exporter_finds_a_pods_gpus_and_mig_instances(rig: Rig, gpus: Gpus) -> None:
    """By UUID, in kubelet's PodResources; the GPU that nobody has is nobody's."""
    async with rig.gateway():
        await rig.plane.show("gpu", *gpus.devices, mig_instance())
        rig.plane.nodeless = {"gpu-mig-0", *(gpu.name for gpu in gpus.devices)}
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        await rig.kubelet.wait_for_resource(MIG, allocatable=1)
        (uuid,) = (await admit(rig, CUDA_POD)).container("cuda-vectoradd").devices[GPU]
        await admit(rig, MIG_POD)
        users = pods_by_gpu(await pod_resources(rig))

    assert users == {
        uuid: "default/cuda-vectoradd/cuda-vectoradd",
        _MIG_UUID: "default/mig/main",
        _MIG_UUID.removeprefix("MIG-"): "default/mig/main",
    }
    assert uuid in {gpu.uuid for gpu in gpus.devices}


async def test_sriov_plugins_sample_pod_gets_its_function(rig: Rig) -> None:
    """Kubelet's id is the PCI address, the variables have the SR-IOV plugin's names, and Multus
    finds its file.
    """
    rig.plane.nodeless = {"nic-0000-3b-00-1", "nic-0000-3b-00-2"}
    async with rig.gateway():
        await rig.plane.show("nic", function("0000:3b:00.1"), function("0000:3b:00.2"))
        await rig.kubelet.wait_for_resource(VF, allocatable=2)
        grant = (await admit(rig, SRIOV_POD)).container("appcntr1")

    (address,) = grant.devices[VF]
    # "PCIDEVICE_", prefix and name in capitals, each dot an underscore
    # (pkg/resources/pool_stub.go, GetEnvs).
    assert grant.edits.env["PCIDEVICE_INTEL_COM_INTEL_SRIOV_NETDEVICE"] == address
    assert json.loads(grant.edits.env["PCIDEVICE_INTEL_COM_INTEL_SRIOV_NETDEVICE_INFO"])[address]["generic"] == {
        "deviceID": address
    }
    assert (rig.root / "devinfo" / f"intel.com-intel_sriov_netdevice-{address}-device.json").exists()


async def test_gateway_labels_the_node_by_what_it_offers(rig: Rig, gpus: Gpus) -> None:
    """The file that Node Feature Discovery reads.

    Written by the gateway whose turn it is, beside all else.
    """
    folder = rig.root / "features.d"
    async with rig.gateway(node_labels_dir=str(folder)), asyncio.timeout(60):
        await rig.plane.show("gpu", *gpus.devices)
        labels = folder / "topobus"
        await until(lambda: labels.exists() and b"nvidia.com/gpu.count=2\n" in labels.read_bytes())
        lines = labels.read_text().splitlines()

    assert "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3" in lines


@contextmanager
def listening(path: Path) -> Iterator[None]:
    """Accept connections at a path, as a plugin does."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield
    path.unlink(missing_ok=True)


async def rival(rig: Rig, words: str) -> str:
    """Wait until the gateway says in its readiness that another plugin has the resource."""
    report = await rig.readiness.until(lambda report: words in report.get("registration", ""))
    return report["registration"]


async def test_resource_is_the_vendors_while_its_own_plugin_serves_it(rig: Rig, gpus: Gpus) -> None:
    """Two with one resource would take it from each other for ever: ours waits, says so to the
    operator, and comes in when the other has gone.
    """
    with listening(rig.kubelet.device_plugin_dir / "nvidia-gpu.sock"):
        async with rig.gateway():
            await rig.plane.show("gpu", *gpus.devices)
            said = await rival(rig, "nvidia-gpu.sock")
            during = (rig.kubelet.capacity(), (await rig.pods()).resource_rivals)
            (rig.kubelet.device_plugin_dir / "nvidia-gpu.sock").unlink()
            await rig.kubelet.wait_for_resource(GPU, allocatable=2)
            after = (await rig.pods()).resource_rivals

    assert said.startswith(f"{GPU}: another device plugin serves {GPU} at ")
    assert during[0] == {}
    assert during[1].keys() == {GPU}
    assert after == {}


async def test_resource_is_the_vendors_when_kubelet_has_devices_of_it_already(rig: Rig, gpus: Gpus) -> None:
    """A plugin by another socket's name is seen by what kubelet can allocate before we have
    registered.
    """
    async with TrivialPlugin(
        rig.kubelet.device_plugin_dir, GPU, [listed_device("GPU-theirs")], socket="odd.sock"
    ) as plugin:
        assert await plugin.register() == ""
        await rig.kubelet.wait_for_resource(GPU, allocatable=1)
        async with rig.gateway():
            await rig.plane.show("gpu", *gpus.devices)
            said = await rival(rig, "kubelet can allocate")
            listed = sorted(rig.kubelet.devices(GPU))
            await plugin.stop()
            await rig.kubelet.wait_for_resource(GPU, allocatable=2)

    assert said.endswith(f"kubelet can allocate 1 devices of {GPU} that another device plugin lists")
    assert listed == ["GPU-theirs"]


async def test_vendors_plugin_keeps_the_resource_when_it_registers_after_us(rig: Rig, gpus: Gpus) -> None:
    """Kubelet closes our stream for it; registering again would be a quarrel without end."""
    async with rig.gateway():
        await rig.plane.show("gpu", *gpus.devices)
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        async with TrivialPlugin(
            rig.kubelet.device_plugin_dir, GPU, [listed_device("GPU-x")], socket="nvidia-gpu.sock"
        ) as plugin:
            assert await plugin.register() == ""
            await rival(rig, "nvidia-gpu.sock")
            listed = (await rig.kubelet.wait_for_resource(GPU, allocatable=1)).capacity

    assert listed == 1


async def test_node_goes_over_to_us_and_back_while_a_pod_keeps_its_gpu(rig: Rig, gpus: Gpus) -> None:
    """NVIDIA's plugin, then the gateway, then the plugin again: each serves the resource alone, by the
    same ids, and a pod that runs all the while has its GPU to itself.
    """
    runs, during, after = (pod_of(name) for name in ("runs", "during", "after"))
    listed = [listed_device(gpu.uuid) for gpu in gpus.devices]
    rig.plane.prepare_by = gpus.prepare

    def vendors() -> TrivialPlugin:
        return TrivialPlugin(rig.kubelet.device_plugin_dir, GPU, listed, socket="nvidia-gpu.sock")

    async with vendors() as plugin:
        assert await plugin.register() == ""
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        (kept,) = (await admit(rig, runs)).container("main").devices[GPU]
    await rig.plane.show("gpu", *gpus.devices)
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        await until(lambda: held(rig) == {named(gpus, kept)})
        (ours,) = (await admit(rig, during)).container("main").devices[GPU]
        refused = await rig.kubelet.admit(pod_of("too-many"))
        await rig.kubelet.remove(during)
        await until(lambda: held(rig) == {named(gpus, kept)})
    async with vendors() as plugin:
        assert await plugin.register() == ""
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        (vendors_choice,) = (await admit(rig, after)).container("main").devices[GPU]

    assert {kept, ours} == {gpu.uuid for gpu in gpus.devices}
    assert vendors_choice == ours
    assert not isinstance(refused, Admission)


def pod_of(name: str) -> Pod:
    """A pod with one GPU by NVIDIA's resource."""
    return Pod(name=name, uid=f"uid-{name}", containers=(Container(name="main", resources={GPU: 1}),))


def held(rig: Rig) -> set[str]:
    """The devices that somebody holds in the ledger."""
    return {
        name
        for allocation in rig.plane.ledger.allocations.values()
        for holding in allocation.holdings
        for name in holding.devices.get("gpu", ())
    }


def named(gpus: Gpus, uuid: str) -> str:
    """The name of the GPU with this UUID."""
    return next(gpu.name for gpu in gpus.devices if gpu.uuid == uuid)


async def test_gateway_registers_again_when_only_a_dead_plugins_socket_is_left(rig: Rig, gpus: Gpus) -> None:
    """The file of a plugin that was killed is nobody."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(rig.kubelet.device_plugin_dir / "nvidia-gpu.sock"))
    async with rig.gateway():
        await rig.plane.show("gpu", *gpus.devices)

        assert (await rig.kubelet.wait_for_resource(GPU, allocatable=2)).capacity == 2


async def test_gateway_takes_over_from_another_one_of_ours(rig: Rig, gpus: Gpus) -> None:
    """What kubelet can allocate is ours from before: no quarrel with oneself at a restart."""
    await rig.plane.show("gpu", *gpus.devices)
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
    async with rig.gateway():
        await rig.kubelet.wait_for_event("Register.ok", subject=GPU, count=2)
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        rivals = (await rig.pods()).resource_rivals

    assert rivals == {}


async def test_place_asks_by_our_names_when_the_gateway_stands_in_for_a_vendor(rig: Rig, gpus: Gpus) -> None:
    """`topobus place` learns from the gateway that nvidia.com/gpu is its class gpu.

    A part of a class cannot be asked for by number.
    """
    notes: list[str] = []
    wanted = [
        PodRequest(
            owner=_OWNER, containers=(ContainerRequest(name="c", devices=(DeviceRequest(device_class=GPU, count=2),)),)
        )
    ]
    async with rig.gateway(), Bus.session(NatsSettings(url=rig.url), name="topobus-cli") as bus:
        await rig.plane.show("gpu", *gpus.devices)
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        asked = await by_our_names(bus, wanted, (), None, notes.append)
        as_said = await by_our_names(bus, wanted, ("amd",), None, notes.append)
        await rig.plane.show("gpu", *gpus.devices, mig_instance())
        with pytest.raises(UsageError, match="some of the devices of class gpu"):
            await by_our_names(bus, wanted, (), None, notes.append)

    assert [device.device_class for device in asked[0].containers[0].devices] == ["gpu"]
    assert as_said == wanted
    assert notes == ["nvidia.com/gpu is asked for as topobus.dev/gpu"]
