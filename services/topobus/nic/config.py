"""Settings of the nic service: those of every device service."""

from __future__ import annotations

from topobus.devicekit.settings import DeviceServiceSettings

__all__ = ["NicSettings"]


class NicSettings(DeviceServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the nic service."""
