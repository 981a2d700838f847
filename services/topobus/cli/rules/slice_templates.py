"""What ResourceSlices tell an autoscaler of a type of machine, and how a node differs from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from topobus.formats.kubernetes.pool_slices import own_part
from topobus.formats.kubernetes.resource import SliceDevice
from topobus.formats.kubernetes.slices import HEALTH_REASON, slice_device
from topobus.values.device import Inventory

__all__ = ["devices_of_type", "template_device", "template_differences"]

_OF_ONE_MACHINE = frozenset({"uuid", "mac", HEALTH_REASON})
"""Attributes that another machine of the same type does not have."""
_FIELDS = ("name", "attributes", "capacity", "consumesCounters", "allowMultipleAllocations")


def template_device(device: SliceDevice) -> dict[str, Any]:
    """Write a device of a slice without what another machine of the same type does not have."""
    kept = {name: value for name, value in device.attributes.items() if name not in _OF_ONE_MACHINE}
    plain = msgspec.to_builtins(msgspec.structs.replace(device, attributes=kept))
    return {field: plain[field] for field in _FIELDS if field in plain}


def devices_of_type(inventories: Iterable[Inventory]) -> dict[str, dict[str, Any]]:
    """Write the devices of inventories as a template has them, by name."""
    devices = (slice_device(device) for inventory in inventories for device in own_part(inventory)[0].devices)
    return {device.name: template_device(device) for device in devices}


def template_differences(
    foretold: Mapping[str, Mapping[str, Any]], present: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Name how a node's devices differ from those that a template foretold, by device.

    >>> template_differences({"gpu-0": {"attributes": {"numaNode": {"int": 0}}}, "gpu-1": {}}, {"gpu-0": {"attributes": {"numaNode": {"int": 1}}}})
    ['gpu-0: numaNode is 1, foretold 0', 'gpu-1 is missing']
    """  # noqa: E501
    differences: list[str] = []
    for name in sorted({*foretold, *present}):
        if name not in present:
            differences.append(f"{name} is missing")
        elif name not in foretold:
            differences.append(f"{name} was not foretold")
        else:
            wanted, got = _facts(foretold[name]), _facts(present[name])
            differences += [
                f"{name}: {fact} is {got.get(fact, 'absent')}, foretold {wanted.get(fact, 'absent')}"
                for fact in sorted({*wanted, *got})
                if wanted.get(fact) != got.get(fact)
            ]
    return differences


def _facts(device: Mapping[str, Any]) -> dict[str, Any]:
    """List what a device says of itself: attributes and capacities by their names, other fields by theirs."""
    facts = {name: value for name, value in device.items() if name not in ("name", "attributes", "capacity")}
    for field in ("attributes", "capacity"):
        for name, value in device.get(field, {}).items():
            fact = next(iter(value.values())) if len(value) == 1 else value
            facts[name] = ", ".join(map(str, fact)) if isinstance(fact, tuple) else fact
    return facts
