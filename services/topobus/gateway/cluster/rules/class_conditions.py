"""Decides the conditions of a Node that say which of its device classes are ready
(`topobus.dev/gpu-ready`), and when its start-up taint goes.

A class is ready when its device service has looked in this boot of the node, the devices that the
operator expects are there, and pods can have them: by slices, by a device plugin, or both. A class
that was ready in this boot becomes unready by evidence alone: a device or its driver is gone. What
is not known yet, because this gateway or a device service was just started, changes nothing, so
that no roll-over is seen. The message ends with the boot: a condition of an earlier boot, which the
API server keeps, counts for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct

from topobus.formats.kubernetes.limit_rules import is_label_name, is_label_value
from topobus.formats.kubernetes.resource import Taint
from topobus.formats.messages.messages import ApiObject
from topobus.gateway.cluster.rules.shortening import shortened
from topobus.values.device import Device, Inventory
from topobus.values.health import HealthState
from topobus.values.names import is_dns_label
from topobus.values.node_text import counted, first_of

__all__ = [
    "ClassReason",
    "ClassState",
    "NodeCondition",
    "class_conditions",
    "read_taint",
    "ready_classes",
    "shown_conditions",
    "taint_removal",
]

_PREFIX, _SUFFIX = "topobus.dev/", "-ready"
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_GONE = frozenset({"device-gone", "fell-off-bus", "gpu-lost", "parent-gone"})
_DRIVERLESS = frozenset({"driver-not-loaded", "no-kernel-driver", "parent-no-kernel-driver"})
# No answer proves neither that the device is there nor that it is not.
_UNANSWERED = frozenset({"driver-failed", "driver-hung", "unmonitored"})
# Devices that a message names.
_SHOWN = 4
# Of a message. A Node is read by every controller of the cluster.
_MOST_BYTES = 512


class ClassReason(StrEnum):
    """Why a class is ready or not, as Kubernetes spells reasons."""

    READY = "Ready"
    STARTING = "Starting"
    DRIVER_MISSING = "DriverMissing"
    FEWER_THAN_EXPECTED = "FewerThanExpected"


class ClassState(Struct, frozen=True, kw_only=True):
    """What is known of one class."""

    inventory: Inventory | None = None
    expected: int | None = None
    """The least number of devices that the operator expects. None: one at least."""
    awaited: tuple[str, ...] = ()
    """What pods need to have its devices and is not there yet: `its slices`."""


class NodeCondition(Struct, frozen=True, kw_only=True, rename="camel"):
    """A condition of a Node in Kubernetes' wire shape."""

    type: str
    status: str
    reason: str
    message: str
    last_transition_time: str


def shown_conditions(node: ApiObject) -> dict[str, NodeCondition]:
    """Return the conditions about device classes that a Node has, by class."""
    shown: dict[str, NodeCondition] = {}
    for condition in node.status.get("conditions") or ():
        kind = str(condition.get("type", ""))
        device_class = kind.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        if kind == _type_of(device_class) and is_dns_label(device_class):
            fields = ("status", "reason", "message", "lastTransitionTime")
            status, reason, message, since = (str(condition.get(field) or "") for field in fields)
            shown[device_class] = NodeCondition(
                type=kind, status=status, reason=reason, message=message, last_transition_time=since
            )
    return shown


def class_conditions(
    classes: Mapping[str, ClassState], present: Mapping[str, NodeCondition], *, boot_id: str, now: str
) -> dict[str, NodeCondition]:
    """Decide the conditions that a Node should have, by class.

    Shapes: present — those that it has; now — the time of a change, in whole seconds. The result
    has no condition of a class that is neither in `classes` nor was heard of in this boot.
    """
    kept = {name: condition for name, condition in present.items() if _is_of_boot(condition, boot_id)}
    decided = {
        name: _condition(name, *_verdict(state, boot_id), present.get(name), boot_id=boot_id, now=now)
        for name, state in classes.items()
    }
    return dict(sorted({**kept, **decided}.items()))


def ready_classes(conditions: Mapping[str, NodeCondition], boot_id: str) -> frozenset[str]:
    """Return the classes that conditions of this boot show as ready."""
    return frozenset(
        name for name, shown in conditions.items() if shown.status == "True" and _is_of_boot(shown, boot_id)
    )


def read_taint(text: str) -> Taint:
    """Read a taint in the form of kubelet's --register-with-taints.

    Errors: raises ValueError that states what was wanted.

    >>> read_taint("topobus.dev/starting:NoSchedule").key
    'topobus.dev/starting'
    """
    name, _, effect = text.rpartition(":")
    key, _, value = name.partition("=")
    if effect not in _EFFECTS or not is_label_name(key) or not is_label_value(value):
        raise ValueError(f"got {text!r}, wanted KEY:EFFECT or KEY=VALUE:EFFECT, EFFECT one of {', '.join(_EFFECTS)}")
    return Taint(key=key, value=value, effect=effect)


def taint_removal(node: ApiObject, taint: Taint) -> list[dict[str, Any]]:
    """Return the JSON patch that takes a taint off a Node. Empty when the Node does not have it.

    A Node that has other taints by now, or is another one, refuses the patch.
    """
    for index, shown in enumerate(node.spec.get("taints") or ()):
        if (shown.get("key"), shown.get("value") or "", shown.get("effect")) == (taint.key, taint.value, taint.effect):
            path = f"/spec/taints/{index}"
            return [
                {"op": "test", "path": "/metadata/uid", "value": node.metadata.get("uid")},
                {"op": "test", "path": path, "value": shown},
                {"op": "remove", "path": path},
            ]
    return []


def _verdict(state: ClassState, boot_id: str) -> tuple[ClassReason, str]:
    inventory = state.inventory
    if inventory is None or inventory.boot_id != boot_id:
        return (
            ClassReason.STARTING,
            "its device service has not looked for devices since the node was booted; see whether it runs here",
        )
    wanted = 1 if state.expected is None else state.expected
    devices = inventory.devices
    gone, driverless, unanswered = (_with(devices, reasons) for reasons in (_GONE, _DRIVERLESS, _UNANSWERED))
    there = len({device.name for device in devices} - {device.name for device in (*gone, *driverless, *unanswered)})
    count = counted(there, "device") + ("" if state.expected is None else f", {wanted} expected")
    if there + len(unanswered) < wanted:
        hints = [f"{_names(gone)} gone"] * bool(gone) + list(inventory.warnings[:1])
        if driverless:
            why = _reason_text(driverless[0], _DRIVERLESS)
            return ClassReason.DRIVER_MISSING, f"{count}: {_names(driverless)} without a driver ({why}); load it"
        if not devices and not inventory.drivers:
            text = "; ".join((f"{count}: its service has loaded no plugin", *hints))
            return ClassReason.DRIVER_MISSING, text
        step = "compare with `topobus inventory`"
        return ClassReason.FEWER_THAN_EXPECTED, f"{'; '.join((count, *hints))}; {step}"
    if there < wanted:
        return ClassReason.STARTING, f"{count}: no answer from the driver of {_names(unanswered)}"
    if state.awaited:
        return ClassReason.STARTING, f"{count}; waiting for {', '.join(state.awaited)}"
    return ClassReason.READY, count


def _condition(
    device_class: str, reason: ClassReason, text: str, before: NodeCondition | None, *, boot_id: str, now: str
) -> NodeCondition:
    if before is not None and reason is ClassReason.STARTING and ready_classes({device_class: before}, boot_id):
        return before
    status = "True" if reason is ClassReason.READY else "False"
    since = before.last_transition_time if before is not None and before.status == status else ""
    return NodeCondition(
        type=_type_of(device_class),
        status=status,
        reason=reason.value,
        message=shortened(text, _MOST_BYTES) + _boot_mark(boot_id),
        last_transition_time=since or now,
    )


def _type_of(device_class: str) -> str:
    return f"{_PREFIX}{device_class}{_SUFFIX}"


def _boot_mark(boot_id: str) -> str:
    return f" (boot {boot_id[:8]})" if boot_id else ""


def _is_of_boot(condition: NodeCondition, boot_id: str) -> bool:
    return condition.message.endswith(_boot_mark(boot_id))


def _with(devices: Iterable[Device], reasons: Collection[str]) -> list[Device]:
    """Return the devices that have one of these faults now."""
    return [device for device in devices if _reason_text(device, reasons)]


def _reason_text(device: Device, reasons: Collection[str]) -> str:
    return next(
        (
            condition.message or condition.reason
            for condition in device.health.conditions
            if condition.reason in reasons and condition.state is not HealthState.RECOVERING
        ),
        "",
    )


def _names(devices: Iterable[Device]) -> str:
    return first_of(sorted(device.name for device in devices), _SHOWN)
