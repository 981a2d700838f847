"""Inventories as ResourceSlices: what kube-scheduler would see of a node, without a cluster.

Flows in: a node's inventories and ledger. Flows out: one slice a class (driver `<class>.topobus.dev`, pool = the node), and who holds what. How a device
looks in a slice is `topobus.kubernetes.api.slices`: a gateway in a cluster publishes the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from topobus.controller.allocation.values import DeviceId, Slice
from topobus.domain.device import Device, Inventory, driver_name
from topobus.domain.idset import CpuSet
from topobus.domain.ledger import Ledger
from topobus.domain.request import Owner
from topobus.kubernetes.api.resource import (
    CelSelector,
    DeviceClassSpec,
    Pool,
    Selector,
    SliceSpec,
)
from topobus.kubernetes.api.slices import DEVICES_PER_SLICE, slice_device

__all__ = ["built_in_class", "holders_from_ledger", "slices_from_inventory"]


def slices_from_inventory(inventory: Inventory) -> tuple[Slice, ...]:
    """Show an inventory as slices.

    Order: devices as in the inventory (by name); slice names carry an index, so the order of slices is theirs.
    """
    driver = driver_name(inventory.device_class)
    devices = tuple(slice_device(device) for device in inventory.devices)
    chunks = [devices[start : start + DEVICES_PER_SLICE] for start in range(0, len(devices), DEVICES_PER_SLICE)]
    pool = Pool(name=inventory.node, generation=inventory.generation, resource_slice_count=max(len(chunks), 1))
    return tuple(
        Slice(
            f"{inventory.node}-{inventory.device_class}-{index:03d}",
            SliceSpec(driver=driver, pool=pool, node_name=inventory.node, devices=chunk),
        )
        for index, chunk in enumerate(chunks)
    )


def holders_from_ledger(ledger: Ledger, cpu_devices: Iterable[Device] = ()) -> dict[DeviceId, Owner]:
    """Say which devices of a node are held and by whom; CPUs too, by their device names."""
    names = {cpu_device.cpu: cpu_device.name for cpu_device in cpu_devices if cpu_device.cpu is not None}
    held: dict[DeviceId, Owner] = {}
    for key in sorted(ledger.allocations):
        allocation = ledger.allocations[key]
        cpus = CpuSet()
        for holding in allocation.holdings:
            cpus |= holding.cpus
            for device_class, devices in holding.devices.items():
                for device in devices:
                    held[DeviceId(driver_name(device_class), ledger.node, device)] = allocation.owner
        for cpu in cpus:
            if cpu in names:
                held[DeviceId(driver_name("cpu"), ledger.node, names[cpu])] = allocation.owner
    return held


def built_in_class(driver: str) -> DeviceClassSpec:
    """Make the class that we offer for each driver of ours: all of its devices."""
    return DeviceClassSpec(selectors=(Selector(cel=CelSelector(expression=f'device.driver == "{driver}"')),))
