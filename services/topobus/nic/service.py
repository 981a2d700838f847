"""The nic service: the device host, run for class `nic`."""

from __future__ import annotations

from topobus.devicekit.host import serve_devices
from topobus.nic.config import NicSettings
from topobus.runtime.service import Runtime

__all__ = ["serve"]


async def serve(settings: NicSettings, runtime: Runtime) -> None:
    """Serve this node's NICs until cancelled."""
    await serve_devices(settings, runtime, "nic")
