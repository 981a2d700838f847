"""Converts inventories to ResourceSlices for the stand-alone home: the same slices that a gateway
publishes in a cluster.

Each class gives a slice (driver `<class>.topobus.dev`, pool = the node). The conversion of a device
is in `topobus.formats.kubernetes.slices`, which the gateway uses as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from topobus.engine.allocation.values import DeviceId, Slice
from topobus.formats.kubernetes.resource import (
    Pool,
    SliceDevice,
    SliceSpec,
)
from topobus.formats.kubernetes.slices import (
    COUNTER_SETS_PER_SLICE,
    DEVICES_PER_SLICE,
    shared_counters,
    slice_device,
    slice_order,
)
from topobus.values.device import Device, Inventory, driver_name
from topobus.values.idset import CpuSet
from topobus.values.ledger import Ledger
from topobus.values.quantity import Quantity
from topobus.values.request import Owner, OwnerKind

__all__ = ["consumed_by_pods", "devices_of_owner", "holders_from_ledger", "slices_from_inventory"]


def slices_from_inventory(
    inventory: Inventory, form: Callable[[Device], SliceDevice] = slice_device
) -> tuple[Slice, ...]:
    """Convert an inventory to slices. Counters have slices of their own, as in a cluster.

    Shapes: form — converts one device, as `slice_device` does.
    Order: devices as `slice_order` has them. Slice names carry an index, so the order of slices is
    theirs.
    """
    driver = driver_name(inventory.device_class)
    devices = tuple(form(device) for device in slice_order(inventory.devices))
    chunks = [devices[start : start + DEVICES_PER_SLICE] for start in range(0, len(devices), DEVICES_PER_SLICE)]
    sets = shared_counters(inventory.counter_sets)
    counters = [sets[start : start + COUNTER_SETS_PER_SLICE] for start in range(0, len(sets), COUNTER_SETS_PER_SLICE)]
    pool = Pool(
        name=inventory.node, generation=inventory.generation, resource_slice_count=max(len(chunks) + len(counters), 1)
    )
    name = f"{inventory.node}-{inventory.device_class}"
    return (
        *(
            Slice(f"{name}-{index:03d}", SliceSpec(driver=driver, pool=pool, node_name=inventory.node, devices=chunk))
            for index, chunk in enumerate(chunks)
        ),
        *(
            Slice(
                f"{name}-counters-{index:03d}",
                SliceSpec(driver=driver, pool=pool, node_name=inventory.node, shared_counters=chunk),
            )
            for index, chunk in enumerate(counters)
        ),
    )


def holders_from_ledger(ledger: Ledger, cpu_devices: Iterable[Device] = ()) -> dict[DeviceId, Owner]:
    """Map the devices that are held whole on a node to their holders.

    CPUs are included, by their device names. Shares are not: the claims have them, with their
    amounts.
    """
    return {device: owner for device, owner, by_share in _held_in(ledger, cpu_devices) if not by_share}


def consumed_by_pods(ledger: Ledger) -> dict[DeviceId, dict[str, Quantity]]:
    """Add up what owners other than claims hold of shared devices: kubelet allocated it by its
    device plugins, and no claim records it.
    """
    consumed: dict[DeviceId, dict[str, Quantity]] = {}
    for _, allocation in sorted(ledger.allocations.items()):
        for holding in allocation.holdings if allocation.owner.kind is not OwnerKind.CLAIM else ():
            for device_class, shares in holding.shares.items():
                for device, share in shares.items():
                    used = consumed.setdefault(DeviceId(driver_name(device_class), ledger.node, device), {})
                    for name, amount in share.amounts.items():
                        used[name] = used.get(name, Quantity(0)) + Quantity.of(amount)
    return consumed


def devices_of_owner(ledger: Ledger, owner: Owner, cpu_devices: Iterable[Device]) -> frozenset[DeviceId]:
    """Name the devices that an owner holds on a node, whole or by share."""
    return frozenset(device for device, holder, _ in _held_in(ledger, cpu_devices) if holder == owner)


def _held_in(ledger: Ledger, cpu_devices: Iterable[Device]) -> Iterator[tuple[DeviceId, Owner, bool]]:
    names = {cpu_device.cpu: cpu_device.name for cpu_device in cpu_devices if cpu_device.cpu is not None}
    for key in sorted(ledger.allocations):
        allocation = ledger.allocations[key]
        cpus = CpuSet()
        for holding in allocation.holdings:
            cpus |= holding.cpus
            for device_class, devices in holding.devices.items():
                shares = holding.shared.get(device_class, ())
                for device in devices:
                    yield DeviceId(driver_name(device_class), ledger.node, device), allocation.owner, device in shares
        for cpu in cpus:
            if cpu in names:
                yield DeviceId(driver_name("cpu"), ledger.node, names[cpu]), allocation.owner, False
