"""The gpu service: the device host, run for class `gpu`."""

from __future__ import annotations

from topobus.devicekit.host import serve_devices
from topobus.devicekit.pool_assignment import check_pools
from topobus.devicekit.registry import load_drivers
from topobus.gpu.config import GpuSettings
from topobus.runtime.service import Runtime

__all__ = ["check", "serve"]


def check(settings: GpuSettings) -> None:
    """Refuse names of plugins that are not installed, and pools that cannot be.

    Errors: raises ConfigError that names the key.
    """
    load_drivers("gpu", settings.drivers)
    check_pools("gpu", settings.pools)


async def serve(settings: GpuSettings, runtime: Runtime) -> None:
    """Serve this node's GPUs until cancelled."""
    await serve_devices(settings, runtime, "gpu")
