"""Publishes each decision event exactly once, even when the process dies between the ledger's write
and the event.

The ledger keeps what an event needs until the event is marked as published. At start, and after
every decision, unpublished events are sent in order. An event that the stream already has (the
process died between event and mark) is only marked. The event of a placement is accompanied by one
notice for each class, with the hints that topology gave, sent once and without an acknowledgement.
Marks are written with the next decision, or alone when none comes for a while, because every write
of the ledger is delivered to all services of the node.
"""

from __future__ import annotations

import asyncio

from topobus.bus.bus import Bus
from topobus.engine.ledger.decision_events import event_of
from topobus.engine.ledger.given_hints import given_hints
from topobus.engine.ledger.transitions import unannounced
from topobus.formats.messages.catalogue import DECISION, HINTS
from topobus.formats.messages.messages import DecisionEvent
from topobus.process.clock import is_set_within
from topobus.process.logging import get_logger
from topobus.topology.ledger_store import LedgerStore
from topobus.topology.metrics import TopologyMetrics
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.outcome import Refusal

__all__ = ["Announcer"]

# Events read back at start to find those already published. One process can leave far fewer
# unmarked.
_LOOK_BACK = 64
_RETRY_S = 1.0
# Seconds without a decision after which marks are written alone. The stream recognizes a repeated
# event for two minutes, so a crash before the mark causes no duplicate.
_QUIET_S = 1.0


class Announcer:
    """Publishes decision events in the order of the ledger."""

    def __init__(self, bus: Bus, *, node: str, store: LedgerStore, metrics: TopologyMetrics) -> None:
        self._bus = bus
        self._node = node
        self._store = store
        self._metrics = metrics
        self._wake = asyncio.Event()
        self._dry_runs: list[DecisionEvent] = []
        self._out: set[str] = set()

    def wake(self) -> None:
        """Announce soon, because a decision may be waiting."""
        self._wake.set()

    def publish_dry_run(self, event: DecisionEvent) -> None:
        """Publish a dry run's event when there is time.

        A crash may lose it, because nothing depends on it.
        """
        self._dry_runs.append(event)
        self._wake.set()

    async def run(self) -> None:
        """Announce until cancelled."""
        await self._read_announced()
        self._wake.set()
        while True:
            has_news = await is_set_within(self._wake, asyncio.timeout(_QUIET_S if self._store.has_marks else None))
            try:
                if has_news:
                    self._wake.clear()
                    await self._publish_all()
                else:
                    await self._store.write_marks()
                self._metrics.unannounced.set(self._count_waiting())
            except (PeerUnavailable, ContractError) as err:
                # Also when the store no longer holds a ledger: an event that waits must not end the
                # service that can write the ledger back.
                get_logger().warning("decision.event-delayed", error=str(err))
                self._wake.set()
                await asyncio.sleep(_RETRY_S)

    async def _read_announced(self) -> None:
        """Find out which unannounced decisions the stream already has."""
        waiting = {record.decision_id for _, record in unannounced(self._store.ledger)}
        while waiting:
            try:
                received = await self._bus.last(DECISION, limit=_LOOK_BACK, node=self._node)
            except PeerUnavailable as err:
                get_logger().warning("decision.recall-delayed", error=str(err))
                await asyncio.sleep(_RETRY_S)
                continue
            self._out |= waiting & {received_event.value.id for received_event in received}
            return

    async def _publish_all(self) -> None:
        while self._dry_runs:
            await self._publish(self._dry_runs[0])
            self._dry_runs.pop(0)
        waiting = unannounced(self._store.ledger)
        self._metrics.unannounced.set(self._count_waiting())
        # Decisions that the ledger no longer lists are marked in the bucket.
        self._out &= {record.decision_id for _, record in waiting}
        for op_id, record in waiting:
            event = event_of(self._node, op_id, record)
            if event is not None and record.decision_id not in self._out:
                await self._publish(event)
                self._out.add(record.decision_id)
            self._store.mark_announced([op_id])

    def _count_waiting(self) -> int:
        return sum(record.decision_id not in self._out for _, record in unannounced(self._store.ledger))

    async def _publish(self, event: DecisionEvent) -> None:
        await self._bus.publish(DECISION, event, event_id=event.id, node=self._node)
        # A refused placement is planned again to get its hint lists.
        given = (
            await asyncio.to_thread(given_hints, event) if isinstance(event.outcome, Refusal) else given_hints(event)
        )
        await self._bus.notify(HINTS, {f"{event.id}.{hints.device_class}": hints for hints in given})
