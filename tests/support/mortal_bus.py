"""A bus whose owner dies at one of its steps, and a wait for that or for the work's end: which of them comes first is all that time decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from topobus.runtime.bus import Bus

__all__ = ["MortalBus", "died_or"]


class MortalBus:
    """A bus whose owner dies before or after one of its steps: a write to the store, or an ask to a node."""

    def __init__(self, bus: Bus, step: int, *, is_done: bool) -> None:
        self._bus = bus
        self._left = step
        self._is_done = is_done
        self.died = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def compare_and_set(self, *arguments: Any, **parts: str) -> Any:
        """Write, unless the end comes first."""
        return await self._step(lambda: self._bus.compare_and_set(*arguments, **parts))

    async def delete(self, *arguments: Any, **parts: str) -> Any:
        """Delete, unless the end comes first."""
        return await self._step(lambda: self._bus.delete(*arguments, **parts))

    async def compare_and_delete(self, *arguments: Any, **parts: str) -> Any:
        """Delete what was read, unless the end comes first."""
        return await self._step(lambda: self._bus.compare_and_delete(*arguments, **parts))

    async def ask(self, ask: Any, request: Any, **parts: Any) -> Any:
        """Ask, unless the end comes first; a dry run changes nothing, so nobody needs to die there."""
        if getattr(request, "is_dry_run", False):
            return await self._bus.ask(ask, request, **parts)
        return await self._step(lambda: self._bus.ask(ask, request, **parts))

    async def _step(self, work: Callable[[], Awaitable[Any]]) -> Any:
        self._left -= 1
        if self._left > 0:
            return await work()
        if self._left == 0 and self._is_done:
            await work()
        self.died.set()
        await asyncio.Event().wait()  # what is dead does not go on
        raise AssertionError("nobody wakes the dead")


async def died_or(done: Coroutine[Any, Any, Any], *deaths: asyncio.Event) -> bool:
    """Wait until every replica died at its step, or until nothing is left to be done; True says that all of them died.

    Errors: raises what `done` raises, when it ends first.
    """
    dying = asyncio.gather(*(died.wait() for died in deaths))
    doing = asyncio.create_task(done)
    await asyncio.wait({dying, doing}, return_when=asyncio.FIRST_COMPLETED)
    is_dead = all(died.is_set() for died in deaths)
    if not is_dead:
        await doing
    for waiting in (dying, doing):
        waiting.cancel()
    await asyncio.gather(dying, doing, return_exceptions=True)
    return is_dead
