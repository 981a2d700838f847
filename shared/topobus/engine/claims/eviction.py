"""Decides whether, when and why an allocated claim is evicted because of its devices' taints.

The tolerations are those copied into the allocation: later edits of the claim's class or slices do
not change an allocation.
Source: k8s.io/kubernetes pkg/controller/devicetainteviction, 1.36.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from topobus.engine.allocation.tolerations import EXECUTES, RuleTaint, TaintRule, matches
from topobus.engine.allocation.values import DeviceId
from topobus.formats.kubernetes.resource import AllocationResult, GrantedDevice, Taint
from topobus.formats.kubernetes.tolerations import tolerates
from topobus.values.outcome import Reason

__all__ = ["Eviction", "next_eviction", "reason_of", "rule_condition"]


@dataclass(frozen=True)
class Eviction:
    """A claim that must be evicted, and when."""

    device: DeviceId
    taint: Taint
    rule: str
    """The rule that put the taint there; empty for the driver."""
    due: datetime


def next_eviction(
    allocation: AllocationResult,
    taints_of: Callable[[DeviceId], Sequence[RuleTaint]],
    since: Callable[[DeviceId, Taint], datetime],
) -> Eviction | None:
    """Find the earliest eviction of a claim. None when it tolerates all taints without a time
    limit.

    Order: the earliest, among equals the first device and its first taint.
    """
    eviction: Eviction | None = None
    for granted in allocation.devices.results:
        device = DeviceId.of(granted)
        for taint in taints_of(device):
            after = _tolerated_for(granted, taint.taint)
            if after is None:
                continue
            due = since(device, taint.taint) + after
            if eviction is None or due < eviction.due:
                eviction = Eviction(device, taint.taint, taint.rule, due)
    return eviction


def _tolerated_for(granted: GrantedDevice, taint: Taint) -> timedelta | None:
    """Compute for how long a device's user tolerates a taint: not at all (zero), the shortest time
    that a toleration names, or without limit (None).
    """
    bearing = [
        toleration
        for toleration in granted.tolerations
        if toleration.effect in ("", EXECUTES) and tolerates(toleration, taint)
    ]
    if not bearing:
        return timedelta(0)
    limited = [toleration.toleration_seconds for toleration in bearing if toleration.toleration_seconds is not None]
    # A time of zero or less means at once. A very long one is no date that Python can represent,
    # and means no limit as well.
    shortest = min(limited, default=None)
    return None if shortest is None or shortest > 10**10 else timedelta(seconds=max(shortest, 0))


def reason_of(eviction: Eviction, claim: str, pods: Sequence[str]) -> Reason:
    """Explain why a claim is evicted, and which pods used it."""
    taint = (
        f"{eviction.taint.key}={eviction.taint.value}:{eviction.taint.effect}"
        if eviction.taint.value
        else f"{eviction.taint.key}:{eviction.taint.effect}"
    )
    by = f" by DeviceTaintRule {eviction.rule}" if eviction.rule else ""
    users = f"; used by {', '.join(pods)}" if pods else ""
    return Reason(
        code="evicted",
        message=f"device {eviction.device} is tainted {taint}{by}, which the claim does not tolerate (any "
        f"longer){users}",
        facts={
            "claim": claim,
            "device": str(eviction.device),
            "taint": taint,
            "rule": eviction.rule,
            "pods": tuple(pods),
        },
    )


def rule_condition(
    rule: TaintRule, *, published: int, pending: int, allocations: Sequence[tuple[AllocationResult, Sequence[str]]]
) -> tuple[bool, str, str]:
    """Describe how far a rule's evictions are, or what they would be: whether it is in progress, a
    reason, and a message.

    Shapes: allocations — of all claims, each with the pods that use it; pending — claims that must
            go because of the rule and are still there.
    """
    devices: set[DeviceId] = set()
    pods: set[str] = set()
    for allocation, users in allocations:
        device_ids = {DeviceId.of(granted) for granted in allocation.devices.results}
        device_ids = {device_id for device_id in device_ids if matches(rule.selector, device_id)}
        if device_ids:
            devices |= device_ids
            pods.update(users)
    selected = f"{published} published devices selected, {len(devices)} of them allocated to claims of {len(pods)} pods"
    if rule.taint.effect != EXECUTES:
        return (
            False,
            rule.taint.effect if rule.taint.effect in ("None", "NoSchedule") else "UnknownEffect",
            f"{selected}; nothing is evicted",
        )
    if pending:
        return True, "PodsPendingEviction", f"{selected}; {pending} claims are to be released"
    return False, "Completed", f"{selected}; nothing is to be evicted"
