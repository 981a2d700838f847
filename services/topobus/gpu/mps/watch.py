"""Looks at the node's MPS control daemons once a second, each in a thread of its own: one that does
not come back keeps nobody waiting.
"""

from __future__ import annotations

import asyncio

from topobus.gpu.mps.daemons import MpsDaemons
from topobus.process.clock import Clock

__all__ = ["watch_daemons"]

# A daemon that ended is seen after half of it on average, and is to be back within five.
_LOOK_S = 1.0


async def watch_daemons(daemons: MpsDaemons, clock: Clock) -> None:
    """Look until cancelled."""
    under_way: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:
        while True:
            for name in await asyncio.to_thread(daemons.names):
                if name not in under_way or under_way[name].done():
                    under_way[name] = group.create_task(asyncio.to_thread(daemons.look, name))
            await clock.sleep(_LOOK_S)
