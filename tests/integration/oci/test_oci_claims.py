"""`topobus oci --claim` for claims whose devices a container needs more for than edits: CPUs of its
own, and an interface.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from msgspec import structs

from support.gateway_rig import Rig, make_rig
from support.node_plane import NODE, device
from support.oci_command import oci
from support.shape_names import full, plain
from topobus.engine.shapes.shapes import shapes_of
from topobus.formats.messages.catalogue import ALIGNMENT, MACHINE
from topobus.formats.messages.messages import AdoptRequest, ApiObject, Prepared, PrepareReply, PrepareRequest
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Inventory
from topobus.values.dra_names import DRIVER, pool_of_class
from topobus.values.edits import ContainerEdits
from topobus.values.idset import CpuSet
from topobus.values.machine import Cpu, Machine, NumaNode
from topobus.values.own_shapes import OwnShape
from topobus.values.request import Owner, OwnerKind
from topobus.values.view import NodeAlignment

pytestmark = pytest.mark.integration

OF_CLAIM = ("--claim", "default/c")
PARAMETERS = {"apiVersion": "nic.topobus.dev/v1", "kind": "Interface", "interface": {"name": "net1"}}


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """A node without a cluster: an interface and two CPUs of its second
    NUMA node are one claim's.
    """
    async with make_rig(nats_server.url) as made:
        machine = Machine(
            node=NODE,
            cpus=tuple(Cpu(id=cpu, online=True, numa_node=cpu // 4) for cpu in range(8)),
            numa_nodes=tuple(
                NumaNode(id=node, cpus=CpuSet.parse(f"{node * 4}-{node * 4 + 3}"), memory_bytes=1 << 30)
                for node in (0, 1)
            ),
        )
        await made.bus.put(MACHINE, machine, node=NODE)
        await made.plane.show(
            "nic", structs.replace(device("nic-0", 1), attributes={"interface": "eth7"}), device("nic-1", 1)
        )
        await made.plane.show("cpu", *(structs.replace(device(f"cpu-{cpu}", cpu // 4), cpu=cpu) for cpu in range(8)))
        await made.plane.answer_for("cpu")
        made.plane.prepare_by = _prepare
        yield made


async def _prepare(request: PrepareRequest) -> PrepareReply:
    """Answer as the nic and cpu services do: an interface must be
    attached, a CPU needs no edits.
    """
    names = [name for name in request.devices if name.startswith("nic-")]
    return PrepareReply(result=Prepared(edits={name: ContainerEdits() for name in names}, to_attach=tuple(names)))


async def _claim(rig: Rig, *devices: str) -> None:
    """Store an allocated claim, as the stand-alone controller would."""
    results = [
        {"request": plain(name), "driver": DRIVER, "pool": pool_of_class(NODE, name.partition("-")[0]), "device": name}
        for name in devices
    ]
    config = [
        {
            "source": "FromClaim",
            "requests": ["nic-0", "shape-machine", "shape-duo-0"],
            "opaque": {"driver": "topobus.dev", "parameters": PARAMETERS},
        },
        {
            "source": "FromClaim",
            "requests": ["nic-9"],
            "opaque": {"driver": "topobus.dev", "parameters": {"not": "ours"}},
        },
    ]
    metadata = {"name": "c", "namespace": "default", "uid": "u-c"}
    status = {"allocation": {"devices": {"results": results, "config": config}}}
    await rig.plane.store(
        ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata=metadata, status=status)
    )


async def test_spec_has_the_claims_cpus_with_their_memory_and_hooks_for_its_interface(rig: Rig) -> None:
    """A runtime alone then does what the gateway does through NRI: the cpuset, and the interface
    before the program starts and after it has ended.
    """
    await _claim(rig, "nic-0", "cpu-5", "cpu-6")

    code, document, notes = await oci(rig, *OF_CLAIM)

    assert code == 0, notes
    assert document["spec"]["linux"]["resources"]["cpu"] == {"cpus": "5-6", "mems": "1"}
    hooks = document["spec"]["hooks"]
    (before,), (after,) = hooks["createRuntime"], hooks["poststop"]
    assert before["args"][1:3] == ["-m", "topobus.nic.oci_hook"]
    assert before["args"][3:] == [
        "attach",
        "--interface",
        "eth7",
        "--parameters",
        json.dumps([PARAMETERS], separators=(",", ":"), sort_keys=True),
    ]
    assert after["args"][3:] == ["detach", "--interface", "eth7"]
    assert (before["path"], after["path"]) == (sys.executable, sys.executable)


async def test_claim_is_refused_when_a_device_to_attach_is_no_interface(rig: Rig) -> None:
    """What hooks cannot bring into a container is said by name, and no
    spec without it is printed.
    """
    await _claim(rig, "nic-1")

    code, document, notes = await oci(rig, *OF_CLAIM)

    assert code == 65
    assert document == {}
    assert "nic nic-1 is brought into containers by the gateway alone: it has no attribute interface" in " ".join(
        notes.split()
    )


async def test_claim_is_refused_when_its_service_adjusts_each_container(rig: Rig) -> None:
    """What it would say of a container is not in the spec, so there must be no spec."""

    async def adjust(request: PrepareRequest) -> PrepareReply:
        return PrepareReply(
            result=Prepared(edits={name: ContainerEdits() for name in request.devices}, to_adjust=request.devices)
        )

    rig.plane.prepare_by = adjust
    await _claim(rig, "nic-0")

    code, document, notes = await oci(rig, *OF_CLAIM)

    assert (code, document) == (65, {})
    assert "nic nic-0: its service decides for each container what it gets, and only the gateway asks it" in " ".join(
        notes.split()
    )


async def test_devices_are_prepared_with_the_claims_configuration_and_undone_on_request(rig: Rig) -> None:
    """What the claim asks for reaches the driver, for the devices that it asks it for; `--undo`
    gives all of them back, and may be repeated.
    """
    asked: list[PrepareRequest] = []

    async def note(request: PrepareRequest) -> PrepareReply:
        asked.append(request)
        return await _prepare(request)

    rig.plane.prepare_by = note
    await _claim(rig, "nic-0", "cpu-5")

    code, _, notes = await oci(rig, *OF_CLAIM)
    undone = [await oci(rig, *OF_CLAIM, "--undo") for _ in range(2)]

    assert code == 0, notes
    assert {request.devices: request.device_config for request in asked} == {
        ("nic-0",): {"nic-0": (PARAMETERS,)},
        ("cpu-5",): {"cpu-5": ()},
    }
    assert [(code, document) for code, document, _ in undone] == [(0, {}), (0, {})]
    assert "undone: nic nic-0" in undone[0][2]
    assert [sorted(request.devices) for request in rig.plane.asks.requests("unprepare")] == [
        ["cpu-5"],
        ["nic-0"],
        ["cpu-5"],
        ["nic-0"],
    ]


async def test_nothing_is_undone_that_the_gateway_has_prepared(rig: Rig) -> None:
    """A container that kubelet runs keeps its devices, whoever asks."""
    await _claim(rig, "nic-0")
    owner = Owner(kind=OwnerKind.CLAIM, namespace="default", name="c", uid="u-c")
    await rig.plane.topology.hold(
        AdoptRequest(op_id="prepared", owner=owner, devices={"nic": ("nic-0",)}, is_prepared=True)
    )

    code, document, notes = await oci(rig, *OF_CLAIM, "--undo")

    assert (code, document) == (65, {})
    assert "has its devices by kubelet" in " ".join(notes.split())
    assert rig.plane.asks.requests("unprepare") == []


async def test_spec_has_the_parts_of_a_shape_with_the_claims_configuration(rig: Rig) -> None:
    """The device services know parts alone, and so do hooks and `--undo`.

    A shape that the machine does not have is refused by its name. One that the operator adds is known
    from the node's alignment.
    """
    nics = [structs.replace(device(f"nic-{number}", 1), attributes={"interface": f"eth{number}"}) for number in (0, 1)]
    gpu = device("gpu-0", 1)
    await rig.plane.show("nic", *nics)
    await rig.plane.show("gpu", gpu)
    inventories = [
        Inventory(node=NODE, device_class=device_class, generation=1, devices=devices)
        for device_class, devices in (("gpu", (gpu,)), ("nic", tuple(nics)))
    ]
    await _claim(rig, full(shapes_of(inventories).parts, "shape-machine"))
    code, document, notes = await oci(rig, *OF_CLAIM)
    undone, _, undo_notes = await oci(rig, *OF_CLAIM, "--undo")
    await _claim(rig, "shape-half-0")
    refused, _, why = await oci(rig, *OF_CLAIM)
    duo = OwnShape(name="duo", parts={"nic": 2}, within="machine")
    await rig.plane.bus.put(ALIGNMENT, NodeAlignment(node=NODE, own_shapes=(duo,)), node=NODE)
    await _claim(rig, full(shapes_of(inventories, [duo]).parts, "shape-duo-0"))
    _, of_operator, _ = await oci(rig, *OF_CLAIM)

    assert code == 0, notes
    parameters = json.dumps([PARAMETERS], separators=(",", ":"), sort_keys=True)
    for answer in (document, of_operator):
        assert [hook["args"][5::2] for hook in answer["spec"]["hooks"]["createRuntime"]] == [
            ["eth0", parameters],
            ["eth1", parameters],
        ]
    assert (undone, "undone: nic nic-0, nic-1" in undo_notes) == (0, True), undo_notes
    assert refused != 0
    assert f"node {NODE} has no shape-half-0 now" in why
