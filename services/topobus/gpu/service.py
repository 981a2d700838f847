"""The gpu service: the device host, run for class `gpu`."""

from __future__ import annotations

import asyncio
from typing import Protocol, runtime_checkable

from topobus.devicekit.driver import DeviceDriver
from topobus.devicekit.host.host import serve_devices
from topobus.devicekit.registry import load_drivers
from topobus.devicekit.sharing.shared_devices import check_sharing_settings
from topobus.engine.health.pool_assignment import check_pools
from topobus.gpu.config import GpuSettings, LeftoverSettings
from topobus.gpu.mps.claims import MpsSharing
from topobus.gpu.mps.watch import watch_daemons
from topobus.process.service import Runtime

__all__ = ["check", "serve"]


@runtime_checkable
class _CheckedDriver(DeviceDriver, Protocol):
    """A driver that the operator tells how it looks at what an owner left."""

    def configure(self, leftovers: LeftoverSettings) -> None: ...


@runtime_checkable
class _MpsDriver(DeviceDriver, Protocol):
    """A driver whose GPUs are shared by MPS."""

    mps: MpsSharing


def check(settings: GpuSettings) -> None:
    """Refuse names of plugins that are not installed, and pools that cannot be.

    Errors: raises ConfigError that names the key.
    """
    load_drivers("gpu", settings.drivers)
    check_pools("gpu", settings.pools)
    check_sharing_settings("gpu", settings.sharing, settings.pools)


async def serve(settings: GpuSettings, runtime: Runtime) -> None:
    """Serve this node's GPUs until cancelled."""
    registry = load_drivers("gpu", settings.drivers)
    for driver in registry.drivers:
        if isinstance(driver, _CheckedDriver):
            driver.configure(settings.leftovers)
    sharing = [driver.mps for driver in registry.drivers if isinstance(driver, _MpsDriver)]
    for mps in sharing:
        mps.configure(settings.mps)
    async with asyncio.TaskGroup() as group:
        watches = [group.create_task(watch_daemons(mps.daemons, runtime.clock)) for mps in sharing if mps.is_owned]
        await serve_devices(settings, runtime, "gpu", registry=registry)
        for watch in watches:
            watch.cancel()
