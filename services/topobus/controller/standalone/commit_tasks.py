"""Runs the writes of claims that were decided on beside the reconcile rounds, so many at a time.

A round decides on one claim after the other, for each sees what those before it took; the writes of a decision concern no other claim, and each waits for the store and a node. So
they go side by side, and the next round does not wait for them.

Flows in: a decision's claims, and the work that writes it. Flows out: which claims are busy, so that no round decides on them meanwhile; a wake-up when work has ended. A claim
whose peer did not answer rests, so that one silent node does not keep all slots: until the time is over, or until the claim or the node's ledger is another one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from topobus.engine.claims.stored import ObjectKey
from topobus.process.clock import Clock
from topobus.values.ledger import Ledger

__all__ = ["CommitTasks", "Peer"]


@dataclass(frozen=True)
class Peer:
    """What a claim waits for when its node is silent: what must change for another try before the time is over."""

    revision: int
    ledger: Ledger | None


class CommitTasks:
    """Owns the tasks. While `run` runs they outlive the round that began them; without it a round ends when they have ended.

    Args: parallel — how many at a time; rest_s — how long a claim rests after its peer was silent; wake — called when work has ended.
    """

    def __init__(self, parallel: int, rest_s: float, clock: Clock, wake: Callable[[], None] = lambda: None) -> None:
        self._slots = asyncio.Semaphore(parallel)
        self._rest_s = rest_s
        self._clock = clock
        self._wake = wake
        self._group: asyncio.TaskGroup | None = None
        self._round: asyncio.TaskGroup | None = None
        self._alarm: asyncio.Task[None] | None = None
        self._alarm_s = math.inf
        self._busy: set[ObjectKey] = set()
        self._resting: dict[ObjectKey, tuple[float, Peer]] = {}

    async def run(self) -> None:
        """Own the tasks until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                await asyncio.Event().wait()
            finally:
                self._group, self._alarm, self._alarm_s = None, None, math.inf

    @asynccontextmanager
    async def during_round(self) -> AsyncIterator[None]:
        """Own the tasks that are to end with this round: all of them, unless `run` runs."""
        async with asyncio.TaskGroup() as group:
            self._round = group
            try:
                yield
            finally:
                self._round = None

    @property
    def is_resting(self) -> bool:
        """Say whether any claim is to be tried again by time alone."""
        return bool(self._resting)

    def is_busy(self, key: ObjectKey) -> bool:
        """Say whether a claim is being written."""
        return key in self._busy

    def rests(self, key: ObjectKey, peer: Callable[[], Peer]) -> bool:
        """Say whether a claim is not to be tried yet.

        Shapes: peer — gives it as it is now, the claim's revision and its node's ledger; asked of a claim that rests alone, for a round comes to all claims.
        """
        resting = self._resting.get(key)
        if resting is None:
            return False
        until_s, before = resting
        now = peer()
        if self._clock.monotonic() < until_s and before.revision == now.revision and before.ledger is now.ledger:
            return True
        del self._resting[key]
        return False

    def rest(self, key: ObjectKey, peer: Peer) -> None:
        """Let a claim rest, for its peer is silent."""
        self._resting[key] = (self._clock.monotonic() + self._rest_s, peer)

    def keep(self, objects: Collection[ObjectKey]) -> None:
        """Forget claims that are gone."""
        self._resting = {key: resting for key, resting in self._resting.items() if key in objects}

    def wake_after(self, wait_s: float) -> None:
        """Wake the loop after a while, once at the earliest time that is asked for; without `run` nobody is woken."""
        at_s = self._clock.monotonic() + wait_s
        if self._group is None or at_s >= self._alarm_s:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_s = at_s
        self._alarm = self._group.create_task(self._ring(wait_s))

    async def _ring(self, wait_s: float) -> None:
        await self._clock.sleep(wait_s)
        self._alarm, self._alarm_s = None, math.inf
        self._wake()

    async def begin(self, keys: Collection[ObjectKey], work: Callable[[], Awaitable[None]], *, ends_with_round: bool = False) -> None:
        """Begin the work on these claims; waits while as many as may are being written.

        Shapes: ends_with_round — the next round must see what comes of it.
        Errors: raises RuntimeError outside of a round. What the work raises ends the owner of the tasks.
        """
        group = self._round if ends_with_round or self._group is None else self._group
        if group is None:
            raise RuntimeError("nobody owns the tasks: begin within `during_round`")
        self._busy.update(keys)
        try:
            await self._slots.acquire()
        except BaseException:
            self._busy.difference_update(keys)
            raise
        group.create_task(self._work(keys, work))

    async def _work(self, keys: Collection[ObjectKey], work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        finally:
            self._busy.difference_update(keys)
            self._slots.release()
            self._wake()
