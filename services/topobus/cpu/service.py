"""The cpu service: the device host, run for class `cpu`."""

from __future__ import annotations

from topobus.cpu.config import CpuSettings
from topobus.devicekit.host import serve_devices
from topobus.runtime.service import Runtime

__all__ = ["serve"]


async def serve(settings: CpuSettings, runtime: Runtime) -> None:
    """Serve this node's CPUs until cancelled."""
    await serve_devices(settings, runtime, "cpu")
