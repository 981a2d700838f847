"""Applies an operator's decisions to the devices of a class. Pure.

A decision about an absent device counts all the same: a card that is taken out and put in again is
still excluded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from msgspec import structs

from topobus.engine.health.health_machine import clear_sticky_faults
from topobus.engine.health.inventory_merge import DriverView
from topobus.formats.messages.operation_messages import ClassMaintenance, Operated, PerformedOperation, PerformRequest
from topobus.values.device import Device
from topobus.values.health import Observation
from topobus.values.maintenance import DeviceOperation, DeviceVerb, Maintenance
from topobus.values.outcome import Refusal, refuse

__all__ = [
    "OPERATIONS_KEPT",
    "changed_by",
    "fault_of_expectation",
    "forgiven",
    "performed",
    "sticky_signs",
    "with_forgiveness",
    "with_maintenance",
    "with_operation",
]

OPERATIONS_KEPT = 32
"""Answers kept for who asks again; an operator asks again within minutes."""


def with_maintenance(devices: Iterable[Device], maintenance: Mapping[str, Maintenance]) -> tuple[Device, ...]:
    """Set each device's maintenance, and remove what does not apply any more.

    A device for which nothing changes is the same value.
    """
    return tuple(
        device
        if device.maintenance == maintenance.get(device.name)
        else structs.replace(device, maintenance=maintenance.get(device.name))
        for device in devices
    )


def forgiven(devices: Iterable[Device], names: Collection[str]) -> tuple[Device, ...]:
    """Lift the sticky faults of some devices. From then on they heal as ordinary ones do."""
    return tuple(
        structs.replace(device, health=clear_sticky_faults(device.health)) if device.name in names else device
        for device in devices
    )


def sticky_signs(views: Mapping[str, DriverView], device: str) -> tuple[Observation, ...]:
    """Return the sticky evidence that drivers see of a device now."""
    return tuple(sign for view in views.values() for sign in view.observations.get(device, ()) if sign.is_sticky)


def with_forgiveness(
    views: Mapping[str, DriverView], signs: Mapping[str, tuple[Observation, ...]]
) -> dict[str, DriverView]:
    """Remove the stickiness of evidence that was forgiven and is still seen.

    New evidence, also of the same reason, stays sticky.

    Shapes: signs — by device, as `sticky_signs` returned them when it was forgiven.
    """
    if not signs:
        return dict(views)
    return {name: _without_stickiness(view, signs) for name, view in views.items()}


def _without_stickiness(view: DriverView, signs: Mapping[str, tuple[Observation, ...]]) -> DriverView:
    changed = {
        name: tuple(
            structs.replace(sign, is_sticky=False) if sign in signs[name] else sign for sign in view.observations[name]
        )
        for name in sorted(signs.keys() & view.observations.keys())
    }
    return replace(view, observations={**view.observations, **changed}) if changed else view


def changed_by(before: ClassMaintenance, request: PerformRequest) -> ClassMaintenance:
    """Compute the class's maintenance after an operation.

    A decision that repeats the present one keeps its time, and a different one replaces it.

    Shapes: only `maintain`, `exclude` and `return` change anything.
    """
    operation, devices = request.operation, dict(before.devices)
    was = devices.get(operation.device)
    if operation.verb is DeviceVerb.RETURN:
        devices.pop(operation.device, None)
    elif operation.verb.is_lasting:
        is_same = was is not None and (was.verb, was.is_draining) == (operation.verb, operation.is_draining)
        devices[operation.device] = Maintenance(
            verb=operation.verb,
            why=operation.why,
            who=operation.who,
            # A toleration that ends must not begin again.
            since=was.since if was is not None and is_same else request.time,
            is_draining=operation.is_draining,
            op_id=request.op_id,
        )
    return structs.replace(before, devices=dict(sorted(devices.items())))


def fault_of_expectation(before: ClassMaintenance, operation: DeviceOperation) -> Refusal | None:
    """Refuse an operation that expects another maintenance to be in force."""
    was = before.devices.get(operation.device)
    if operation.expects is None or operation.expects == (was.op_id if was is not None else ""):
        return None
    now = f"{was.verb} by {was.who}" if was is not None else "nothing, it was returned"
    text = f"{operation.device}: another decision is in force by now: {now}"
    return refuse("maintenance-changed", text, device=operation.device, who=was.who if was is not None else "")


def with_operation(before: ClassMaintenance, request: PerformRequest, result: Operated) -> ClassMaintenance:
    """Keep an operation with its answer. The oldest of too many is dropped."""
    kept = [operation for operation in before.operations if operation.op_id != request.op_id]
    new = PerformedOperation(op_id=request.op_id, operation=request.operation, time=request.time, result=result)
    return structs.replace(before, operations=(*kept, new)[-OPERATIONS_KEPT:])


def performed(maintenance: ClassMaintenance, op_id: str) -> PerformedOperation | None:
    """Find an operation that was performed."""
    return next((operation for operation in maintenance.operations if operation.op_id == op_id), None)
