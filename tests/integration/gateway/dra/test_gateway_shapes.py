"""A claim of a shape: kubelet gets one device, containers, ledger and device services get its parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.cluster_slices import allocated
from support.gateway_rig import Rig, make_rig
from support.laws import steps
from support.lives import LIMIT_S, GatewayLives, is_transport
from support.looks import next_look
from support.node_plane import NODE, claim
from support.shape_machines import cpu_group
from support.shape_names import plain
from topobus.cli.simulation.node import open_machine
from topobus.engine.shapes.shapes import shapes_of
from topobus.formats.containers.cdi import parse
from topobus.formats.messages.catalogue import ALIGNMENT
from topobus.gateway import boot
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.boot import BOOT_ID_FILE
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.kubelet import Admission, ClaimReference, Container, Pod, PreparedClaim
from topobus.values.device import Inventory
from topobus.values.dra_names import DRIVER
from topobus.values.own_shapes import OwnShape
from topobus.values.view import NodeAlignment

pytestmark = pytest.mark.integration

with open_machine("dgx") as _NODE:
    INVENTORIES: dict[str, Inventory] = {
        inventory.device_class: inventory
        for inventory in _NODE.snapshot.inventories
        if inventory.device_class in ("gpu", "nic")
    }
SHAPE, (GPU, NIC) = next(iter(shapes_of(INVENTORIES.values()).parts.items()))
WORKER = OwnShape(name="worker", parts={"gpu": 1, "nic": 1, "cpu": 2}, within="numa")
GROUPS = (cpu_group(0, 4), cpu_group(1, 4))
CPUS = Inventory(node=NODE, device_class="cpu", generation=1, devices=GROUPS)
_SHAPES = shapes_of([*INVENTORIES.values(), CPUS], [WORKER])
WITH_CPUS = next(name for name in _SHAPES.cpus if name.startswith("shape-worker"))
SINGLE = [name for name, parts in _SHAPES.parts.items() if parts == ("cpu-numa-0",)]
PAIR = ClaimReference(name="pair", uid="u-pair", drivers=(DRIVER,))
RIVAL = ClaimReference(name="rival", uid="u-rival", drivers=(DRIVER,))
HELD = {"gpu": (GPU,), "nic": (NIC,)}
MOST_STEPS = 100


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """The GPUs and NICs of a recorded machine, four CPUs beside each half of them, and a claim for a GPU with
    its nearest NIC.
    """
    async with make_rig(nats_server.url, classes=("cpu", "gpu", "nic")) as made:
        for device_class, inventory in {**INVENTORIES, "cpu": CPUS}.items():
            await made.plane.show(device_class, *inventory.devices)
        await made.plane.bus.put(ALIGNMENT, NodeAlignment(node=NODE, own_shapes=(WORKER,)), node=NODE)
        await made.plane.store(claim("pair", PAIR.uid, SHAPE))
        yield made


async def prepare(rig: Rig, reference: ClaimReference = PAIR) -> PreparedClaim:
    """Prepare as kubelet does: again while nobody answers."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            await rig.kubelet.wait_for_driver(DRIVER)
            (prepared,) = await rig.kubelet.prepare_claims([reference])
            if not is_transport(prepared.error):
                return prepared
            await next_look()


async def unprepare(rig: Rig) -> None:
    """Unprepare as kubelet does."""
    async with asyncio.timeout(LIMIT_S):
        while await rig.kubelet.unprepare_claims([PAIR]):
            await next_look()


def held(rig: Rig) -> list[dict[str, tuple[str, ...]]]:
    """What the ledger has, by holder."""
    return [holding.devices for each in rig.plane.ledger.allocations.values() for holding in each.holdings]


def nodes(rig: Rig) -> list[str]:
    """The device nodes that the claim's CDI files give to containers."""
    return sorted(
        node.path
        for path in rig.cdi_dir.glob(f"*_{PAIR.uid}.json")
        for cdi_device in parse(path.read_bytes()).devices
        for node in cdi_device.edits.device_nodes
    )


def held_cpus(rig: Rig) -> list[str]:
    """The CPUs that the ledger has, by holder."""
    return [str(holding.cpus) for each in rig.plane.ledger.allocations.values() for holding in each.holdings]


def names(*others: str) -> list[str]:
    """The CDI names of both parts, behind those of others."""
    return [*others, f"topobus.dev/gpu=claim-u-pair-{GPU}", f"topobus.dev/nic=claim-u-pair-{NIC}"]


@pytest.mark.memory_bus
async def test_container_gets_both_parts_of_a_shape_by_one_device(rig: Rig) -> None:
    """Kubelet has the shape, the container the CDI names of both parts, the ledger the parts.

    Another claim gets none of them until the end.
    """
    await rig.plane.store(claim("rival", RIVAL.uid, NIC))
    pod = Pod(name="p", uid="u-p", containers=(Container(name="main"),), claims=(PAIR,))
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        admission = await rig.kubelet.admit(pod)
        prepared = await prepare(rig)
        during, refused = held(rig), await prepare(rig, RIVAL)
        listed = (await rig.pods()).containers
        given = nodes(rig)
        await rig.plane.drop("pair")
        await rig.kubelet.remove(pod)
        free = held(rig)
        later = await prepare(rig, RIVAL)

    assert isinstance(admission, Admission), admission
    assert admission.claims == (prepared,)
    assert [(each.device, each.pool, list(each.cdi_devices)) for each in prepared.devices] == [(SHAPE, NODE, names())]
    assert (during, given) == ([HELD], [f"/dev/{GPU}", f"/dev/{NIC}"])
    assert f"claim default/pair holds {NIC}" in refused.error
    assert [(each.claim, each.device_class, [device.name for device in each.devices]) for each in listed] == [
        ("default/pair", "gpu", [GPU]),
        ("default/pair", "nic", [NIC]),
    ]
    assert (free, later.error) == ([], "")


@pytest.mark.memory_bus
async def test_container_gets_all_parts_of_a_shape_that_the_operator_adds(rig: Rig) -> None:
    """The gateway reads from the node's alignment which there are."""
    trio = OwnShape(name="trio", parts={"gpu": 2, "nic": 1}, within="numa")
    shape, *_ = (name for name in shapes_of(INVENTORIES.values(), [trio]).parts if plain(name).startswith("shape-trio"))
    first, second = sorted(device.name for device in INVENTORIES["gpu"].devices)[:2]
    await rig.plane.bus.put(ALIGNMENT, NodeAlignment(node=NODE, own_shapes=(trio,)), node=NODE)
    await rig.plane.store(claim("pair", PAIR.uid, shape))
    async with rig.kubelet, rig.gateway():
        prepared = await prepare(rig)
        held_parts = held(rig)

    assert [(each.device, len(each.cdi_devices)) for each in prepared.devices] == [(shape, 3)]
    assert held_parts == [{"gpu": (first, second), "nic": (NIC,)}]


@pytest.mark.memory_bus
async def test_claims_of_shapes_and_single_cpus_have_different_cpus(rig: Rig) -> None:
    """Of the four CPUs of a node a shape has two, and a claim for two single CPUs the others. Kubelet gets
    the names of the allocation, and `topobus pods` lists the group.
    """
    await rig.plane.store(claim("pair", PAIR.uid, WITH_CPUS))
    await rig.plane.store(claim("rival", RIVAL.uid, *SINGLE[:2]))
    pod = Pod(name="p", uid="u-p", containers=(Container(name="main"),), claims=(PAIR,))
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        admission, rival = await rig.kubelet.admit(pod), await prepare(rig, RIVAL)
        chosen, again = held_cpus(rig), await prepare(rig, RIVAL)
        answer = await rig.pods()
        await rig.plane.drop("pair")
        await rig.kubelet.remove(pod)
        left = held_cpus(rig)

    assert isinstance(admission, Admission), admission
    assert [each.device for each in admission.claims[0].devices] == [WITH_CPUS]
    assert [each.device for each in rival.devices] == SINGLE[:2]
    assert (chosen, left, again) == (["0-1", "2-3"], ["2-3"], rival)
    assert {(each.device_class, *(device.name for device in each.devices)) for each in answer.containers} == {
        ("cpu", "cpu-numa-0"),
        ("gpu", GPU),
        ("nic", NIC),
    }
    assert answer.disagreements == ()
    requests = [request for request in rig.plane.asks.requests("prepare") if request.devices == ("cpu-numa-0",)]
    assert {request.owner.uid: str(request.cpus["cpu-numa-0"]) for request in requests} == {
        PAIR.uid: "0-1",
        RIVAL.uid: "2-3",
    }


@pytest.mark.memory_bus
async def test_shape_is_refused_when_the_machine_does_not_have_it(rig: Rig) -> None:
    """The text names it and says what to do; nothing is held."""
    await rig.plane.store(claim("pair", PAIR.uid, "shape-half-7"))
    async with rig.kubelet, rig.gateway():
        prepared = await prepare(rig)

    assert "this machine has no shape shape-half-7 now" in prepared.error
    assert held(rig) == []


@pytest.mark.law
@pytest.mark.parametrize(
    ("shape", "cpus", "others"),
    [(SHAPE, "", ()), (WITH_CPUS, "0-1", ("topobus.dev/cpu=claim-u-pair-cpu-numa-0",))],
    ids=["devices", "with-cpus"],
)
async def test_shape_is_prepared_whole_when_the_gateway_is_killed_at_any_step(
    rig: Rig, lives: GatewayLives, shape: str, cpus: str, others: tuple[str, ...]
) -> None:
    """SIGKILL at each step of the preparation: asked again, all parts are prepared once, its CPUs were
    chosen once, and a claim for one of the parts is refused. Undone, nothing of it is left.
    """
    await rig.plane.store(claim("rival", RIVAL.uid, GPU))
    paths = [f"/dev/{name}" for name in (*(["cpu-numa-0"] if others else []), GPU, NIC)]
    for step in steps(MOST_STEPS):
        await rig.plane.store(claim("pair", PAIR.uid, shape))
        await rig.kubelet.wait_for_driver(DRIVER)
        lives.doom(f"NodePrepareResources/{DRIVER}", step)
        await rig.kubelet.prepare_claims([PAIR])
        if not await lives.died():
            break
        at = f"killed at {lives.where()}"
        await lives.start()
        prepared = await prepare(rig)
        assert [(each.device, list(each.cdi_devices)) for each in prepared.devices] == [(shape, names(*others))], at
        assert (held(rig), held_cpus(rig), nodes(rig)) == ([HELD], [cpus], paths), at
        assert GPU in (await prepare(rig, RIVAL)).error, at
        await rig.plane.drop("pair")
        await unprepare(rig)
        assert (held(rig), Checkpoint.load(Path(rig.settings.checkpoint_path)).entries()) == ([], ()), at

    assert lives.taken().count("before ask prepare") == len(paths), lives.taken()
    assert 20 <= step - 1 < MOST_STEPS - 2, f"{step - 1} steps"


@pytest.mark.memory_bus
async def test_parts_are_made_ready_again_when_the_machine_was_rebooted(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelet gets the same device, and the container the numbers that are true now."""
    async with rig.kubelet, rig.gateway():
        before = await prepare(rig)
    other = Tree(HardwareSettings(root=str(tmp_path / "rebooted")))
    file = other.path(BOOT_ID_FILE)
    file.parent.mkdir(parents=True)
    file.write_text("another-boot\n")
    monkeypatch.setattr(boot, "LIVE", other)
    rig.plane.renumbered = {GPU: "/dev/gpu-7"}
    async with rig.kubelet, rig.gateway():
        after = await prepare(rig)

    assert after == before
    assert (nodes(rig), held(rig)) == (sorted(["/dev/gpu-7", f"/dev/{NIC}"]), [HELD])
    assert len(rig.plane.asks.requests("prepare")) == 4


async def test_status_of_a_claim_has_the_shape_alone(nats_server: NatsServer, server: ApiServerSimulator) -> None:
    """An API server refuses entries of devices that the allocation does not name."""
    async with make_rig(nats_server.url) as rig:
        rig.join(server)
        for device_class, inventory in INVENTORIES.items():
            await rig.plane.show(device_class, *inventory.devices)
        pair = allocated(server, "pair", SHAPE)
        async with rig.gateway(), rig.kubelet:
            prepared = await prepare(rig, pair)
            await server.until(lambda: _said(server) == [(SHAPE, "True", "Prepared")], what="the status of the shape")
            await rig.kubelet.unprepare_claims([pair])
            await server.until(lambda: _said(server) == [], what="no status")

    assert prepared.error == ""
    writes = [request for request in server.requests if request.path.endswith("/pair/status")]
    assert {(request.query["fieldManager"], request.code) for request in writes} == {("shape.topobus.dev", 200)}


def _said(server: ApiServerSimulator) -> list[tuple[str, str, str]]:
    (stored,) = server.objects("ResourceClaim")
    entries = stored.get("status", {}).get("devices") or []
    return [(entry["device"], entry["conditions"][0]["status"], entry["conditions"][0]["reason"]) for entry in entries]
