"""A bus whose owner dies at one of its steps, and a wait for that or for the work's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

from lab.memory_nats.fates import Dies, FatedBus, Fates
from support.controllers import controller
from topobus.bus.bus import Bus

__all__ = ["died_or", "mortal_bus", "mortal_controller"]

_STEPS = frozenset({"compare_and_set", "delete", "compare_and_delete", "ask"})


def mortal_bus(bus: Bus, step: int, *, is_done: bool) -> FatedBus:
    """Give a bus whose owner dies before or after one of its steps: a write to the store, or an ask
    to a node.

    A dry run changes nothing, so no owner needs to die there.
    """
    fates = Fates(
        {step: Dies(is_done)}, counted=_STEPS, spared=lambda value: getattr(value, "is_dry_run", False), hangs=True
    )
    return FatedBus(bus, fates)


@asynccontextmanager
async def mortal_controller(url: str, step: int, *, is_done: bool = False) -> AsyncIterator[Fates]:
    """Run a replica of the stand-alone controller that dies before or after such a step; gives its
    fates.
    """
    async with controller(url, through=lambda bus: mortal_bus(bus, step, is_done=is_done)) as runtime:
        yield cast("FatedBus", runtime.bus).fates


async def died_or(done: Coroutine[Any, Any, Any], *replicas: Fates) -> bool:
    """Wait until every replica died at its step, or until nothing is left to be done.

    Returns whether all of them died. A replica that is at its deadly step dies there, even when the
    test sees that step's effect before the replica does: a count of deaths must not depend on who
    heard first.

    Errors: raises what `done` raises, when it ends first.
    """
    dying = asyncio.gather(*(fates.died.wait() for fates in replicas))
    doing = asyncio.create_task(done)
    await asyncio.wait({dying, doing}, return_when=asyncio.FIRST_COMPLETED)
    if not dying.done():
        await doing
        await asyncio.gather(*(fates.died.wait() for fates in replicas if fates.is_dying))
    is_dead = all(fates.died.is_set() for fates in replicas)
    for waiting in (dying, doing):
        waiting.cancel()
    await asyncio.gather(dying, doing, return_exceptions=True)
    return is_dead
