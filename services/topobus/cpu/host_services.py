"""What the cpu service gives its driver beside what every device service gives."""

from __future__ import annotations

from topobus.cpu.config import CpuGroupSettings
from topobus.devicekit.driver import HostServices

__all__ = ["CpuServices"]


class CpuServices(HostServices, frozen=True, kw_only=True):
    """How CPUs are offered: singly or in groups."""

    cpus: CpuGroupSettings = CpuGroupSettings()
