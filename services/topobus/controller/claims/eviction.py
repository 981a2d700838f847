"""Whether, when and why an allocated claim has to go because of its devices' taints.

Flows in: an allocation, the evicting taints of its devices, and since when each is there. Flows out: the earliest eviction that nothing holds off. The tolerations
are those copied into the allocation: later edits of the claim's class or slices change nothing that was granted.
Source: k8s.io/kubernetes pkg/controller/devicetainteviction, 1.36.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from topobus.controller.allocation.values import DeviceId
from topobus.controller.state.taint_index import (
    EXECUTES,
    RuleTaint,
    TaintRule,
    matches,
    tolerates,
)
from topobus.domain.outcome import Reason
from topobus.kubernetes.api.resource import AllocationResult, GrantedDevice, Taint

__all__ = ["Eviction", "next_eviction", "reason_of", "rule_condition"]


@dataclass(frozen=True)
class Eviction:
    """A claim has to go."""

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
    """Find the earliest eviction of a claim; None when it tolerates everything for ever.

    Order: the earliest, among equals the first device and its first taint.
    """
    found: Eviction | None = None
    for granted in allocation.devices.results:
        device = DeviceId(granted.driver, granted.pool, granted.device)
        for one in taints_of(device):
            after = _tolerated_for(granted, one.taint)
            if after is None:
                continue
            due = since(device, one.taint) + after
            if found is None or due < found.due:
                found = Eviction(device, one.taint, one.rule, due)
    return found


def _tolerated_for(granted: GrantedDevice, taint: Taint) -> timedelta | None:
    """Say for how long a device's user bears a taint: not at all (zero), the shortest time that a toleration names, or for ever (None)."""
    bearing = [one for one in granted.tolerations if one.effect in ("", EXECUTES) and tolerates(one, taint)]
    if not bearing:
        return timedelta(0)
    limited = [one.toleration_seconds for one in bearing if one.toleration_seconds is not None]
    # A time of zero or less means at once; a very long one is no date that Python knows, and means for ever as well.
    shortest = min(limited, default=None)
    return None if shortest is None or shortest > 10**10 else timedelta(seconds=max(shortest, 0))


def reason_of(one: Eviction, claim: str, pods: Sequence[str]) -> Reason:
    """Tell why a claim is evicted, and whose it was."""
    taint = f"{one.taint.key}={one.taint.value}:{one.taint.effect}" if one.taint.value else f"{one.taint.key}:{one.taint.effect}"
    by = f" by DeviceTaintRule {one.rule}" if one.rule else ""
    users = f"; used by {', '.join(pods)}" if pods else ""
    return Reason(
        code="evicted",
        message=f"device {one.device} is tainted {taint}{by}, which the claim does not tolerate (any longer){users}",
        facts={"claim": claim, "device": str(one.device), "taint": taint, "rule": one.rule, "pods": tuple(pods)},
    )


def rule_condition(
    rule: TaintRule, *, published: int, pending: int, allocations: Sequence[tuple[AllocationResult, Sequence[str]]]
) -> tuple[bool, str, str]:
    """Say how far a rule's evictions are, or what they would be: is it in progress, a reason, and a message.

    Shapes: allocations — of all claims, each with the pods that use it; pending — claims that are to go because of the rule and are still there.
    """
    devices: set[DeviceId] = set()
    pods: set[str] = set()
    for allocation, users in allocations:
        mine = {DeviceId(one.driver, one.pool, one.device) for one in allocation.devices.results}
        mine = {one for one in mine if matches(rule.selector, one)}
        if mine:
            devices |= mine
            pods.update(users)
    selected = f"{published} published devices selected, {len(devices)} of them allocated to claims of {len(pods)} pods"
    if rule.taint.effect != EXECUTES:
        return (
            False,
            rule.taint.effect if rule.taint.effect in ("None", "NoSchedule") else "UnknownEffect",
            f"{selected}; nothing is evicted",
        )
    if pending:
        return True, "PodsPendingEviction", f"{selected}; {pending} claims are to be let go"
    return False, "Completed", f"{selected}; nothing is to be evicted"
