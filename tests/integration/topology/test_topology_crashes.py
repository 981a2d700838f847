"""The topology service dies at every step of every operation, on a real nats-server: nothing leaks,
nothing is lost, each decision is told of once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from lab.memory_nats.fates import Died, Dies, FatedBus, Fates
from support.alignment_nodes import container, dgx_facts, pod
from support.looks import next_look, until
from topobus.bus.bus import Bus
from topobus.bus.streams.jetstream import JetStream, StoredMessage
from topobus.bus.streams.state import Written
from topobus.engine.ledger import transitions
from topobus.engine.ledger.ledger_invariant import check_holders
from topobus.formats.messages.catalogue import DECISION, INVENTORY, LEDGER, MACHINE
from topobus.formats.messages.messages import AdoptRequest, CommitRequest, DecisionEvent, PlaceRequest, ReleaseRequest
from topobus.formats.messages.nouns import Event
from topobus.process.readiness import Readiness
from topobus.testing.clock import ManualClock
from topobus.topology.announcer import Announcer
from topobus.topology.ask_handlers import AskHandlers
from topobus.topology.ledger_store import LedgerStore
from topobus.topology.metrics import TopologyMetrics
from topobus.topology.node_inputs import NodeInputs
from topobus.topology.reservations import Reservations
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.ledger import AllocationPhase, Holding, Ledger
from topobus.values.request import Owner, OwnerKind
from topobus.values.view import NodeAlignment

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

NODE = "demo-node"
LIMIT_S = 30.0
EXPIRE_S = 60.0
M = TypeVar("M")

TRAINER = pod("trainer", container(cpus=4, gpu=2))
IMPOSSIBLE = pod("impossible", container(gpu=9))
KUBELET = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid="a")


class MortalBus(FatedBus):
    """A bus in a process that dies at one of its operations: before it is sent, or after it has
    happened and before anybody knows.
    """

    def __init__(self, bus: Bus, *, dies_at: int = 0, is_after: bool = False) -> None:
        counted = frozenset({"get", "history", "compare_and_set", "publish", "last"})
        super().__init__(bus, Fates({dies_at: Dies(is_after)}, counted=counted))

    async def publish(self, event: Event[M], value: M, *, event_id: str, **parts: str) -> int:
        """Publish under another message id, so that the server's own de-duplication cannot hide a
        second event.
        """
        return await super().publish(event, value, event_id=f"{event_id}-{id(self)}", **parts)


class Life:
    """One life of the service: its parts over one mortal bus."""

    def __init__(self, bus: Bus, mortal: MortalBus, clock: ManualClock, name: str) -> None:
        self.name = name
        """Begins operation ids: a decision's id is made of them, and rounds share one stream."""
        metrics, readiness = TopologyMetrics(None), Readiness()
        self.mortal = mortal
        self.opened = asyncio.Event()
        self.facts = NodeInputs(bus, NodeAlignment(node=NODE), readiness)
        self.book = LedgerStore(mortal, node=NODE, readiness=readiness, metrics=metrics)
        self.announcer = Announcer(mortal, node=NODE, store=self.book, metrics=metrics)
        self.reservations = Reservations(store=self.book, announcer=self.announcer, clock=clock, expire_s=EXPIRE_S)
        self.answers = AskHandlers(
            mortal,
            node=NODE,
            inputs=self.facts,
            store=self.book,
            announcer=self.announcer,
            clock=clock,
            metrics=metrics,
            hint_timeout_s=0.02,
        )

    async def do(self, operation: Callable[[Life], Awaitable[Any]]) -> None:
        """Do one operation and announce it, until done or dead."""
        tasks = [asyncio.ensure_future(self._announce()), asyncio.ensure_future(self._watch())]
        try:
            async with asyncio.timeout(LIMIT_S):
                await self.book.open()
                self.opened.set()
                while True:
                    try:
                        await operation(self)
                        break
                    except PeerUnavailable:
                        await next_look()
                died = self.mortal.fates.died
                await until(lambda: not transitions.unannounced(self.book.ledger) or died.is_set())
        except Died:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _announce(self) -> None:
        try:
            await self.opened.wait()
            await self.announcer.run()
        except Died:
            pass

    async def _watch(self) -> None:
        await self.facts.watch()


async def place(life: Life) -> Any:
    """Place the trainer."""
    return await life.answers.place(PlaceRequest(op_id=f"{life.name}-1", pod=TRAINER))


async def refuse(life: Life) -> Any:
    """Ask for what cannot be had."""
    return await life.answers.place(PlaceRequest(op_id=f"{life.name}-1", pod=IMPOSSIBLE))


async def reserve(life: Life) -> Any:
    """Reserve for the trainer."""
    return await life.answers.place(PlaceRequest(op_id=f"{life.name}-1", pod=TRAINER, is_reservation=True))


async def adopt(life: Life) -> Any:
    """Write down kubelet's choice."""
    return await life.answers.adopt(AdoptRequest(op_id=f"{life.name}-1", owner=KUBELET, devices={"gpu": ("gpu-0",)}))


async def release(life: Life) -> Any:
    """Let go of the trainer."""
    return await life.answers.release(ReleaseRequest(op_id=f"{life.name}-2", owner=TRAINER.owner))


async def commit(life: Life) -> Any:
    """Keep what the trainer has reserved."""
    return await life.answers.commit(CommitRequest(op_id=f"{life.name}-2", owner=TRAINER.owner))


async def expire(life: Life) -> Any:
    """Look twice, a minute apart."""
    await life.reservations.expire()
    clock: Any = life.reservations._clock
    clock.advance(EXPIRE_S)
    await life.reservations.expire()


# What goes before, what is cut short, the operations told of in the end, who holds what in the end.
STORIES: dict[
    str,
    tuple[list[Callable[[Life], Awaitable[Any]]], Callable[[Life], Awaitable[Any]], int, dict[str, AllocationPhase]],
] = {
    "place": ([], place, 1, {TRAINER.owner.key: AllocationPhase.COMMITTED}),
    "refuse": ([], refuse, 1, {}),
    "reserve": ([], reserve, 1, {TRAINER.owner.key: AllocationPhase.RESERVED}),
    "adopt": ([], adopt, 1, {KUBELET.key: AllocationPhase.COMMITTED}),
    "release": ([place], release, 2, {}),
    "commit": ([reserve], commit, 2, {TRAINER.owner.key: AllocationPhase.COMMITTED}),
    "abort": ([reserve], release, 2, {}),
    "expire": ([reserve], expire, 2, {}),
}


@asynccontextmanager
async def fresh(bus: Bus) -> AsyncIterator[None]:
    """A node that says what it has, and no ledger yet; nothing is left for the next round."""
    machine, inventories = dgx_facts()
    await bus.put(MACHINE, machine, node=NODE)
    for device_class, inventory in inventories.items():
        await bus.put(INVENTORY, inventory, node=NODE, device_class=device_class)
    yield
    await bus.delete(LEDGER, node=NODE)


async def events(bus: Bus, seen: set[int]) -> list[DecisionEvent]:
    """Decision events that were not there before."""
    received = [
        received_event
        for received_event in await bus.last(DECISION, limit=256, node=NODE)
        if received_event.sequence not in seen
    ]
    seen |= {received_event.sequence for received_event in received}
    return [received_event.value for received_event in received]


@pytest.mark.parametrize("story", STORIES)
async def test_topology_leaks_and_loses_nothing_when_it_dies_at_any_step(bus: Bus, story: str) -> None:
    """Whatever step the process dies at, asking again after a restart ends in the same ledger, and
    every decision was told of exactly once.
    """
    before, cut, event_count, holding = STORIES[story]
    seen: set[int] = set()
    wholes: list[tuple[int, list[tuple[Holding, ...]]]] = []
    deaths = 0
    step, is_after = 0, False
    while True:
        at = f"step-{step}-{'after' if is_after else 'before'}"
        async with fresh(bus):
            clock = ManualClock()
            for operation in before:
                await Life(bus, MortalBus(bus), clock, at).do(operation)
            mortal = MortalBus(bus, dies_at=step, is_after=is_after)
            await Life(bus, mortal, clock, at).do(cut)
            if mortal.fates.died.is_set():
                deaths += 1
                await Life(bus, MortalBus(bus), clock, at).do(cut)
            entry = await bus.get(LEDGER, node=NODE)
            published = await events(bus, seen)

        assert entry is not None
        ledger = entry.value
        check_holders(ledger)
        assert {key: allocation.phase for key, allocation in ledger.allocations.items()} == holding, at
        assert transitions.unannounced(ledger) == (), at
        assert sorted(decision_event.id for decision_event in published) == sorted(
            operation.decision_id for operation in ledger.operations.values()
        ), at
        assert len(published) == event_count, at
        wholes.append((ledger.sequence, [allocation.holdings for allocation in ledger.allocations.values()]))
        if step and not mortal.fates.died.is_set():
            break
        step, is_after = (step, True) if step and not is_after else (step + 1, False)

    # Loading the ledger, its write, the look into the stream, the event and the mark: fewer deaths
    # would mean that steps were missed.
    assert deaths >= 8
    assert all(whole == wholes[0] for whole in wholes)


@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
async def test_ledger_is_neither_begun_nor_written_back_when_the_server_has_lost_its_index(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, *, is_listed: bool, is_open: bool
) -> None:
    """nats-server 2.9.10 held all revisions after a SIGKILL and found none by its key: it would have
    taken an empty ledger, on a node whose devices are in use.
    """
    book = LedgerStore(bus, node=NODE, readiness=Readiness(), metrics=TopologyMetrics(None))
    await bus.compare_and_set(LEDGER, Ledger(node="other-node"), 0, node="other-node")
    revision = await bus.compare_and_set(LEDGER, Ledger(node=NODE, sequence=7), 0, node=NODE)
    if is_open:
        await book.open()
    last_message, subject_counts = JetStream.last_message, JetStream.subject_counts

    async def find_nothing(jetstream: JetStream, stream: str, subject: str) -> StoredMessage | None:
        return None if NODE in subject else await last_message(jetstream, stream, subject)

    async def list_others(jetstream: JetStream, stream: str, pattern: str = ">") -> dict[str, int]:
        counts = await subject_counts(jetstream, stream, pattern)
        return {subject: count for subject, count in counts.items() if NODE not in subject}

    with monkeypatch.context() as broken:
        broken.setattr(JetStream, "last_message", find_nothing)
        if not is_listed:
            broken.setattr(JetStream, "subject_counts", list_others)
        with pytest.raises(ContractError, match=f"{NODE}: nats-server holds 1 of its revisions and finds none"):
            await (book._reload() if is_open else book.open())

    entry = await bus.get(LEDGER, node=NODE)
    assert entry is not None
    assert Written(revision=entry.revision) == revision


async def test_ledger_is_begun_where_an_operator_deleted_it(bus: Bus) -> None:
    """The marker of a deleted key is a message of that key."""
    await bus.compare_and_set(LEDGER, Ledger(node=NODE, sequence=7), 0, node=NODE)
    await bus.delete(LEDGER, node=NODE)
    book = LedgerStore(bus, node=NODE, readiness=Readiness(), metrics=TopologyMetrics(None))

    await book.open()

    assert book.ledger == Ledger(node=NODE)
