"""Device health as a value: what is wrong, how bad, since when, on what evidence, and what to do.

Silence is no evidence of a fault: a device whose service stopped reporting is Unknown. Only
evidence makes it Unhealthy.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

__all__ = ["HEALTHY", "Condition", "DeviceHealth", "Dimension", "HealthState", "Observation", "RecoveryAction"]


class HealthState(StrEnum):
    """How healthy a device is. Only HEALTHY and DEGRADED devices are allocated."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """Works, with less than it should: a narrower link, a lower speed. Still allocatable."""
    UNHEALTHY = "unhealthy"
    RECOVERING = "recovering"
    """The evidence is gone but not for long enough yet. Not allocatable."""
    UNKNOWN = "unknown"


class Dimension(StrEnum):
    """The part of the device that an observation is about."""

    COMPUTE = "compute"
    MEMORY = "memory"
    LINK = "link"
    THERMAL = "thermal"
    FIRMWARE = "firmware"
    DRIVER = "driver"
    PRESENCE = "presence"


class RecoveryAction(StrEnum):
    """What brings the device back."""

    NONE = "none"
    WAIT = "wait"
    RESET_DEVICE = "reset-device"
    REBOOT_NODE = "reboot-node"
    REPLACE = "replace"


class Observation(Struct, frozen=True, kw_only=True):
    """What a driver saw of one device in one dimension, at one look, or what another source says of
    it.

    No observation for a dimension means: nothing wrong there.
    """

    dimension: Dimension
    state: HealthState
    reason: str
    """A stable kebab code: `fell-off-bus`, `aer-fatal`, `link-narrow`, `carrier-lost`."""
    message: str = ""
    evidence: dict[str, str] = {}
    """Where it was seen and the raw value: `{"path": "…/aer_dev_fatal", "value": "1"}`."""
    action: RecoveryAction = RecoveryAction.NONE
    is_sticky: bool = False
    """True: does not heal by itself when the evidence goes; an operator must clear it."""
    source: str = ""
    """Who says it, when that is not the device's driver: the source of a verdict."""


class Condition(Struct, frozen=True, kw_only=True):
    """An observation with its time: the health machine's state in one dimension, by the driver or
    by one other source.
    """

    dimension: Dimension
    state: HealthState
    reason: str
    message: str = ""
    evidence: dict[str, str] = {}
    action: RecoveryAction = RecoveryAction.NONE
    since: str = ""
    """RFC 3339, UTC: when this state began."""
    is_sticky: bool = False
    """True: stays until an operator forgives it."""
    relapses: int = 0
    """How often it got sick again while recovering; each one lengthens the next recovery."""
    until: str = ""
    """RFC 3339, UTC: while it recovers, when it can be allocated again unless it gets sick before.
    Empty in all other states."""
    source: str = ""
    """The source of the verdict that it comes from; empty: the device's driver."""


class DeviceHealth(Struct, frozen=True, kw_only=True):
    """A device's health rolled up: the worst condition decides the state.

    A healthy device has no conditions.
    """

    state: HealthState = HealthState.HEALTHY
    since: str = ""
    conditions: tuple[Condition, ...] = ()

    @property
    def is_allocatable(self) -> bool:
        """Say whether a device in this state may be allocated."""
        return self.state in (HealthState.HEALTHY, HealthState.DEGRADED)

    @property
    def worst(self) -> Condition | None:
        """The condition that decides, or None when healthy."""
        order = (HealthState.UNHEALTHY, HealthState.UNKNOWN, HealthState.RECOVERING, HealthState.DEGRADED)
        return next((condition for state in order for condition in self.conditions if condition.state is state), None)


HEALTHY = DeviceHealth()
