"""The gpu service: the device host, run for class `gpu`."""

from __future__ import annotations

from topobus.devicekit.host import serve_devices
from topobus.gpu.config import GpuSettings
from topobus.runtime.service import Runtime

__all__ = ["serve"]


async def serve(settings: GpuSettings, runtime: Runtime) -> None:
    """Serve this node's GPUs until cancelled."""
    await serve_devices(settings, runtime, "gpu")
