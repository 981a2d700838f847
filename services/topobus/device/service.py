"""The device host, run for a class of the operator's own."""

from __future__ import annotations

from topobus.device.config import DeviceSettings
from topobus.devicekit.host.host import serve_devices
from topobus.devicekit.registry import load_drivers
from topobus.devicekit.sharing.shared_devices import check_sharing_settings
from topobus.engine.health.pool_assignment import check_pools
from topobus.process.service import Runtime

__all__ = ["ClassService"]


class ClassService:
    """Serves one class with the drivers that other packages installed for it."""

    def __init__(self, device_class: str) -> None:
        self._class = device_class

    def check(self, settings: DeviceSettings) -> None:
        """Refuse plugins that are not installed, and invalid pools.

        Errors: raises ConfigError that names the key.
        """
        load_drivers(self._class, settings.drivers)
        check_pools(self._class, settings.pools)
        check_sharing_settings(self._class, settings.sharing, settings.pools)

    async def serve(self, settings: DeviceSettings, runtime: Runtime) -> None:
        """Serve this node's devices of the class until cancelled."""
        await serve_devices(settings, runtime, self._class)
