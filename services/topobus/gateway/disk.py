"""Serialises writes to one path on disk. A write finishes even if its caller is cancelled.

A thread cannot be cancelled: when kubelet gives up a call, or a deadline ends it while the disk is
slow, the write continues. If the next write could overtake it, the older state might be the last
one on the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["DiskWork"]

T = TypeVar("T")


class DiskWork:
    """The writes to one path."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._under_way: set[asyncio.Task[Any]] = set()

    async def do(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a piece of work when all before it has ended.

        A cancelled caller does not stop the work.
        """
        task = asyncio.create_task(self._in_turn(work))
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def finish(self) -> None:
        """Wait until all writes have ended."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    async def _in_turn(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._lock:
            return await work()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            # A caller that still waits gets the error. Without this, asyncio would log it as never
            # retrieved.
            task.exception()
