"""Decides what there is to tell of the health of devices that claims have: which of them fail,
which are well again, and which pods lose their place by it.

Flows in: devices of inventories, what was told before, pods and times in seconds of one
monotonic clock. Flows out: faults by device, the condition of a device in a claim's status, and
pods to evict. Between sick and well (Unknown, Recovering) nothing is told: a device that comes
and goes would fill a pod's events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from topobus.gateway.cluster.rules.waiting import NodePod
from topobus.values.device import Device
from topobus.values.health import HealthState

__all__ = ["HealthNote", "health_note", "lost_claim"]


class HealthNote(Struct, frozen=True, kw_only=True):
    """What is told of one device's health."""

    is_healthy: bool
    code: str = ""
    """The reason code of what makes it sick (`fell-off-bus`); empty when it is well."""
    message: str = ""
    since: str = ""
    """When it became so, in whole seconds of UTC."""


def health_note(device: Device | None, earlier: HealthNote | None, now: str) -> HealthNote | None:
    """Give what is to be told of a device now; `earlier` when that is what was told, None while
    nothing was ever wrong with it.

    Shapes: device — None: it is not in the inventory, of which nothing follows.
    """
    if device is None:
        return earlier
    if device.health.state is HealthState.UNHEALTHY:
        worst = device.health.worst
        code, message = (worst.reason, worst.message) if worst is not None else ("unhealthy", "")
        if earlier is not None and (earlier.is_healthy, earlier.code) == (False, code):
            return earlier
        return HealthNote(is_healthy=False, code=code, message=message or "its service says no more", since=now)
    if earlier is None or earlier.is_healthy or not device.health.is_allocatable:
        return earlier
    return HealthNote(is_healthy=True, since=now)


def lost_claim(pod: NodePod, sick_claims: Mapping[str, Iterable[str]]) -> str:
    """Say what makes a pod's eviction due that no taint of the cluster evicts.

    Empty when nothing does. Kubernetes' device taint eviction looks at claims of
    `spec.resourceClaims` alone (pkg/controller/devicetainteviction, 1.36), not at the one that the
    scheduler made of a pod's resources.

    Shapes: sick_claims — namespace and name of a claim to its sick devices.
    """
    devices = sorted(sick_claims.get(f"{pod.namespace}/{pod.resource_claim}", ())) if pod.resource_claim else []
    return f"unhealthy: {', '.join(devices)} of claim {pod.namespace}/{pod.resource_claim}" if devices else ""
