"""CPUs offered by number instead of by name: one device for each NUMA node, socket, cache or
machine, of which claims hold shares.

The CPUs of a group are in its `near_cpus`. Which of them a claim gets is decided when the claim is
prepared, by the writer of the ledger.
"""

from __future__ import annotations

from msgspec import structs

from topobus.values.device import Device
from topobus.values.idset import CpuSet

__all__ = ["GROUP_CAPACITY", "cpus_of", "cut_group", "is_cpu_group"]

GROUP_CAPACITY = "cpus"
"""The capacity of a group, and what a claim consumes of it."""


def is_cpu_group(device: Device) -> bool:
    """Say whether a device of class `cpu` is a group.

    >>> is_cpu_group(Device(name="cpu-0", device_class="cpu", cpu=0))
    False
    """
    return device.device_class == "cpu" and device.cpu is None and device.allows_multiple


def cpus_of(device: Device) -> CpuSet:
    """List the online CPUs that a device of class `cpu` is, or has.

    >>> cpus_of(Device(name="cpu-0", device_class="cpu", cpu=0))
    CpuSet(0)
    """
    if device.cpu is not None:
        return CpuSet(device.cpu)
    return device.near_cpus if is_cpu_group(device) else CpuSet()


def cut_group(device: Device, owned: CpuSet | None) -> Device | None:
    """Offer no more CPUs of a group than claims may have. Return None when there are none.

    A device that is no group is returned unchanged.

    Shapes: owned — CPUs that claims may have; None: all.
    """
    if owned is None or not is_cpu_group(device):
        return device
    count = len(device.near_cpus & owned)
    return structs.replace(device, capacity={**device.capacity, GROUP_CAPACITY: count}) if count else None
