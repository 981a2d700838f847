"""Runs the writes of decided claims beside the reconcile rounds, a bounded number at a time.

A round decides on one claim after the other, for each decision sees what those before it took. The
writes of a decision affect no other claim, and each waits for the store and a node. So they run
concurrently, and the next round does not wait for them. While its writes run a claim is busy, and
no round decides on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager

from topobus.engine.claims.stored import ObjectKey

__all__ = ["CommitTasks"]


class CommitTasks:
    """Owns the tasks. While `run` runs they outlive the round that began them.

    Without it a round waits for its tasks. Args: parallel — how many at a time; wake — called when
    a task has ended.
    """

    def __init__(self, parallel: int, wake: Callable[[], None] = lambda: None) -> None:
        self._slots = asyncio.Semaphore(parallel)
        self._wake = wake
        self._group: asyncio.TaskGroup | None = None
        self._round: asyncio.TaskGroup | None = None
        self._busy: set[ObjectKey] = set()

    async def run(self) -> None:
        """Own the tasks until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                await asyncio.Event().wait()
            finally:
                self._group = None

    @asynccontextmanager
    async def during_round(self) -> AsyncIterator[None]:
        """Own the tasks that must end with this round: all of them, unless `run` runs."""
        async with asyncio.TaskGroup() as group:
            self._round = group
            try:
                yield
            finally:
                self._round = None

    def is_busy(self, key: ObjectKey) -> bool:
        """Say whether a claim is being written."""
        return key in self._busy

    async def begin(
        self, keys: Collection[ObjectKey], work: Callable[[], Awaitable[None]], *, ends_with_round: bool = False
    ) -> None:
        """Begin the work on these claims, after waiting for a free place among the tasks.

        Shapes: ends_with_round — the next round must see the result.
        Errors: raises RuntimeError outside of a round. What the work raises ends the owner of the
        tasks.
        """
        group = self._round if ends_with_round or self._group is None else self._group
        if group is None:
            raise RuntimeError("the tasks have no owner: begin within `during_round`")
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
