"""Devices as they stand in a ResourceSlice: attributes, capacities and taints, the same for a cluster's scheduler and for the stand-alone controller.

Flows in: a device of an inventory. Flows out: the device of a slice, within the limits of resource.k8s.io/v1. Attributes of the driver stand in its domain;
the standard ones (`resource.kubernetes.io/...`) come from the device's fields, and what is unknown is absent, never 0. A sick device is a tainted one.
Source: docs/knowledge/dynamic-resource-allocation.md#standard-attributes; KEP-5055 (taints).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from topobus.domain.device import AttributeValue, Device
from topobus.domain.health import HealthState
from topobus.domain.quantity import Quantity, QuantityForm
from topobus.kubernetes.api.limits import MAX_ATTRIBUTES, MAX_DEVICES, MAX_TEXT
from topobus.kubernetes.api.resource import (
    Attribute,
    Capacity,
    SliceDevice,
    Taint,
)
from topobus.kubernetes.api.slice_limits import is_version

__all__ = ["DEVICES_PER_SLICE", "HEALTH_TAINT", "SICK_TAINT", "STANDARD_DOMAIN", "in_seconds", "slice_device"]

STANDARD_DOMAIN = "resource.kubernetes.io"
HEALTH_TAINT = "topobus.dev/health"
SICK_TAINT = Taint(key=HEALTH_TAINT, value=str(HealthState.UNHEALTHY), effect="NoExecute")
"""What a device has of which there is evidence that it is sick."""
# 128 devices fit into a slice, 64 when one has a taint or a list; sickness comes and goes, so slices are always cut for the worse case: a fault then
# changes one slice and not the cut of the whole pool.
DEVICES_PER_SLICE = MAX_DEVICES // 2

_IDENTIFIER = re.compile(r"[^A-Za-z0-9_]+")
_INT64 = 1 << 63


def slice_device(device: Device) -> SliceDevice:
    """Show a device as a slice does.

    >>> slice_device(Device(name="gpu-0", device_class="gpu", model="T4")).attributes["model"].string
    'T4'
    """
    attributes = _standard_attributes(device) | _own_attributes(device)
    room = MAX_ATTRIBUTES - len(device.capacity)
    return SliceDevice(
        name=device.name,
        attributes=dict(list(attributes.items())[:room]),
        capacity={_identifier(name): Capacity(value=_quantity(amount)) for name, amount in sorted(device.capacity.items()) if amount >= 0},
        taints=_taints(device),
    )


def in_seconds(moment: str) -> str:
    """Write a time as the API server does: UTC, whole seconds. Empty for what is no time.

    >>> in_seconds("2026-01-02T03:04:05.678+00:00")
    '2026-01-02T03:04:05Z'
    """
    try:
        return datetime.fromisoformat(moment).astimezone(UTC).replace(microsecond=0, tzinfo=None).isoformat() + "Z"
    except ValueError:
        return ""


def _standard_attributes(device: Device) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {}
    if device.pcie_root:
        attributes[f"{STANDARD_DOMAIN}/pcieRoot"] = Attribute(string=device.pcie_root)
    if device.pci is not None:
        attributes[f"{STANDARD_DOMAIN}/pciBusID"] = Attribute(string=str(device.pci))
    if device.numa_nodes is not None and len(device.numa_nodes) == 1:
        attributes[f"{STANDARD_DOMAIN}/numaNode"] = Attribute(int_=device.numa_nodes.lowest)
    elif device.numa_nodes:
        attributes[f"{STANDARD_DOMAIN}/numaNode"] = Attribute(ints=device.numa_nodes.ids)
    return attributes


def _own_attributes(device: Device) -> dict[str, Attribute]:
    """Collect the fields that a selector may want, then what the driver says; the driver's word wins over a field's."""
    texts = {
        "vendor": device.vendor,
        "model": device.model,
        "uuid": device.uuid,
        "parent": device.parent,
        "pcieSwitch": str(device.pcie_switch) if device.pcie_switch is not None else "",
    }
    numbers = {"cpu": device.cpu, "core": device.core, "socket": device.socket, "l3": device.l3}
    fields: dict[str, AttributeValue] = {name: text for name, text in texts.items() if text}
    fields |= {name: number for name, number in numbers.items() if number is not None}
    fields |= {_identifier(name): value for name, value in sorted(device.attributes.items())}
    return {name: _attribute(name, value) for name, value in fields.items() if not isinstance(value, int) or -_INT64 <= value < _INT64}


def _attribute(name: str, value: AttributeValue) -> Attribute:
    """Type an attribute: a text under a name that ends in `Version` is a version when it can be one, as DRA drivers publish it."""
    if isinstance(value, bool):
        return Attribute(bool_=value)
    if isinstance(value, int):
        return Attribute(int_=value)
    if name.lower().endswith("version") and is_version(value) and len(value) <= MAX_TEXT:
        return Attribute(version=value)
    # The limit is one of bytes; a character cut in two is left out.
    return Attribute(string=value.encode("utf-8", "replace")[:MAX_TEXT].decode("utf-8", "ignore"))


def _identifier(name: str) -> str:
    """Make a legal name: a C identifier of at most 32 characters, after a domain where there is one."""
    domain, slash, last = name.rpartition("/")
    cleaned = _IDENTIFIER.sub("_", last)[:32]
    return domain + slash + (f"_{cleaned}"[:32] if not cleaned or cleaned[0].isdigit() else cleaned)


def _quantity(amount: int) -> str:
    # Read and written once more, it stands as the API server would give it back: another form would look like a change for ever.
    return str(Quantity.parse(str(Quantity.of(amount, QuantityForm.BINARY))))


def _taints(device: Device) -> tuple[Taint, ...]:
    """Taint what may not be handed out: evidence of a fault also evicts, mere silence does not."""
    if device.health.is_allocatable:
        return ()
    effect = SICK_TAINT.effect if device.health.state is HealthState.UNHEALTHY else "NoSchedule"
    worst = device.health.worst
    since = in_seconds(worst.since if worst is not None and worst.since else device.health.since)
    return (Taint(key=HEALTH_TAINT, value=str(device.health.state), effect=effect, time_added=since or None),)
