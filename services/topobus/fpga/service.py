"""The fpga service: the device host, run for class `fpga`."""

from __future__ import annotations

from topobus.devicekit.host import serve_devices
from topobus.devicekit.pool_assignment import check_pools
from topobus.devicekit.registry import load_drivers
from topobus.devicekit.shared_devices import check_sharing_settings
from topobus.fpga.config import FpgaSettings
from topobus.runtime.service import Runtime

__all__ = ["check", "serve"]


def check(settings: FpgaSettings) -> None:
    """Refuse names of plugins that are not installed, and pools that cannot be.

    Errors: raises ConfigError that names the key.
    """
    load_drivers("fpga", settings.drivers)
    check_pools("fpga", settings.pools)
    check_sharing_settings("fpga", settings.sharing, settings.pools)


async def serve(settings: FpgaSettings, runtime: Runtime) -> None:
    """Serve this node's FPGAs until cancelled."""
    await serve_devices(settings, runtime, "fpga")
