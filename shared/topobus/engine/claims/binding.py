"""Binding conditions: devices that are usable only after a step such as attaching them to the node
over a fabric.

A device names binding conditions, which its driver reports in the claim's `status.devices`. A pod
waits until all are True. A binding failure condition that is True, or a time-out, deallocates the
devices.
Source: KEP-5007; k8s.io/kubernetes pkg/scheduler/framework/plugins/dynamicresources (PreBind),
1.36.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from topobus.formats.kubernetes.resource import ClaimStatus, GrantedDevice
from topobus.values.timestamps import moment_of

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
    """The devices must be deallocated."""

    why: str


BindingState = BindingReady | BindingWaits | BindingFailed


def binding_state(status: ClaimStatus, *, now: datetime, timeout_s: float) -> BindingState:
    """Compute the binding state of an allocated claim. A claim without binding conditions is
    ready.
    """
    results = status.allocation.devices.results if status.allocation is not None else ()
    waiting = [granted_device for granted_device in results if granted_device.binding_conditions]
    if not waiting:
        return BindingReady()
    missing: list[str] = []
    for granted_device in waiting:
        conditions = _conditions(status, granted_device)
        for name in granted_device.binding_failure_conditions:
            if name in conditions:
                message = f": {conditions[name]}" if conditions[name] else ""
                return BindingFailed(f"device {granted_device.device} reports {name}{message}")
        missing.extend(
            f"{granted_device.device}: {name}" for name in granted_device.binding_conditions if name not in conditions
        )
    if not missing:
        return BindingReady()
    since = moment_of(status.allocation.allocation_timestamp if status.allocation is not None else None) or now
    until = since + timedelta(seconds=timeout_s)
    if now >= until:
        return BindingFailed(f"{', '.join(missing)} not true {timeout_s:g} s after the allocation")
    return BindingWaits(tuple(missing), until)


def _conditions(status: ClaimStatus, granted: GrantedDevice) -> dict[str, str]:
    """List the conditions of a device that are True, with their messages."""
    messages: dict[str, str] = {}
    for device in status.devices:
        if (device.get("driver"), device.get("pool"), device.get("device"), device.get("shareID")) != (
            granted.driver,
            granted.pool,
            granted.device,
            granted.share_id,
        ):
            continue
        for condition in device.get("conditions") or ():
            if isinstance(condition, Mapping) and condition.get("status") == "True":
                messages[str(condition.get("type"))] = str(condition.get("message") or "")
    return messages
