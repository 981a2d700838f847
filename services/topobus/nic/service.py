"""The nic service: the device host, run for class `nic`."""

from __future__ import annotations

from topobus.devicekit.host import serve_devices
from topobus.devicekit.pool_assignment import check_pools
from topobus.devicekit.registry import load_drivers
from topobus.nic.config import NicSettings
from topobus.runtime.service import Runtime

__all__ = ["check", "serve"]


def check(settings: NicSettings) -> None:
    """Refuse names of plugins that are not installed, and pools that cannot be.

    Errors: raises ConfigError that names the key.
    """
    load_drivers("nic", settings.drivers)
    check_pools("nic", settings.pools)


async def serve(settings: NicSettings, runtime: Runtime) -> None:
    """Serve this node's NICs until cancelled."""
    await serve_devices(settings, runtime, "nic")
