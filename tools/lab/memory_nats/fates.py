"""Injects faults into the operations of a bus: unconfirmed writes, lost connections, delays, and
the death of the process.

A function chooses the fault of each operation by its number, its name and its parts. The same
choice gives the same run. The faulty bus has the type that a service takes, and passes all other
operations to the bus below, which may be on a real connection or in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from topobus.bus.bus import AmbiguousWrite, Bus, Conflict, Entry, Received, Written
from topobus.bus.failures import ConnectionLost
from topobus.formats.messages.nouns import Ask, Event, State
from topobus.values.errors import PeerUnavailable

__all__ = [
    "READS",
    "WRITES",
    "Delayed",
    "Died",
    "Dies",
    "Fate",
    "FatedBus",
    "Fates",
    "Interrupted",
    "Refused",
    "Step",
    "Unconfirmed",
]

READS = frozenset({"get", "history", "last", "list"})
WRITES = frozenset({"put", "compare_and_set", "delete", "compare_and_delete", "publish", "ask"})
"""What changes something: a write to the store, or an ask to a peer."""

M = TypeVar("M")
Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")


class Died(BaseException):
    """The process is gone: no handler of ours may catch it."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operation of a bus."""

    number: int
    """From 1, among the operations that are counted."""
    operation: str
    """The method's name: `compare_and_set`, `ask`, …"""
    noun: str
    """The catalogue's name of what is read, written or asked."""
    parts: Mapping[str, str]
    value: Any
    """The value or request; None for what sends none."""

    def __str__(self) -> str:
        return f"{self.operation} {self.noun}"


@dataclass(frozen=True)
class Dies:
    """The process dies: before the operation is sent, or after it has happened and before its
    result is known.
    """

    is_done: bool


@dataclass(frozen=True)
class Unconfirmed:
    """The caller does not learn whether it happened: a write is ambiguous, an ask or a read is lost
    with its connection.
    """

    is_done: bool


@dataclass(frozen=True)
class Refused:
    """It surely did not happen."""

    why: str = "there is no connection"


@dataclass(frozen=True)
class Delayed:
    """It happens after something else has: an event that is set, or time that passes."""

    wait: Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Interrupted:
    """It happens, and something else does before its result is known."""

    meanwhile: Callable[[], Awaitable[object]]


Fate = Dies | Unconfirmed | Refused | Delayed | Interrupted


class Fates:
    """The fates of one process: counts its operations, and decides the result of each."""

    def __init__(
        self,
        choose: Callable[[Step], Fate | None] | Mapping[int, Fate] = MappingProxyType({}),
        *,
        counted: frozenset[str] = WRITES,
        spared: Callable[[Any], bool] = lambda _: False,
        hangs: bool = False,
    ) -> None:
        """Choose by a function or by number.

        Shapes: counted — the operations that have a fate; the others are done as usual, while the
        process lives. spared — values and requests that have none either, such as those of a dry
        run. hangs — a process that died stops without end at its step, and is cancelled from
        outside; otherwise Died is raised in it.
        """
        self._choose = choose.get if isinstance(choose, Mapping) else None
        self._decide = None if isinstance(choose, Mapping) else choose
        self._counted = counted
        self._spared = spared
        self._hangs = hangs
        self.steps: list[Step] = []
        """All operations that were counted, in order."""
        self.died = asyncio.Event()
        self.is_dying = False
        """The step at which the process dies has begun: it dies there whatever others see of that
        step first."""

    async def apply(
        self, operation: str, noun: str, parts: Mapping[str, str], value: Any, act: Callable[[], Awaitable[T]]
    ) -> T:
        """Do one operation with its fate.

        Errors: raises Died, PeerUnavailable, or the error of an unconfirmed operation.
        """
        if self.died.is_set():
            await self._die()
        if operation not in self._counted or self._spared(value):
            return await act()
        step = Step(number=len(self.steps) + 1, operation=operation, noun=noun, parts=parts, value=value)
        self.steps.append(step)
        fate = (
            self._decide(step)
            if self._decide is not None
            else self._choose(step.number)
            if self._choose is not None
            else None
        )
        match fate:
            case Refused(why=why):
                raise PeerUnavailable(f"{step}: {why}")
            case Delayed(wait=wait):
                await wait()
            case Dies(is_done=False):
                await self._die()
            case Dies(is_done=True):
                self.is_dying = True
            case Unconfirmed(is_done=False):
                raise _unconfirmed(step)
        try:
            done = await act()
        except Exception:
            if self.is_dying:
                # It dies at this step, whatever the result of the step itself.
                await self._die()
            raise
        match fate:
            case Dies(is_done=True):
                await self._die()
            case Unconfirmed(is_done=True):
                raise _unconfirmed(step)
            case Interrupted(meanwhile=meanwhile):
                await meanwhile()
        if self.died.is_set():
            # The process died at another operation, while this one was under way.
            await self._die()
        return done

    async def _die(self) -> None:
        self.is_dying = True
        self.died.set()
        if self._hangs:
            await asyncio.Event().wait()
        raise Died


def _unconfirmed(step: Step) -> PeerUnavailable:
    if step.operation in ("ask", *READS):
        return ConnectionLost(f"{step}: the connection to NATS went away before the answer came")
    return AmbiguousWrite(f"{step}: the write was not confirmed: it may or may not have happened")


class FatedBus(Bus):
    """A bus on another one's connection whose operations have fates."""

    def __init__(self, bus: Bus, fates: Fates) -> None:
        super().__init__(bus._connection)
        self._below = bus
        self.fates = fates

    async def get(self, state: State[M], **parts: str) -> Entry[M] | None:
        """Read one key."""
        return await self.fates.apply("get", state.name, parts, None, lambda: self._below.get(state, **parts))

    async def put(self, state: State[M], value: M, **parts: str) -> int:
        """Write a key."""
        return await self.fates.apply("put", state.name, parts, value, lambda: self._below.put(state, value, **parts))

    async def compare_and_set(
        self, state: State[M], value: M, expected_revision: int, **parts: str
    ) -> Written | Conflict:
        """Write a key that is still at the revision."""
        return await self.fates.apply(
            "compare_and_set",
            state.name,
            parts,
            value,
            lambda: self._below.compare_and_set(state, value, expected_revision, **parts),
        )

    async def delete(self, state: State[Any], **parts: str) -> None:
        """Delete a key."""
        return await self.fates.apply("delete", state.name, parts, None, lambda: self._below.delete(state, **parts))

    async def compare_and_delete(self, state: State[Any], expected_revision: int, **parts: str) -> Conflict | None:
        """Delete a key that is still at the revision."""
        return await self.fates.apply(
            "compare_and_delete",
            state.name,
            parts,
            None,
            lambda: self._below.compare_and_delete(state, expected_revision, **parts),
        )

    async def list(
        self, state: State[M], *, on_rejected: Callable[[str, str], None] | None = None, **parts: str
    ) -> tuple[Entry[M], ...]:
        """Read all entries that match."""
        return await self.fates.apply(
            "list", state.name, parts, None, lambda: self._below.list(state, on_rejected=on_rejected, **parts)
        )

    async def history(self, state: State[M], *, has_deleted: bool = False, **parts: str) -> tuple[Entry[M], ...]:
        """Read the kept values of one key."""
        return await self.fates.apply(
            "history", state.name, parts, None, lambda: self._below.history(state, has_deleted=has_deleted, **parts)
        )

    async def publish(self, event: Event[M], value: M, *, event_id: str, **parts: str) -> int:
        """Store an event."""
        return await self.fates.apply(
            "publish", event.name, parts, value, lambda: self._below.publish(event, value, event_id=event_id, **parts)
        )

    async def last(self, event: Event[M], *, limit: int, **parts: str) -> tuple[Received[M], ...]:
        """Read the newest events."""
        return await self.fates.apply(
            "last", event.name, parts, None, lambda: self._below.last(event, limit=limit, **parts)
        )

    async def ask(self, ask: Ask[Q, R], request: Q, *, timeout_s: float | None = None, **parts: str) -> R:
        """Ask a peer."""
        return await self.fates.apply(
            "ask", ask.name, parts, request, lambda: self._below.ask(ask, request, timeout_s=timeout_s, **parts)
        )
