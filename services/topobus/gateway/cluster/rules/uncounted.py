"""Selects what is offered where the API server keeps no counters: no device that could be allocated
in addition to another one that uses the same resources.

A whole card has precedence over its partitions. Shares need nothing: when the server does not store
that several claims may hold a device, one claim holds it.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import structs

from topobus.values.device import Inventory
from topobus.values.partitions import Partitions

__all__ = ["COUNTER_FIELDS", "countable", "keeps_counters"]

COUNTER_FIELDS = frozenset({"spec.sharedCounters", "spec.devices.*.consumesCounters"})
"""What a server without the feature DRAPartitionableDevices drops (off by default before 1.36)."""


def keeps_counters(dropped: Collection[str]) -> bool:
    """Return whether a server that does not keep these fields keeps counters."""
    return COUNTER_FIELDS.isdisjoint(dropped)


def countable(inventory: Inventory, dropped: Collection[str]) -> tuple[Inventory, dict[str, str]]:
    """Leave out the devices that would be wrong without counters.

    Shapes: result — the inventory as it may be shown, and the reason for each device left out, by
    name; where the server keeps counters, the unchanged inventory and no reasons.
    """
    if keeps_counters(dropped) or not inventory.counter_sets:
        return inventory, {}
    kept = Partitions(inventory.devices, inventory.counter_sets).together(inventory.devices)
    why = (
        "the API server stores no counters (feature DRAPartitionableDevices), so it could be given out beside "
        "what it is a part of"
    )
    withheld = {device.name: why for device in inventory.devices if device.name not in kept}
    devices = tuple(structs.replace(device, consumes=()) for device in inventory.devices if device.name in kept)
    return structs.replace(inventory, devices=devices, counter_sets=()), withheld
