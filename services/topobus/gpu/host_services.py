"""What the gpu service gives its drivers beside what every device service gives."""

from __future__ import annotations

from topobus.devicekit.driver import HostServices
from topobus.gpu.config import LeftoverSettings
from topobus.gpu.mps.daemons import MpsDaemons

__all__ = ["GpuServices"]


class GpuServices(HostServices, frozen=True, kw_only=True):
    """How GPUs are cleaned after an owner, and who runs the daemons of MPS."""

    leftovers: LeftoverSettings = LeftoverSettings()
    mps: MpsDaemons | None = None
    """The control daemons of MPS, and who runs them; None: by the default settings, an operator."""
