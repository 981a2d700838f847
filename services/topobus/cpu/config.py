"""Settings of the cpu service: those of every device service."""

from __future__ import annotations

from topobus.devicekit.settings import CpuGroupSettings, DeviceServiceSettings

__all__ = ["CpuSettings"]


class CpuSettings(DeviceServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the cpu service."""

    cpus: CpuGroupSettings = CpuGroupSettings()
    """How CPUs are offered."""
