"""Devices that are ready only after something was done with them: attached to the node over a fabric, say.

A device names binding conditions, which its driver reports in the claim's `status.devices`. A pod waits until all are True; one binding failure condition that is True,
or a wait that is too long, gives the devices back. Flows in: a claim's status and the time. Flows out: ready, waiting for what, or failed and why.
Source: KEP-5007; k8s.io/kubernetes pkg/scheduler/framework/plugins/dynamicresources (PreBind), 1.36.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from topobus.kubernetes.api.resource import ClaimStatus, GrantedDevice

__all__ = ["BindingFailed", "BindingReady", "BindingState", "BindingWaits", "binding_state"]


@dataclass(frozen=True)
class BindingReady:
    """All devices may be used."""


@dataclass(frozen=True)
class BindingWaits:
    """Some conditions are not True yet."""

    missing: tuple[str, ...]
    """`device: condition`, in order."""
    until: datetime


@dataclass(frozen=True)
class BindingFailed:
    """The devices have to be given back."""

    why: str


BindingState = BindingReady | BindingWaits | BindingFailed


def binding_state(status: ClaimStatus, *, now: datetime, timeout_s: float) -> BindingState:
    """Judge the devices of an allocated claim; one without binding conditions is ready."""
    results = status.allocation.devices.results if status.allocation is not None else ()
    waiting = [one for one in results if one.binding_conditions]
    if not waiting:
        return BindingReady()
    missing: list[str] = []
    for one in waiting:
        conditions = _conditions(status, one)
        for name in one.binding_failure_conditions:
            if name in conditions:
                message = f": {conditions[name]}" if conditions[name] else ""
                return BindingFailed(f"device {one.device} reports {name}{message}")
        missing.extend(f"{one.device}: {name}" for name in one.binding_conditions if name not in conditions)
    if not missing:
        return BindingReady()
    since = _moment(status.allocation.allocation_timestamp if status.allocation is not None else None) or now
    until = since + timedelta(seconds=timeout_s)
    if now >= until:
        return BindingFailed(f"{', '.join(missing)} not true {timeout_s:g} s after the allocation")
    return BindingWaits(tuple(missing), until)


def _conditions(status: ClaimStatus, granted: GrantedDevice) -> dict[str, str]:
    """List the conditions of a device that are True, with their messages."""
    found: dict[str, str] = {}
    for one in status.devices:
        if (one.get("driver"), one.get("pool"), one.get("device"), one.get("shareID")) != (
            granted.driver,
            granted.pool,
            granted.device,
            granted.share_id,
        ):
            continue
        for condition in one.get("conditions") or ():
            if isinstance(condition, Mapping) and condition.get("status") == "True":
                found[str(condition.get("type"))] = str(condition.get("message") or "")
    return found


def _moment(text: str | None) -> datetime | None:
    try:
        found = datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found is not None and found.tzinfo is None else found
