"""Settings of the discovery service."""

from __future__ import annotations

from topobus.process.config import ServiceSettings
from topobus.sysfs.tree import HardwareSettings

__all__ = ["DiscoverySettings"]


class DiscoverySettings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the discovery service."""

    hardware: HardwareSettings = HardwareSettings()
    """Where the machine is read and how often (`topobus.sysfs.tree`)."""
