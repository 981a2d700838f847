"""Keeps the copies of what nodes publish on the bus, for both homes of the controller.

A copy that is not complete yet keeps the controller from being ready, and each change wakes the
reconcile loops. A value that cannot be parsed is logged, counted and treated as absent, and affects
no other key. Nodes of another release or with a wrong clock are named in the log. The bus has
already compared each value with its key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from prometheus_client import Gauge

from topobus.bus.bus import Change, ChangeKind
from topobus.controller.node_remarks import NodeRemarks
from topobus.controller.state.node_state import NodeState
from topobus.formats.messages import catalogue
from topobus.formats.messages.nouns import State
from topobus.formats.messages.operation_messages import ClassMaintenance
from topobus.process.quiet import QuietLog
from topobus.process.service import Runtime
from topobus.process.work_queue import WorkQueue
from topobus.values.device import Inventory
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine
from topobus.values.view import NodeAlignment

__all__ = ["BusCopies"]

M = TypeVar("M")

_NODE_PARTS = ("machines", "inventories", "ledgers", "alignments", "maintenances")


class BusCopies:
    """Follows the bus into `state`."""

    def __init__(
        self, runtime: Runtime, state: NodeState, queue: WorkQueue, changed: Callable[[], None], remarked: Gauge
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._queue = queue
        self._changed = changed
        self._remarks = NodeRemarks(runtime.readiness, runtime.bus.release, remarked, QuietLog(runtime.clock))
        self._missing: set[str] = set(_NODE_PARTS)
        for part in sorted(self._missing):
            runtime.readiness.set(part, is_ready=False, why="no snapshot yet")

    @property
    def is_whole(self) -> bool:
        """Say whether every copy is complete. Before that no claim is decided on and no pod is
        planned.
        """
        return not self._missing

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start one task per copy, each of which follows its bucket until cancelled."""
        group.create_task(self._follow("machines", catalogue.MACHINE, self._on_machine))
        group.create_task(self._follow("inventories", catalogue.INVENTORY, self._on_inventory))
        group.create_task(self._follow("ledgers", catalogue.LEDGER, self._on_ledger))
        group.create_task(self._follow("alignments", catalogue.ALIGNMENT, self._on_alignment))
        group.create_task(self._follow("maintenances", catalogue.MAINTENANCE, self._on_maintenance))

    async def _follow(self, part: str, state: State[M], apply: Callable[[Change[M]], None]) -> None:
        """Keep one copy up to date until cancelled."""
        async with aclosing(self._runtime.bus.watch(state, partial(self._remarks.note_rejected, state))) as items:
            async for change in items:
                if change.kind is ChangeKind.PUT:
                    self._remarks.note(state, change.parts, change.origin)
                elif change.kind is ChangeKind.DELETE:
                    self._remarks.drop(state, change.parts)
                elif change.kind is ChangeKind.RESET:
                    self._remarks.clear(state)
                if change.kind is ChangeKind.SNAPSHOT_END:
                    self._missing.discard(part)
                    self._runtime.readiness.set(part, is_ready=True)
                elif change.kind is ChangeKind.RESET:
                    # The copy may be void: no claim is decided on before the new snapshot is
                    # complete.
                    self._missing.add(part)
                    self._runtime.readiness.set(
                        part, is_ready=False, why="the history was lost, a new snapshot follows"
                    )
                key = (part, *change.parts.values())
                if (
                    part == "alignments"
                    and change.value is not None
                    and change.value == self._state.alignments.get(change.parts["node"])
                ):
                    # A sign of life of the node's topology, with the values that are already known:
                    # nothing depends on it.
                    continue
                # Each change has its own version: after a lost store a revision may belong to
                # another value.
                self._queue.run_now(key, object(), partial(apply, change), name=" ".join(key))
                self._changed()

    def _on_machine(self, change: Change[Machine]) -> None:
        if change.kind is ChangeKind.RESET:
            self._state.clear_machines()
        elif change.kind is ChangeKind.DELETE:
            self._state.drop_machine(change.parts["node"])
        elif change.value is not None:
            self._state.put_machine(self._state.shared.machine(change.value))

    def _on_inventory(self, change: Change[Inventory]) -> None:
        if change.kind is ChangeKind.RESET:
            self._state.clear_inventories()
        elif change.kind is ChangeKind.DELETE:
            self._state.drop_inventory(change.parts["node"], change.parts["device_class"])
        elif change.value is not None:
            self._state.put_inventory(self._state.shared.inventory(change.value))

    def _on_ledger(self, change: Change[Ledger]) -> None:
        if change.kind is ChangeKind.RESET:
            self._state.clear_ledgers()
        elif change.kind is ChangeKind.DELETE:
            self._state.drop_ledger(change.parts["node"])
        elif change.value is not None:
            self._state.put_ledger(change.value)

    def _on_alignment(self, change: Change[NodeAlignment]) -> None:
        # A reset changes nothing: what nodes publish again is what they published before.
        if change.kind is ChangeKind.DELETE:
            self._state.put_alignment(change.parts["node"], None)
        elif change.value is not None:
            self._state.put_alignment(change.value.node, change.value)

    def _on_maintenance(self, change: Change[ClassMaintenance]) -> None:
        if change.kind is ChangeKind.RESET:
            self._state.maintenances.clear()
        elif change.kind is ChangeKind.DELETE:
            self._state.maintenances.pop((change.parts["node"], change.parts["device_class"]), None)
        elif change.value is not None:
            self._state.maintenances[change.value.node, change.value.device_class] = change.value
