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
from datetime import UTC, datetime

from msgspec import structs

from topobus.bus.bus import ChangeKind, Conflict
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.node_state import NodeState
from topobus.engine.repair.fleet import Fleet, sick_places
from topobus.engine.repair.plan import Asked, answered, operations, plan, published
from topobus.formats.messages.catalogue import DECISION, MAINTENANCE, OPERATE, REPAIR
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.messages import DecisionEvent
from topobus.formats.messages.nouns import CLUSTER
from topobus.formats.messages.operation_messages import ClassMaintenance, Operated
from topobus.process.clock import is_set_within
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.process.work_queue import Done, Result, WorkQueue
from topobus.values.device import Inventory
from topobus.values.errors import ContractError
from topobus.values.outcome import Refusal, refuse
from topobus.values.repair import REPAIR_POLICY, Place, RepairEnd, RepairNoteEvent, RepairPolicy, RepairState
from topobus.values.request import Owner, OwnerKind
from topobus.values.timestamps import rfc3339

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
        self._changed = asyncio.Event()
        self._missing = {"repairs", "maintenances"}
        self._document = RepairState()
        self._revision = 0
        self._maintenances: dict[tuple[str, str], ClassMaintenance] = {}
        self._sick: dict[tuple[str, str], tuple[Inventory, tuple[Place, ...]]] = {}
        """By node and class: the inventory that was read, and its devices with evidence."""
        self._sick_by = RepairPolicy()
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
            group.create_task(self._follow_document())
            group.create_task(self._follow_maintenances())
            while True:
                document, has_sick = self._document, any(places for _, places in self._sick.values())
                is_timed = has_sick or self._policy is not None or bool(document.repairs or document.events)
                await is_set_within(self._changed, self._clock.timeout(_TICK_S if is_timed else None))
                self._changed.clear()
                if self._is_whole() and not self._missing:
                    await self._queue.run("round", object(), lambda: self._round(group), name="repairs")
                    await self._clock.sleep(_PAUSE_S)

    async def _follow_document(self) -> None:
        async with aclosing(self._bus.watch(REPAIR)) as changes:
            async for change in changes:
                if change.kind is ChangeKind.SNAPSHOT_END:
                    self._missing.discard("repairs")
                elif change.kind is ChangeKind.RESET:
                    self._missing.add("repairs")
                    self._document, self._revision = RepairState(), 0
                elif change.revision > self._revision:
                    # A document that was deleted or cannot be read is begun again: devices that it
                    # had withheld stay withheld.
                    self._document, self._revision = change.value or RepairState(), change.revision
                self._changed.set()

    async def _follow_maintenances(self) -> None:
        async with aclosing(self._bus.watch(MAINTENANCE)) as changes:
            async for change in changes:
                if change.kind is ChangeKind.SNAPSHOT_END:
                    self._missing.discard("maintenances")
                elif change.kind is ChangeKind.RESET:
                    self._missing.add("maintenances")
                    self._maintenances.clear()
                else:
                    key = (change.parts["node"], change.parts["device_class"])
                    if change.value is None:
                        self._maintenances.pop(key, None)
                    else:
                        self._maintenances[key] = change.value
                self._changed.set()

    async def _round(self, group: asyncio.TaskGroup) -> Result:
        """Plan, write, publish, ask."""
        before = self._document
        text = before.policy if self._policy is None else encode(self._policy).decode()
        policy = decode(text, RepairPolicy, where="policy of repairs") if text else RepairPolicy()
        fleet, now_s = self._fleet(policy), self._clock.now().timestamp()
        after = structs.replace(before, policy=text) if before.policy or policy != RepairPolicy() else before
        answers = dict(self._answers)
        for op_id, result in answers.items():
            after = answered(policy, after, fleet, op_id, result, now_s)
        after = plan(policy, after, fleet, now_s)
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
            await self._publish(after.events)
            # Another writer may have been here meanwhile: what it wrote stays.
            await self._write(published(self._document, [event.id for event in after.events]))
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

    async def _publish(self, events: tuple[RepairNoteEvent, ...]) -> None:
        for event in events:
            note = event.note
            get_logger().info("repair.decided", id=event.id, of=event.node, what=note.text, answer=note.answer)
            uid = f"{note.device_class}:{note.device}"
            decision = DecisionEvent(
                id=event.id,
                verb="repair",
                node=event.node,
                op_id=event.id,
                time=rfc3339(datetime.fromtimestamp(event.time_s, UTC)),
                owner=Owner(kind=OwnerKind.OPERATOR, namespace="", name=REPAIR_POLICY, uid=uid),
                outcome=refuse("repair-gave-up", note.why, device=note.device, repair=note.repair)
                if note.end is RepairEnd.GAVE_UP
                else None,
                health=event.health,
                repair=note,
            )
            await self._bus.publish(DECISION, decision, event_id=event.id, node=event.node)

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

    def _fleet(self, policy: RepairPolicy) -> Fleet:
        if policy != self._sick_by:
            self._sick, self._sick_by = {}, policy
        inventories = self._state.inventories
        for key, inventory in inventories.items():
            if key not in self._sick or self._sick[key][0] is not inventory:
                self._sick[key] = (inventory, sick_places(policy, inventory))
        for key in self._sick.keys() - inventories.keys():
            del self._sick[key]
        sick = tuple(place for _, places in self._sick.values() for place in places)
        return Fleet(inventories, self._state.ledgers, self._maintenances, sick)

    def _count(self, before: RepairState, after: RepairState, now_s: float) -> None:
        """Count what ended by this replica's document, and what is there."""
        noted = {event.id for event in before.events}
        repairs = {repair.id: repair for repair in (*before.repairs, *after.repairs)}
        for event in after.events:
            note = event.note
            if note.end is not None and event.id not in noted:
                repair = repairs.get(note.repair)
                began_s = repair.began_s if repair is not None else now_s
                self._metrics.repair_s.labels(note.device_class, note.codes[0], note.end.value).observe(now_s - began_s)
        for state, count in (
            ("running", len(after.repairs)),
            *(
                (end.value, sum(left.end is end for left in after.left))
                for end in (RepairEnd.GAVE_UP, RepairEnd.TAKEN_OVER)
            ),
        ):
            self._metrics.repairs.labels(state).set(count)
