"""The fpga service: the device host, run for class `fpga`."""

from __future__ import annotations

from pathlib import Path

from topobus.devicekit.host.host import serve_devices
from topobus.fpga.config import FpgaSettings
from topobus.fpga.host_services import FpgaServices
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.sysfs.filesystem import is_kernels

__all__ = ["serve"]


async def serve(settings: FpgaSettings, runtime: Runtime) -> None:
    """Serve this node's FPGAs until cancelled."""
    sys = str(Path(settings.hardware.root, settings.hardware.sys))
    is_recorded = sys != "/sys" and not is_kernels(sys)
    if settings.functions.program and is_recorded:
        # The names of a recorded machine must not be looked up among this machine's nodes.
        get_logger().warning("regions.kept", why=f"functions.program does nothing: {sys} is a recorded machine's")
    services = FpgaServices(functions=settings.functions, can_program=settings.functions.program and not is_recorded)
    await serve_devices(settings, runtime, "fpga", host_services=services)
