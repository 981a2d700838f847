"""Checks the histories of all devices and owners of one ledger while they grow, and describes a
violation in words.

Calls and returns of operations come in the order in which they were seen. An operation is checked
once its outcome is known, so the memory holds only what happened since the oldest open operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lab.chaos.ledger_objects import FREE, NOTHING, device_step, is_look, owner_step
from lab.chaos.linearizability import History
from lab.chaos.workload import DEVICES, Draft, Effects

__all__ = ["Histories", "Operation", "Violation"]


@dataclass(frozen=True)
class Violation:
    """A history that is impossible."""

    what: str


@dataclass(eq=False)
class Operation:
    """One operation under way. Its `effects` are set when its outcome is known, or known to stay
    unknown.
    """

    number: int
    draft: Draft
    effects: Effects | None = None
    is_unknown: bool = False
    answer: object = None


class Histories:
    """All objects of one node's ledger."""

    def __init__(self, owners: Iterable[str]) -> None:
        self._objects: dict[str, History[Any, Any]] = {name: History(FREE, device_step, is_look) for name in DEVICES}
        self._objects |= {key: History(NOTHING, owner_step, is_look) for key in owners}
        self._events: deque[tuple[bool, Operation]] = deque()
        self._unknown: list[Operation] = []
        self.widest = 1
        self.violation: Violation | None = None

    @property
    def has_unknown(self) -> bool:
        """Say whether any operation has an unknown outcome."""
        return bool(self._unknown) or any(operation.is_unknown for _, operation in self._events)

    def call(self, operation: Operation) -> None:
        """Record that an operation begins."""
        self._events.append((True, operation))

    def end(self, operation: Operation) -> None:
        """Record that an operation was answered."""
        self._events.append((False, operation))

    def settle_unknown(self) -> None:
        """Settle operations of unknown outcome: no process has a request left that it would still
        execute.
        """
        self.check()
        for operation in self._unknown:
            for key in _touched(operation.effects):
                self._objects[key].forget(operation.number)
        self._unknown.clear()

    def check(self) -> None:
        """Check all events, up to the first operation whose outcome is not known."""
        while self._events and self.violation is None:
            is_call, operation = self._events[0]
            if operation.effects is None:
                return
            self._events.popleft()
            touched = _touched(operation.effects)
            strange = sorted(touched.keys() - self._objects.keys())
            if strange:
                self.violation = Violation(
                    f"operation {operation.draft.op_id} ({operation.draft.verb}) saw {strange}, which no call asked for"
                )
            elif is_call:
                for key, action in touched.items():
                    self._objects[key].call(operation.number, action)
                if operation.is_unknown:
                    self._unknown.append(operation)
            else:
                self._end(operation, touched)

    def _end(self, operation: Operation, touched: Mapping[str, Any]) -> None:
        for key, action in touched.items():
            history = self._objects[key]
            before = sorted(str(state) or "free" for state in history.states)
            if not history.end(operation.number):
                draft = operation.draft
                self.violation = Violation(
                    f"{key}: no order of operations explains {draft.verb} for {draft.owner.key}"
                    f"{' of ' + ', '.join(sorted(draft.names)) if draft.names else ''} (operation {draft.op_id}): "
                    f"its answer means {action}, and before it the state can have been {' or '.join(before)}; "
                    f"the answer: {str(operation.answer)[:400]}"
                )
                return
            self.widest = max(self.widest, history.width)


def _touched(effects: Effects | None) -> dict[str, Any]:
    return {**effects.devices, **effects.owners} if effects is not None else {}
