"""A topology service that dies, starts again beside another one, or starts with other options: the
ledger is one, and every decision is told once.
"""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from support.alignment_nodes import container, dgx_facts, pod
from support.topology_node import NODE, SECOND, TRAINER, ask_place, decisions, no_more_than, publish_node, topology
from topobus.bus.bus import Bus
from topobus.engine.alignment.planning.node_view import node_view
from topobus.engine.alignment.planning.placement import place
from topobus.engine.ledger import transitions
from topobus.engine.ledger.ledger_invariant import check_holders
from topobus.formats.messages.catalogue import COMMIT, DECISION, LEDGER, PLACE, RELEASE
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import (
    CommitRequest,
    DecisionEvent,
    PlaceRequest,
    ReleaseRequest,
)
from topobus.simulation.nats_server import NatsServer
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Ledger, PendingDecision
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import Policy
from topobus.values.view import AlignmentOptions

pytestmark = pytest.mark.integration


def crashed_ledger() -> tuple[Ledger, DecisionEvent]:
    """The ledger that a process leaves which died between its write and its event, and the event it
    owes.
    """
    machine, inventories = dgx_facts()
    view = node_view(machine, inventories, Ledger(node=NODE), AlignmentOptions(), CpuSet())
    outcome = place(view, TRAINER)
    assert isinstance(outcome, Placement)
    pending = PendingDecision(
        owner=TRAINER.owner, time="2026-01-01T00:00:00.000000Z", ledger_sequence=1, request=TRAINER, view=view
    )
    step = transitions.reserve(
        Ledger(node=NODE), op_id="op-1", request=TRAINER, placement=outcome, decision_id="d-crashed", pending=pending
    )
    event = DecisionEvent(
        id="d-crashed",
        verb="place",
        node=NODE,
        op_id="op-1",
        time=pending.time,
        owner=TRAINER.owner,
        request=TRAINER,
        view=view,
        outcome=outcome,
        ledger_sequence=1,
    )
    return step.ledger, event


@pytest.mark.parametrize("is_event_out", [False, True], ids=["before-the-event", "after-the-event"])
async def test_topology_announces_exactly_once_when_it_died_around_the_event(
    nats_server: NatsServer, bus: Bus, *, is_event_out: bool
) -> None:
    """A start emits what the crash left unsaid, complete, and repeats nothing that was said."""
    await publish_node(bus)
    ledger, owed = crashed_ledger()
    await bus.compare_and_set(LEDGER, ledger, 0, node=NODE)
    if is_event_out:
        # Another message id, so that the server's own de-duplication cannot hide a repeat.
        await bus.publish(DECISION, owed, event_id="before-the-crash", node=NODE)

    async with topology(nats_server.url):
        reply = await ask_place(bus, "op-2", SECOND)
        events = await decisions(bus, 2)

    assert [event.id for event in events] == ["d-crashed", reply.decision_id]
    assert events[0] == owed
    assert await no_more_than(bus, 2)


async def test_topology_answers_an_old_operation_when_killed_and_started_again(
    nats_server: NatsServer, bus: Bus
) -> None:
    """Kill -9 after the answer loses nothing: the operation, the holding and one event are there
    after the restart.
    """
    await publish_node(bus)
    async with topology(nats_server.url) as process:
        before = await ask_place(bus, "op-1", TRAINER)
        process.kill()
        await process.wait()
    async with topology(nats_server.url):
        after = await ask_place(bus, "op-1", TRAINER)
        await ask_place(bus, "op-2", SECOND)
        events = await decisions(bus, 2)

    assert (after.decision_id, after.result) == (before.decision_id, before.result)
    assert [event.op_id for event in events] == ["op-1", "op-2"]
    assert await no_more_than(bus, 2)


async def test_topology_hands_nothing_out_twice_when_two_instances_race(nats_server: NatsServer, bus: Bus) -> None:
    """Two instances of one node's service (a roll-over that overlaps) never give one device to two
    pods.
    """
    await publish_node(bus)
    async with topology(nats_server.url), topology(nats_server.url):
        await ask_place(bus, "warm", pod("warm", container(cpus=2)))
        replies = await asyncio.gather(
            *(ask_place(bus, f"op-{n}", pod(f"p{n}", container(cpus=8, gpu=1, nic=1))) for n in range(12))
        )

    placed = [reply.result for reply in replies if isinstance(reply.result, Placement)]
    gpus = [name for placement in placed for name in placement.containers[0].devices["gpu"]]
    entry = await bus.get(LEDGER, node=NODE)
    assert entry is not None
    check_holders(entry.value)
    assert sorted(gpus) == [f"gpu-{n}" for n in range(8)]
    assert sum(isinstance(reply.result, Refusal) for reply in replies) == 4
    assert {allocation.owner.name for allocation in entry.value.allocations.values()} == {
        "warm",
        *(f"p{n}" for n in range(12)),
    } - {f"p{n}" for n, reply in enumerate(replies) if isinstance(reply.result, Refusal)}


async def test_topology_puts_back_what_was_answered_when_its_ledger_is_forged_before_it_starts(
    nats_server: NatsServer, bus: Bus
) -> None:
    """A forgery that waits for the next start is judged by the revisions
    that the bucket has kept.
    """
    await publish_node(bus)
    async with topology(nats_server.url):
        await ask_place(bus, "op-1", TRAINER)
    forged = encode(Ledger(node=NODE, epoch=50, sequence=100))
    await bus._jetstream.store(f"$KV.{LEDGER.bucket}.{NODE}", forged, stream=f"KV_{LEDGER.bucket}", headers={})
    async with topology(nats_server.url):
        await ask_place(bus, "op-2", pod("other", container(gpu=1)))
        entry = await bus.get(LEDGER, node=NODE)

    assert entry is not None
    assert TRAINER.owner.key in entry.value.allocations


async def test_topology_aligns_memory_when_the_policy_is_static(nats_server: NatsServer, bus: Bus) -> None:
    """Memory comes from the NUMA node of the GPUs, is held in the ledger to the byte, and is free
    again after the release.
    """
    await publish_node(bus)
    big = [
        pod(name, structs.replace(container(gpu=1), memory_bytes=600 << 30), policy=Policy.RESTRICTED)
        for name in ("one", "two", "three")
    ]
    async with topology(nats_server.url, TOPOBUS_TOPOLOGY__ALIGNMENT__MEMORY__POLICY="static"):
        first, second, third = [await ask_place(bus, f"op-{request.owner.name}", request) for request in big]
        await bus.ask(RELEASE, ReleaseRequest(op_id="op-release", owner=big[0].owner), node=NODE)
        again = await ask_place(bus, "op-again", big[2])

    for reply, node in ((first, 0), (second, 1), (again, 0)):
        assert isinstance(reply.result, Placement)
        assert [block.by_node for block in reply.result.containers[0].memory] == [{node: 600 << 30}]
    assert isinstance(third.result, Refusal)


async def test_topology_lets_a_reservation_go_when_nobody_commits_it(nats_server: NatsServer, bus: Bus) -> None:
    """An asker that dies between reserve and commit leaks nothing: the reservation ends by itself,
    told of as a release.
    """
    await publish_node(bus)
    async with topology(nats_server.url, TOPOBUS_TOPOLOGY__RESERVATIONS__EXPIRE_S="0.2"):
        await ask_place(bus, "op-1", pod("kept", container(cpus=2)))
        await bus.ask(PLACE, PlaceRequest(op_id="op-2", pod=TRAINER, is_reservation=True), node=NODE)
        events = await decisions(bus, 3)
        late = await bus.ask(COMMIT, CommitRequest(op_id="op-3", owner=TRAINER.owner), node=NODE)
        entry = await bus.get(LEDGER, node=NODE)

    assert [(event.verb, event.owner) for event in events[1:]] == [("place", TRAINER.owner), ("release", TRAINER.owner)]
    assert late.refusal is not None
    assert entry is not None
    assert [allocation.owner.name for allocation in entry.value.allocations.values()] == ["kept"]


async def test_topology_searches_for_a_way_when_its_mode_is_corrected(nats_server: NatsServer, bus: Bus) -> None:
    """A pod that kubelet's order refuses is placed by a node in mode corrected, and its event
    replays to the same answer.
    """
    await publish_node(bus)
    settings = {
        "TOPOBUS_TOPOLOGY__ALIGNMENT__MODE": "corrected",
        "TOPOBUS_TOPOLOGY__ALIGNMENT__POLICY": "single-numa-node",
    }
    async with topology(nats_server.url, **settings):
        reply = await ask_place(
            bus, "op-1", pod("both", container("any", cpus=80), container("near-the-fpga", cpus=60, fpga=1))
        )
        (event,) = await decisions(bus, 1)

    assert isinstance(reply.result, Placement)
    assert [container_placement.numa_nodes for container_placement in reply.result.containers] == [
        NodeSet(1),
        NodeSet(0),
    ]
    assert event.view is not None
    assert event.request is not None
    assert place(event.view, event.request) == event.outcome == reply.result
