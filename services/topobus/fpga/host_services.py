"""What the fpga service gives its drivers beside what every device service gives."""

from __future__ import annotations

from topobus.devicekit.driver import HostServices
from topobus.fpga.config import FunctionSettings

__all__ = ["FpgaServices"]


class FpgaServices(HostServices, frozen=True, kw_only=True):
    """Where bitstreams are, and whether cards are programmed."""

    functions: FunctionSettings = FunctionSettings(store="")
    can_program: bool = False
    """False also where the operator wants it and this machine cannot."""
