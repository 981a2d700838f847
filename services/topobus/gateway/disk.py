"""Serialises writes to one path on disk; a write finishes even if its caller is cancelled.

Flows in: blocking work that runs in a thread. Flows out: its result. A thread cannot be cancelled:
when kubelet gives a call up, or a deadline ends it while the disk is slow, the write goes on. If
the next write could overtake it, the older state might be the last one on the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["DiskWork"]

T = TypeVar("T")


class DiskWork:
    """What is written to one place."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._under_way: set[asyncio.Task[Any]] = set()

    async def do(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do a piece of work when all before it has ended.

        Cancelled, the caller goes and the work stays.
        """
        task = asyncio.create_task(self._in_turn(work))
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def finish(self) -> None:
        """Wait until nothing is being written."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    async def _in_turn(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._lock:
            return await work()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            # Whoever still waits has it; nobody else must hear of it as an
            # error that was never looked at.
            task.exception()
