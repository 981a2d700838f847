"""Devices on NUMA nodes that their machine does not have: named, and not handed out.

Flows in: an inventory and the machine of its node, each told by a service of its own. Flows out:
the inventory as it is to be read. A device that says such a thing is of a faulty driver, of
somebody else, or newer than our copy of the machine; in none of these cases is its place known. The
other devices of the inventory go on: one plugin of a class may be faulty beside others, and an
inventory refused as a whole would take healthy devices with it, or freeze their health at what it
was. It is decided anew whenever machine or inventory changes, so a device that came with a new node
is back as soon as discovery tells of the node.
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

    Order: the inventory's. Empty while the machine tells no nodes at all: then
    nobody knows which are missing.
    """
    nodes = machine.node_set
    return (
        tuple(device for device in inventory.devices if device.numa_nodes and not device.numa_nodes <= nodes)
        if nodes
        else ()
    )


def without_strays(inventory: Inventory, machine: Machine) -> Inventory:
    """Read an inventory with its strays Unknown, so that nobody gets them.

    They stay listed, for they may be held.

    Cost: O(devices); the same value when there is no stray.
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
        message=f"{device.name} says that it is on NUMA nodes {device.numa_nodes}, and machine {machine.node} has "
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
