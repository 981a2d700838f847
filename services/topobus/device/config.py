"""Settings of `topobus-device`: those of every device service, read from the variables of its class
(`TOPOBUS_NPU__…`).
"""

from __future__ import annotations

from topobus.devicekit.settings import DeviceServiceSettings

__all__ = ["DeviceSettings"]


class DeviceSettings(DeviceServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `topobus-device --class NAME`.

    Its variables have the class's name: `TOPOBUS_NPU__HTTP__PORT` for class `npu`.
    """
