"""The settings that all device services share: where the hardware is, which drivers run, how health moves.

A device service's own settings struct subclasses `DeviceServiceSettings` and adds what only its class needs.
"""

from __future__ import annotations

from msgspec import Struct

from topobus.domain.errors import ConfigError
from topobus.runtime.config import ServiceSettings
from topobus.sysfs.tree import HardwareSettings

__all__ = ["DeviceServiceSettings", "DriverSettings", "HealthSettings", "check_device_settings"]


class DriverSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which vendor plugins run and how long they may take."""

    allow: tuple[str, ...] = ()
    """Names of the plugins to run; empty: all that are installed for this class."""
    deny: tuple[str, ...] = ()
    """Names of plugins never to load, not even when `allow` names them."""
    timeout_s: float = 5.0
    """Seconds one call of a plugin may take before its devices count as Unknown. 5 s: half of the 10 s that a gateway waits for `prepare`."""
    first_wait_s: float = 2.0
    """Seconds the first inventory waits for slow plugins. 2 s: a node must be registered with kubelet within 3 s of its start."""
    hints_timeout_s: float = 0.015
    """Seconds a plugin with hints of its own may think. 15 ms: the asker gives up after 20 ms."""


class HealthSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a device's health moves between two looks."""

    poll_s: float = 1.0
    """Seconds between two looks at all devices. 1 s: some files a device; a fault is known before a scheduler could use the device again."""
    hold_s: float = 30.0
    """Seconds without evidence until Recovering becomes Healthy. 30 s: longer than a GPU reset or a link's retraining takes."""
    flap_count: int = 4
    """After so many relapses the hold stops growing: it doubles with each relapse while Recovering. 4: at most 16 times `hold_s`."""
    forget_s: float = 600.0
    """Seconds a vanished device stays listed as Unhealthy after nobody holds it. 10 min: longer than a node's drain and a card's re-seat."""
    forgive: tuple[str, ...] = ()
    """Devices whose sticky faults are forgiven as the service starts: an operator has repaired or replaced them."""


class DeviceServiceSettings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of every device service."""

    hardware: HardwareSettings = HardwareSettings()
    """Where the hardware is read and how often."""
    drivers: DriverSettings = DriverSettings()
    """Which plugins run."""
    health: HealthSettings = HealthSettings()
    """How health moves."""


def check_device_settings(settings: DeviceServiceSettings) -> None:
    """Refuse times that cannot work.

    Errors: raises ConfigError that names the key.
    """
    positive = {
        "hardware.rescan_s": settings.hardware.rescan_s,
        "drivers.timeout_s": settings.drivers.timeout_s,
        "drivers.hints_timeout_s": settings.drivers.hints_timeout_s,
        "health.poll_s": settings.health.poll_s,
    }
    for key, value in positive.items():
        if not value > 0:
            raise ConfigError(f"{key} is {value}: wanted more than 0 seconds", next_step=f"set {key} to a positive number", key=key)
    not_negative = {
        "drivers.first_wait_s": settings.drivers.first_wait_s,
        "health.hold_s": settings.health.hold_s,
        "health.flap_count": float(settings.health.flap_count),
        "health.forget_s": settings.health.forget_s,
    }
    for key, value in not_negative.items():
        if not value >= 0:
            raise ConfigError(f"{key} is {value}: wanted 0 or more", next_step=f"set {key} to 0 or a positive number", key=key)
