"""Checks the node's MPS control daemons once a second, each in its own thread, so that a check that
hangs does not delay the others.
"""

from __future__ import annotations

import asyncio

from topobus.gpu.mps.daemons import MpsDaemons
from topobus.process.clock import Clock

__all__ = ["watch_daemons"]

# The end of a daemon is seen after half of it on average, and the daemon should run again within
# five seconds.
_LOOK_S = 1.0


async def watch_daemons(daemons: MpsDaemons, clock: Clock) -> None:
    """Check the daemons until cancelled."""
    under_way: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:
        while True:
            for name in await asyncio.to_thread(daemons.names):
                if name not in under_way or under_way[name].done():
                    under_way[name] = group.create_task(asyncio.to_thread(daemons.look, name))
            await clock.sleep(_LOOK_S)
