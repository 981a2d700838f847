"""The reasons of health that Topobus itself gives: for each code what of the device it is about, how
bad it is and what brings the device back.

docs/reference/health-reasons.md explains them. A vendor's driver may give others, as whole
observations.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from topobus.values.health import Dimension, HealthState, Observation, RecoveryAction

__all__ = ["HEALTH_REASONS", "HealthReason", "sign"]

_DEGRADED, _UNHEALTHY, _UNKNOWN = HealthState.DEGRADED, HealthState.UNHEALTHY, HealthState.UNKNOWN
_COMPUTE, _MEMORY, _LINK, _THERMAL = Dimension.COMPUTE, Dimension.MEMORY, Dimension.LINK, Dimension.THERMAL
_FIRMWARE, _DRIVER, _PRESENCE = Dimension.FIRMWARE, Dimension.DRIVER, Dimension.PRESENCE
_WAIT, _RESET, _REBOOT = RecoveryAction.WAIT, RecoveryAction.RESET_DEVICE, RecoveryAction.REBOOT_NODE
_REPLACE = RecoveryAction.REPLACE


class HealthReason(NamedTuple):
    """What an observation with a code has, unless the evidence says otherwise."""

    dimension: Dimension
    state: HealthState
    action: RecoveryAction = RecoveryAction.NONE
    is_sticky: bool = False
    """No later look shows that it happened, so an operator must clear it."""


_OF_FUNCTION = {
    "aer-correctable-storm": HealthReason(_LINK, _DEGRADED),
    "aer-fatal": HealthReason(_LINK, _UNHEALTHY, _RESET),
    "aer-nonfatal": HealthReason(_LINK, _DEGRADED),
    "link-narrow": HealthReason(_LINK, _DEGRADED),
    "link-slow": HealthReason(_LINK, _DEGRADED),
    "no-kernel-driver": HealthReason(_DRIVER, _UNHEALTHY),
    "recovery-failed": HealthReason(_LINK, _UNHEALTHY, _REBOOT),
}

HEALTH_REASONS: Mapping[str, HealthReason] = MappingProxyType(
    {
        **_OF_FUNCTION,
        # Of a virtual function, whose physical one has the fault.
        **{f"parent-{code}": reason for code, reason in _OF_FUNCTION.items()},
        "carrier-lost": HealthReason(_LINK, _UNHEALTHY),
        "cleaning": HealthReason(_DRIVER, _UNKNOWN, _WAIT),
        "device-gone": HealthReason(_PRESENCE, _UNHEALTHY),
        "device-offline": HealthReason(_DRIVER, _UNHEALTHY, _RESET),
        "dirty": HealthReason(_DRIVER, _UNHEALTHY, _WAIT),
        "driver-failed": HealthReason(_DRIVER, _UNKNOWN, _WAIT),
        "driver-hung": HealthReason(_DRIVER, _UNKNOWN, _WAIT),
        "driver-not-loaded": HealthReason(_DRIVER, _UNKNOWN, _WAIT),
        "ecc-uncorrected": HealthReason(_MEMORY, _UNHEALTHY, _RESET),
        "engine-error": HealthReason(_COMPUTE, _DEGRADED),
        "engine-fatal-error": HealthReason(_COMPUTE, _UNHEALTHY, _RESET),
        "fabric-degraded": HealthReason(_LINK, _DEGRADED, _WAIT),
        "fabric-failed": HealthReason(_LINK, _UNHEALTHY, _RESET),
        "fabric-not-ready": HealthReason(_LINK, _UNHEALTHY, _WAIT),
        "fell-off-bus": HealthReason(_PRESENCE, _UNHEALTHY, _REBOOT),
        "firewall-tripped": HealthReason(_COMPUTE, _UNHEALTHY, _RESET),
        "function-crashed": HealthReason(_FIRMWARE, _UNHEALTHY, _RESET),
        "gpu-excluded": HealthReason(_DRIVER, _UNHEALTHY),
        "gpu-lost": HealthReason(_PRESENCE, _UNHEALTHY, _REBOOT),
        "half-duplex": HealthReason(_LINK, _DEGRADED),
        "health-indicator": HealthReason(_COMPUTE, _UNHEALTHY, _RESET),
        "journal-unreadable": HealthReason(_DRIVER, _UNHEALTHY, _WAIT),
        "link-errors": HealthReason(_LINK, _DEGRADED),
        "memory-corrected-storm": HealthReason(_MEMORY, _DEGRADED),
        "memory-errors": HealthReason(_MEMORY, _DEGRADED, _REPLACE),
        "memory-pages-lost": HealthReason(_MEMORY, _DEGRADED, _REPLACE),
        "mig-occupied": HealthReason(_PRESENCE, _UNHEALTHY),
        "mps-daemon-gone": HealthReason(_DRIVER, _DEGRADED, _WAIT),
        "node-missing": HealthReason(_PRESENCE, _UNKNOWN, _WAIT),
        "nvlink-down": HealthReason(_LINK, _DEGRADED, _RESET),
        "nvlink-errors": HealthReason(_LINK, _DEGRADED, _RESET),
        "page-retirement-pending": HealthReason(_MEMORY, _DEGRADED, _RESET),
        "parent-carrier-lost": HealthReason(_LINK, _UNHEALTHY),
        "parent-gone": HealthReason(_PRESENCE, _UNHEALTHY, _REBOOT),
        "port-error": HealthReason(_COMPUTE, _UNHEALTHY, _RESET),
        "power-limited": HealthReason(_THERMAL, _DEGRADED, _WAIT),
        "power-stopped": HealthReason(_THERMAL, _UNHEALTHY, _WAIT),
        "power-throttled": HealthReason(_THERMAL, _DEGRADED, _WAIT),
        "ras-uncorrected": HealthReason(_COMPUTE, _UNHEALTHY, _RESET),
        "rdma-port-down": HealthReason(_LINK, _UNHEALTHY),
        "recovery-advised": HealthReason(_DRIVER, _UNHEALTHY, _RESET),
        # What other sources than the driver say; each says by itself what it is about and how bad.
        "reported-by-source": HealthReason(_DRIVER, _UNHEALTHY),
        "row-remap-failed": HealthReason(_MEMORY, _UNHEALTHY, _REPLACE, is_sticky=True),
        "row-remap-pending": HealthReason(_MEMORY, _DEGRADED, _RESET),
        "shell-not-ready": HealthReason(_FIRMWARE, _UNHEALTHY, _WAIT),
        "speed-dropped": HealthReason(_LINK, _DEGRADED),
        "survivability-mode": HealthReason(_FIRMWARE, _UNHEALTHY, _REPLACE),
        "thermal-slowdown": HealthReason(_THERMAL, _DEGRADED, _WAIT),
        "throttled": HealthReason(_THERMAL, _DEGRADED, _WAIT),
        "too-hot": HealthReason(_THERMAL, _UNHEALTHY, _WAIT),
        "tree-unreadable": HealthReason(_DRIVER, _UNKNOWN),
        "unmonitored": HealthReason(_DRIVER, _UNKNOWN, _WAIT),
        "user-function-missing": HealthReason(_PRESENCE, _UNHEALTHY, _RESET),
        "wedged": HealthReason(_COMPUTE, _UNHEALTHY, _RESET, is_sticky=True),
        "xid": HealthReason(_COMPUTE, _UNHEALTHY, _WAIT),
    }
)


def sign(
    code: str,
    message: str,
    path: str = "",
    value: object = "",
    *,
    evidence: Mapping[str, str] = MappingProxyType({}),
    dimension: Dimension | None = None,
    state: HealthState | None = None,
    action: RecoveryAction | None = None,
    is_sticky: bool | None = None,
) -> Observation:
    """Make an observation of the catalogue: seen in a file, with its raw value, or in other evidence.

    What is given beside the evidence counts in place of what the code usually has.

    >>> sign("too-hot", "a sensor is at its limit", "sys/class/hwmon/hwmon0/temp1_input", 105000).action
    <RecoveryAction.WAIT: 'wait'>
    """
    usual = HEALTH_REASONS[code]
    return Observation(
        dimension=usual.dimension if dimension is None else dimension,
        state=usual.state if state is None else state,
        reason=code,
        message=message,
        evidence={"path": path, "value": str(value)} if path else dict(evidence),
        action=usual.action if action is None else action,
        is_sticky=usual.is_sticky if is_sticky is None else is_sticky,
    )
