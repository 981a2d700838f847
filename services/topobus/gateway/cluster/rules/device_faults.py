"""Decides what to report about the health of claims' devices: which of them fail, which are healthy
again, and which pods have to be evicted.

Times are in seconds of one monotonic clock. In the states between healthy and unhealthy (Unknown,
Recovering) nothing is reported, because a device that comes and goes would fill a pod's events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from topobus.gateway.cluster.rules.waiting import NodePod
from topobus.values.device import Device
from topobus.values.health import HealthState

__all__ = ["HealthNote", "health_note", "lost_claim"]


class HealthNote(Struct, frozen=True, kw_only=True):
    """The reported health of one device."""

    is_healthy: bool
    code: str = ""
    """The reason code of its fault (`fell-off-bus`). Empty: it is healthy."""
    message: str = ""
    since: str = ""
    """When this state began, in whole seconds of UTC."""


def health_note(device: Device | None, earlier: HealthNote | None, now: str) -> HealthNote | None:
    """Return what to report of a device now: `earlier` when that has not changed, None while it was
    never unhealthy.

    Shapes: device — None: it is not in the inventory, which proves nothing.
    """
    if device is None:
        return earlier
    if device.health.state is HealthState.UNHEALTHY:
        worst = device.health.worst
        code, message = (worst.reason, worst.message) if worst is not None else ("unhealthy", "")
        if earlier is not None and (earlier.is_healthy, earlier.code) == (False, code):
            return earlier
        return HealthNote(is_healthy=False, code=code, message=message or "its service gives no reason", since=now)
    if earlier is None or earlier.is_healthy or not device.health.is_allocatable:
        return earlier
    return HealthNote(is_healthy=True, since=now)


def lost_claim(pod: NodePod, sick_claims: Mapping[str, Iterable[str]]) -> str:
    """Return the reason why a pod must be evicted that no taint of the cluster evicts.

    Empty when there is none. Kubernetes' device taint eviction handles only claims of
    `spec.resourceClaims` (pkg/controller/devicetainteviction, 1.36), and not the one that the
    scheduler made for a pod's resources.

    Shapes: sick_claims — namespace and name of a claim to its unhealthy devices.
    """
    devices = sorted(sick_claims.get(f"{pod.namespace}/{pod.resource_claim}", ())) if pod.resource_claim else []
    return f"unhealthy: {', '.join(devices)} of claim {pod.namespace}/{pod.resource_claim}" if devices else ""
