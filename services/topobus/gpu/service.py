"""The gpu service: the device host, run for class `gpu`, and the watch over the daemons of MPS that it
owns.
"""

from __future__ import annotations

import asyncio

from topobus.devicekit.host.host import serve_devices
from topobus.gpu.config import GpuSettings
from topobus.gpu.host_services import GpuServices
from topobus.gpu.mps.daemons import MpsDaemons
from topobus.process.clock import Clock
from topobus.process.service import Runtime

__all__ = ["serve"]
# The end of a daemon is seen after half of it on average, and the daemon should run again within
# five seconds.
_LOOK_S = 1.0


async def serve(settings: GpuSettings, runtime: Runtime) -> None:
    """Serve this node's GPUs until cancelled."""
    daemons = MpsDaemons(settings.mps)
    services = GpuServices(leftovers=settings.leftovers, mps=daemons)
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(_watch_daemons(daemons, runtime.clock)) if settings.mps.owned else None
        await serve_devices(settings, runtime, "gpu", host_services=services)
        if watch is not None:
            watch.cancel()


async def _watch_daemons(daemons: MpsDaemons, clock: Clock) -> None:
    """Check the daemons until cancelled."""
    under_way: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:
        while True:
            for name in await asyncio.to_thread(daemons.names):
                if name not in under_way or under_way[name].done():
                    under_way[name] = group.create_task(asyncio.to_thread(daemons.look, name))
            await clock.sleep(_LOOK_S)
