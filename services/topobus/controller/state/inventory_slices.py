"""Converts inventories to ResourceSlices for the stand-alone home: the same slices that a gateway
publishes in a cluster.

All classes of a pool are cut together. The conversion of a device is in
`topobus.formats.kubernetes.slices` and the cut in `topobus.formats.kubernetes.pool_slices`, which the
gateway uses as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from topobus.engine.allocation.pools import Slice
from topobus.engine.allocation.values import DeviceId
from topobus.engine.shapes.in_slices import SliceShapes, with_shapes, without_groups
from topobus.formats.kubernetes.pool_slices import own_part, pool_slices
from topobus.formats.kubernetes.resource import CounterSet as SharedCounters
from topobus.formats.kubernetes.resource import SliceDevice
from topobus.formats.kubernetes.slices import shared_counters, slice_device, slice_order
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import DRIVER, node_of_pool, pool_of_class
from topobus.values.idset import CpuSet
from topobus.values.ledger import Ledger
from topobus.values.quantity import Quantity
from topobus.values.request import Owner, OwnerKind

__all__ = [
    "ClassDevices",
    "consumed_by_pods",
    "devices_of_class",
    "devices_of_owner",
    "holders_from_ledger",
    "slices_of_pool",
]

_NO_SHAPES = SliceShapes()


class ClassDevices(NamedTuple):
    """What one class has in its pool."""

    generation: int
    """Of the inventory."""
    devices: tuple[SliceDevice, ...]
    counter_sets: tuple[SharedCounters, ...] = ()


def devices_of_class(inventory: Inventory, form: Callable[[Device], SliceDevice] = slice_device) -> ClassDevices:
    """Convert an inventory to what its class has in the pool.

    Left out is what `own_part` leaves out.

    Shapes: form — converts one device, as `slice_device` does.
    Order: devices as `slice_order` has them.
    """
    kept, _ = own_part(inventory)
    return ClassDevices(
        kept.generation,
        tuple([form(device) for device in slice_order(kept.devices)]),
        shared_counters(kept.counter_sets),
    )


def slices_of_pool(
    pool: str,
    classes: Sequence[ClassDevices],
    shapes: SliceShapes = _NO_SHAPES,
    *,
    cpus: Sequence[SliceDevice] = (),
    left: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Slice, ...]:
    """Cut what the classes of a pool have, and the shapes of their devices, into slices.

    Shapes: shapes — the node's; cpus — its devices of class `cpu`; left — group to how many CPUs claims
            have or can have, where that is not all.
    Order: the name of a slice ends with its index, so the order of slices is theirs.
    """
    devices: Sequence[SliceDevice] = [device for of_class in classes for device in of_class.devices]
    counter_sets: Sequence[SharedCounters] = [
        counter_set for of_class in classes for counter_set in of_class.counter_sets
    ]
    if pool == node_of_pool(pool):
        devices, counter_sets = with_shapes(shapes, devices, counter_sets, cpus=cpus, left=left)
    else:
        devices = without_groups(devices, shapes.groups)
    specs = pool_slices(
        pool,
        devices,
        counter_sets,
        # Grows with each of them.
        sum(of_class.generation for of_class in classes),
    )
    return tuple(Slice(f"{pool}/{index:03x}", spec) for index, spec in specs.items())


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
                    used = consumed.setdefault(_device_id(ledger.node, device_class, device), {})
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
                    yield (
                        _device_id(ledger.node, device_class, device),
                        allocation.owner,
                        device in shares,
                    )
        for cpu in cpus:
            if cpu in names:
                yield _device_id(ledger.node, "cpu", names[cpu]), allocation.owner, False


def _device_id(node: str, device_class: str, device: str) -> DeviceId:
    return DeviceId(DRIVER, pool_of_class(node, device_class), device)
