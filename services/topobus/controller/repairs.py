"""Repairs devices by policy, in both homes of the controller.

The document of repairs says what is done, and `topobus.engine.repair` decides what it says next.
A round plans, writes the document by compare-and-set, and only then publishes decisions and asks
nodes for operations. Replicas need no leader: of two that plan the same the store takes one
document, and an operation that both ask for has one id. What a replica that died has begun, any
other continues by the document.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from msgspec import structs

from topobus.bus.bus import ChangeKind, Conflict
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.node_state import NodeState
from topobus.engine.repair.fleet import Fleet
from topobus.engine.repair.plan import Asked, operations, plan
from topobus.formats.messages.catalogue import DECISION, OPERATE, REPAIR
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.messages import DecisionEvent, RepairState
from topobus.formats.messages.nouns import CLUSTER
from topobus.formats.messages.operation_messages import Operated
from topobus.process.clock import is_set_within
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.process.work_queue import Done, Result, WorkQueue
from topobus.values.errors import ContractError
from topobus.values.outcome import Refusal, refuse
from topobus.values.repair import RepairEnd, RepairPolicy

__all__ = ["Repairs"]

# A round reads all inventories that changed, and a fleet's change many times a second.
_PAUSE_S = 1.0
# Limits of steps, and of an hour, pass without any change.
_TICK_S = 5.0
# How long a step is left to the replica that wrote it: longer than its ask may take. An operation
# that a device service has refused would be tried again for a second asker.
_OTHERS_S = 20.0
# A node that does not answer may be gone for hours.
_LONGEST_RETRY_S = 60.0


class Repairs:
    """Plans repairs, and asks for their operations.

    The policy of this replica's settings becomes that of all when this replica starts.

    Args: is_whole — whether the copies of the nodes are complete.
    """

    def __init__(
        self,
        runtime: Runtime,
        state: NodeState,
        settings: ControllerSettings,
        metrics: ControllerMetrics,
        is_whole: Callable[[], bool],
    ) -> None:
        self._bus = runtime.bus
        self._clock = runtime.clock
        self._state = state
        self._policy: RepairPolicy | None = settings.repair
        """None: it is written."""
        self._metrics = metrics
        self._queue = WorkQueue(
            "repairs", runtime.clock, settings.retry_s, longest_s=_LONGEST_RETRY_S, failures=metrics.set_aside
        )
        self._is_whole = is_whole
        self._has_document = False
        self._changed = asyncio.Event()
        self._document = RepairState()
        self._revision = 0
        self._own: set[str] = set()
        """Operations that this replica wrote into the document."""
        self._asking: set[str] = set()
        self._answers: dict[str, Operated | Refusal] = {}

    def wake(self) -> None:
        """Look soon, because a copy changed."""
        self._changed.set()

    async def run(self) -> None:
        """Repair until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            while True:
                is_timed = self._policy is not None or self._document != RepairState()
                await is_set_within(self._changed, self._clock.timeout(_TICK_S if is_timed else None))
                self._changed.clear()
                if self._is_whole() and self._has_document:
                    await self._queue.run("round", object(), lambda: self._round(group), name="repairs")
                    await self._clock.sleep(_PAUSE_S)

    async def _follow(self) -> None:
        async with aclosing(self._bus.watch(REPAIR)) as changes:
            async for change in changes:
                if change.kind is ChangeKind.SNAPSHOT_END:
                    self._has_document = True
                elif change.kind is ChangeKind.RESET:
                    self._has_document = False
                    self._document, self._revision = RepairState(), 0
                elif change.revision > self._revision:
                    # A document that was deleted or cannot be read is begun again: devices that it
                    # had withheld stay withheld.
                    self._document, self._revision = change.value or RepairState(), change.revision
                self._changed.set()

    async def _round(self, group: asyncio.TaskGroup) -> Result:
        """Plan, write, publish, ask."""
        before = self._document
        text = before.policy if self._policy is None else encode(self._policy).decode()
        policy = decode(text, RepairPolicy, where="policy of repairs") if text else RepairPolicy()
        state, now_s = self._state, self._clock.now().timestamp()
        fleet = Fleet(state.inventories, state.ledgers, state.maintenances)
        after = structs.replace(before, policy=text) if before.policy or policy != RepairPolicy() else before
        answers = dict(self._answers)
        after = plan(policy, after, fleet, now_s, answers)
        if not await self._write(after):
            return None
        # Others may have come while the document was written.
        for op_id in answers:
            del self._answers[op_id]
        self._policy = None
        self._own |= {asked.request.op_id for asked in operations(after, now_s)} - {
            asked.request.op_id for asked in operations(before, now_s)
        }
        self._count(before, after, now_s)
        if after.events:
            await self._publish(after.events, fleet)
            # Another writer may have been here meanwhile: what it wrote stays.
            events = tuple(event for event in self._document.events if event not in after.events)
            await self._write(structs.replace(self._document, events=events))
        due = operations(self._document, now_s)
        self._own &= {asked.request.op_id for asked in due}
        for asked in due:
            is_left = asked.request.op_id not in self._own and now_s - asked.repair.step_s < _OTHERS_S
            if not is_left and asked.request.op_id not in self._asking:
                self._asking.add(asked.request.op_id)
                group.create_task(self._ask(asked))
        self._queue.keep({"round", *self._asking})
        return None

    async def _write(self, document: RepairState) -> bool:
        """Write the document over the one that was read. False: another replica was first, and its
        document comes.
        """
        if document == self._document:
            return True
        written = await self._bus.compare_and_set(REPAIR, document, self._revision, fleet=CLUSTER)
        if isinstance(written, Conflict):
            return False
        if written.revision > self._revision:
            self._document, self._revision = document, written.revision
        return True

    async def _publish(self, events: tuple[DecisionEvent, ...], fleet: Fleet) -> None:
        for event in events:
            if (note := event.repair) is not None:
                get_logger().info("repair.decided", id=event.id, of=event.node, what=note.text, answer=note.answer)
                device = fleet.device((event.node, note.device_class, note.device))
                shown = structs.replace(event, health=device.health if device is not None else None)
                await self._bus.publish(DECISION, shown, event_id=event.id, node=event.node)

    async def _ask(self, asked: Asked) -> None:
        """Ask a node for an operation. One that is not answered may be done: it is asked for again
        by a later round, under the same id.
        """
        op_id = asked.request.op_id
        try:
            await self._queue.run(op_id, op_id, lambda: self._ask_now(asked), name=f"operation {op_id}")
        finally:
            self._asking.discard(op_id)

    async def _ask_now(self, asked: Asked) -> Result:
        try:
            reply = await self._bus.ask(OPERATE, asked.request, node=asked.repair.node)
        except ContractError as err:
            self._answers[asked.request.op_id] = refuse("malformed", err.message)
        else:
            self._answers[asked.request.op_id] = reply.result
        self._changed.set()
        return Done(asked.request.op_id)

    def _count(self, before: RepairState, after: RepairState, now_s: float) -> None:
        """Count what ended by this replica's document, and what is there."""
        noted = {event.id for event in before.events}
        begun_s = {repair.id: repair.began_s for repair in (*before.repairs, *after.repairs)}
        for event in after.events:
            if event.id not in noted and (note := event.repair) is not None and note.end is not None:
                took_s = now_s - begun_s.get(note.repair, now_s)
                self._metrics.repair_s.labels(note.device_class, note.codes[0], note.end.value).observe(took_s)
        self._metrics.repairs.labels("running").set(len(after.under_way))
        for end in (RepairEnd.GAVE_UP, RepairEnd.TAKEN_OVER):
            self._metrics.repairs.labels(end.value).set(sum(repair.end is end for repair in after.repairs))
