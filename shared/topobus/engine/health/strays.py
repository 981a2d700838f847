"""Devices on NUMA nodes that their machine does not have: they are listed, but not allocated.

Inventory and machine come from two services. A device on a missing node comes from a faulty driver
or from another program, or is newer than our copy of the machine. In none of these cases is its
place known. The other devices of the inventory are unaffected: one plugin of a class may be faulty
beside others, and an inventory refused as a whole would take healthy devices with it, or freeze
their health. It is decided again whenever machine or inventory changes, so a device that came with
a new node is back as soon as discovery reports the node.
"""

from __future__ import annotations

from msgspec import structs

from topobus.values.device import Device, Inventory
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState, RecoveryAction
from topobus.values.machine import Machine

__all__ = ["NODE_MISSING", "stray_devices", "without_strays"]

NODE_MISSING = "node-missing"
"""The reason of a condition: the device names a NUMA node that the machine lacks."""


def stray_devices(inventory: Inventory, machine: Machine) -> tuple[Device, ...]:
    """List the devices that name a NUMA node which the machine lacks.

    Order: the inventory's. Empty while the machine reports no nodes at all: then it is unknown
            which are missing.
    """
    nodes = machine.node_set
    return (
        tuple(device for device in inventory.devices if device.numa_nodes and not device.numa_nodes <= nodes)
        if nodes
        else ()
    )


def without_strays(inventory: Inventory, machine: Machine) -> Inventory:
    """Return an inventory with its strays Unknown, so that they are not allocated.

    They stay listed, because they may be held.

    Cost: O(devices). The same value when there is no stray.
    """
    strays = {device.name for device in stray_devices(inventory, machine)}
    if not strays:
        return inventory
    devices = tuple(_set_aside(device, machine) if device.name in strays else device for device in inventory.devices)
    return structs.replace(inventory, devices=devices)


def _set_aside(device: Device, machine: Machine) -> Device:
    before = device.health
    is_sick = before.state is HealthState.UNHEALTHY
    condition = Condition(
        dimension=Dimension.PRESENCE,
        state=HealthState.UNKNOWN,
        reason=NODE_MISSING,
        message=f"{device.name} reports NUMA nodes {device.numa_nodes}, but machine {machine.node} has "
        f"{machine.node_set}",
        action=RecoveryAction.WAIT,
        since=before.since,
    )
    # Evidence of a fault outlives what is merely unknown.
    health = DeviceHealth(
        state=before.state if is_sick else HealthState.UNKNOWN,
        since=before.since,
        conditions=(condition, *before.conditions),
    )
    return structs.replace(device, health=health)
