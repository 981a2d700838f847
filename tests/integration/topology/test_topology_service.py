"""The topology service on a real nats-server: placements, refusals, adoption, the ledger and its
events, over crashes and races.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from msgspec import structs

from support.alignment_nodes import container, owner, pod
from support.asking import ask_patiently
from support.reading import Reader
from support.topology_node import LIMIT_S, NODE, SECOND, TRAINER, ask_place, decisions, publish_node, topology
from topobus.bus.bus import Bus
from topobus.engine.alignment.planning.placement import place
from topobus.formats.messages.catalogue import ADOPT, COMMIT, LEDGER, PLACE, PREFER, RELEASE
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import (
    Adopted,
    AdoptRequest,
    CommitRequest,
    PlaceRequest,
    PreferRequest,
    ReleaseRequest,
)
from topobus.simulation.nats_server import NatsServer
from topobus.values.errors import ContractError
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import AllocationPhase, Ledger
from topobus.values.outcome import MemoryBlock, Placement, Refusal
from topobus.values.request import Owner, OwnerKind

pytestmark = pytest.mark.integration


@pytest_asyncio.fixture
async def service(nats_server: NatsServer, bus: Bus) -> AsyncIterator[asyncio.subprocess.Process]:
    """The topology service on the demo machine."""
    await publish_node(bus)
    async with topology(nats_server.url) as process:
        yield process


@pytest.mark.usefixtures("service")
async def test_topology_places_the_demo_pod_on_one_node_when_asked(bus: Bus) -> None:
    """16 CPUs, 2 GPUs and 2 NICs land on NUMA node 0, each NIC under a GPU's switch, and a second
    pod learns what to free.
    """
    first = await ask_place(bus, "op-1", TRAINER)
    second = await ask_place(bus, "op-2", SECOND)

    assert isinstance(first.result, Placement)
    placed = first.result.containers[0]
    assert placed.numa_nodes == NodeSet(0)
    assert placed.cpus == CpuSet.parse("0-7,112-119")
    assert placed.devices == {"gpu": ("gpu-0", "gpu-1"), "nic": ("nic-0", "nic-1")}
    assert next(reason.facts["count"] for reason in placed.reasons if reason.code == "same-switch") == 2
    assert isinstance(second.result, Refusal)
    assert {"no-common-numa-node", "policy-not-met", "relax"} <= {reason.code for reason in second.result.reasons}
    assert [reason.facts["owner"] for reason in second.result.to_free] == [TRAINER.owner.key]


@pytest.mark.usefixtures("service")
async def test_topology_gives_the_same_answer_when_an_operation_is_asked_again(bus: Bus) -> None:
    """A retried operation changes nothing and answers as before, placements and refusals alike."""
    placed, refused = await ask_place(bus, "op-1", TRAINER), await ask_place(bus, "op-2", SECOND)
    again = [await ask_place(bus, "op-1", TRAINER), await ask_place(bus, "op-2", SECOND)]
    entry = await bus.get(LEDGER, node=NODE)

    assert [place_reply.decision_id for place_reply in again] == [placed.decision_id, refused.decision_id]
    assert [place_reply.result for place_reply in again] == [placed.result, refused.result]
    assert entry is not None
    assert entry.value.sequence == 2


@pytest.mark.usefixtures("service")
async def test_topology_announces_each_decision_with_all_its_inputs_when_made(bus: Bus) -> None:
    """The event of a decision is enough to replay it, and to get the same answer."""
    await ask_place(bus, "op-1", TRAINER)
    await ask_place(bus, "op-2", SECOND)
    await bus.ask(RELEASE, ReleaseRequest(op_id="op-3", owner=TRAINER.owner), node=NODE)
    events = await decisions(bus, 3)

    assert [event.verb for event in events] == ["place", "place", "release"]
    for event in events[:2]:
        assert event.view is not None
        assert event.request is not None
        assert place(event.view, event.request) == event.outcome


@pytest.mark.usefixtures("service")
async def test_topology_writes_nothing_when_it_is_a_dry_run(bus: Bus) -> None:
    """A dry run answers and is told of, and leaves the ledger alone."""
    reply = await ask_place(bus, "op-1", TRAINER, is_dry_run=True)
    (event,) = await decisions(bus, 1)
    entry = await bus.get(LEDGER, node=NODE)

    assert isinstance(reply.result, Placement)
    assert event.is_dry_run
    assert event.id == reply.decision_id
    assert entry is not None
    assert (entry.value.sequence, entry.value.allocations) == (0, {})


async def test_topology_keeps_off_kubelets_cpus_when_its_manager_gave_them(bus: Bus, nats_server: NatsServer) -> None:
    """CPUs and memory that kubelet gave a container are taken for everybody.

    A newer word about the same CPUs replaces the older.
    """
    given = {"cpu": tuple(f"cpu-{index}" for index in range(4))}
    memory = (MemoryBlock(kind="memory", nodes=NodeSet(0), shares=((0, 1 << 30),)),)
    old, new = (Owner(kind=OwnerKind.CONTAINER, namespace="default", name=name, uid="main") for name in ("old", "new"))
    async with topology(nats_server.url):
        await publish_node(bus)
        await ask_patiently(
            bus, ADOPT, AdoptRequest(op_id="a", owner=old, devices=given, memory=memory, container="main"), node=NODE
        )
        placed = await ask_place(bus, "p", TRAINER)
        newer = await bus.ask(ADOPT, AdoptRequest(op_id="b", owner=new, devices=given, container="main"), node=NODE)
        only = await bus.ask(
            ADOPT, AdoptRequest(op_id="c", owner=old, devices={}, memory=memory, container="main"), node=NODE
        )
        entry = await bus.get(LEDGER, node=NODE)

    assert isinstance(placed.result, Placement), placed.result
    assert not placed.result.containers[0].cpus & CpuSet.parse("0-3")
    assert isinstance(newer.result, Adopted), newer.result
    assert newer.result.displaced == (old,)
    assert isinstance(only.result, Adopted), only.result
    assert entry is not None
    (held,) = entry.value.allocations[old.key].holdings
    assert (held.container, held.cpus, held.memory, held.memory_bytes) == ("main", CpuSet(), memory, 1 << 30)


@pytest.mark.usefixtures("service")
async def test_topology_adopts_what_kubelet_chose_when_allocate_comes(bus: Bus) -> None:
    """Kubelet's choice displaces its own older holding of a device, but never a pod's."""
    await ask_place(bus, "op-1", TRAINER)
    kubelet = [
        Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid=uid)
        for uid in ("a", "b", "c")
    ]
    first = await bus.ask(
        ADOPT, AdoptRequest(op_id="op-2", owner=kubelet[0], devices={"gpu": ("gpu-4", "gpu-5")}), node=NODE
    )
    second = await bus.ask(
        ADOPT, AdoptRequest(op_id="op-3", owner=kubelet[1], devices={"gpu": ("gpu-5",), "cpu": ("cpu-60",)}), node=NODE
    )
    third = await bus.ask(ADOPT, AdoptRequest(op_id="op-4", owner=kubelet[2], devices={"gpu": ("gpu-0",)}), node=NODE)
    unknown = await bus.ask(
        ADOPT, AdoptRequest(op_id="op-5", owner=kubelet[2], devices={"gpu": ("gpu-99",)}), node=NODE
    )
    released = await bus.ask(RELEASE, ReleaseRequest(op_id="op-6", owner=kubelet[1]), node=NODE)

    assert isinstance(first.result, Adopted)
    assert isinstance(second.result, Adopted)
    assert second.result.displaced == (kubelet[0],)
    assert isinstance(third.result, Refusal)
    assert third.result.reasons[0].facts["owner"] == TRAINER.owner.key
    assert isinstance(unknown.result, Refusal)
    assert unknown.result.reasons[0].code == "unknown-device"
    assert released.devices == {"cpu": ("cpu-60",), "gpu": ("gpu-5",)}


@pytest.mark.usefixtures("service")
async def test_topology_prefers_whole_switches_when_kubelet_asks(bus: Bus) -> None:
    """GetPreferredAllocation's answer keeps what must be included, has the size asked for, and is
    the closest set.
    """
    await ask_place(bus, "op-1", TRAINER)
    available = tuple(f"gpu-{index}" for index in range(2, 8))
    reply = await bus.ask(
        PREFER, PreferRequest(device_class="gpu", available=available, must_include=("gpu-5",), size=2), node=NODE
    )

    assert sorted(reply.devices) == ["gpu-4", "gpu-5"]


@pytest.mark.usefixtures("service")
async def test_topology_keeps_answering_when_requests_are_impossible(bus: Bus) -> None:
    """Malformed and impossible requests get reasons, and the next request is served."""
    codes = []
    for number, request in enumerate(
        [pod("a", container(gpu=0)), pod("b", container(tpu=1)), pod("c", container(gpu=9)), pod("d")]
    ):
        reply = await ask_place(bus, f"op-{number}", request)
        assert isinstance(reply.result, Refusal)
        codes.append(reply.result.reasons[0].code)
    with pytest.raises(ContractError):
        await ask_place(bus, "", TRAINER)
    last = await ask_place(bus, "op-9", TRAINER)

    assert codes == ["count-zero", "unknown-class", "not-enough-devices", "no-containers"]
    assert isinstance(last.result, Placement)


@pytest.mark.usefixtures("service")
async def test_topology_refuses_an_operation_id_when_another_owner_used_it(bus: Bus) -> None:
    """A stored answer goes to the owner that it was made for, never to another one's request."""
    await ask_place(bus, "op-1", TRAINER)
    other = await ask_place(bus, "op-1", pod("other", container(gpu=1)))

    assert isinstance(other.result, Refusal)
    assert other.result.reasons[0].code == "operation-reused"


async def test_topology_refuses_to_start_when_the_policy_does_not_exist(nats_server: NatsServer) -> None:
    """An unknown policy is a configuration error with its own exit status, never a default."""
    async with topology(nats_server.url, TOPOBUS_TOPOLOGY__ALIGNMENT__POLICY="strict") as process:
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 78


@pytest.mark.usefixtures("service")
async def test_topology_says_when_the_store_was_rolled_back_under_it(bus: Bus) -> None:
    """A ledger that somebody deleted is written again from memory, as a new epoch, with every
    holding.
    """
    await ask_place(bus, "op-1", TRAINER)
    await bus.delete(LEDGER, node=NODE)
    # A service that starts answers place a moment before release.
    await ask_patiently(bus, RELEASE, ReleaseRequest(op_id="op-2", owner=owner("nobody")), node=NODE)
    entry = await bus.get(LEDGER, node=NODE)

    assert entry is not None
    assert entry.value.epoch == 2
    assert TRAINER.owner.key in entry.value.allocations


@pytest.mark.usefixtures("service")
async def test_topology_puts_back_what_it_answered_when_somebody_forges_its_ledger(bus: Bus) -> None:
    """Whatever is written over the ledger, every reader sees the answered owners again, with
    numbers that it can read, and none sees an empty one as true.
    """
    await ask_place(bus, "op-1", TRAINER)
    api = bus._jetstream
    before = await bus.get(LEDGER, node=NODE)
    assert before is not None
    forgeries = [
        encode(Ledger(node=NODE, epoch=50, sequence=100)),
        encode(structs.replace(before.value, epoch=2**53, sequence=2**53)),
        encode(before.value).replace(b'"epoch":1', b'"epoch":9007199254740994'),
        encode(structs.replace(before.value, allocations={})),
    ]
    async with Reader(bus.watch(LEDGER, node=NODE)) as changes:
        for number, forged in enumerate(forgeries):
            at = (
                await api.store(f"$KV.{LEDGER.bucket}.{NODE}", forged, stream=f"KV_{LEDGER.bucket}", headers={})
            ).sequence
            # An operation makes it look at once; without one it looks by itself within seconds.
            await bus.ask(RELEASE, ReleaseRequest(op_id=f"other-{number}", owner=owner("nobody")), node=NODE)
            entry = await bus.get(LEDGER, node=NODE)
            assert entry is not None
            assert entry.revision > at
            assert TRAINER.owner.key in entry.value.allocations
            assert entry.value.epoch < 2000
            seen = await changes.until(lambda items, revision=entry.revision: items[-1].revision >= revision)

        assert TRAINER.owner.key in seen[-1].value.allocations


@pytest.mark.usefixtures("service")
async def test_topology_keeps_a_reservation_when_it_is_committed(bus: Bus) -> None:
    """A reservation holds its devices.

    Commit keeps them, release aborts, and what was never reserved cannot be committed.
    """
    reserved = await ask_place(bus, "op-0", pod("warm", container(cpus=2)))
    reply = await bus.ask(PLACE, PlaceRequest(op_id="op-1", pod=TRAINER, is_reservation=True), node=NODE)
    held = await bus.get(LEDGER, node=NODE)
    committed = await bus.ask(COMMIT, CommitRequest(op_id="op-2", owner=TRAINER.owner), node=NODE)
    again = await bus.ask(COMMIT, CommitRequest(op_id="op-2", owner=TRAINER.owner), node=NODE)
    nothing = await bus.ask(COMMIT, CommitRequest(op_id="op-3", owner=owner("nobody")), node=NODE)
    kept = await bus.get(LEDGER, node=NODE)
    events = await decisions(bus, 4)

    assert isinstance(reserved.result, Placement)
    assert isinstance(reply.result, Placement)
    assert held is not None
    assert kept is not None
    assert held.value.allocations[TRAINER.owner.key].phase is AllocationPhase.RESERVED
    assert kept.value.allocations[TRAINER.owner.key].phase is AllocationPhase.COMMITTED
    assert (committed.refusal, again.refusal) == (None, None)
    assert nothing.refusal is not None
    assert [reason.code for reason in nothing.refusal.reasons] == ["no-reservation"]
    assert [event.verb for event in events] == ["place", "place", "commit", "commit"]
