"""The owners of each device of a class, read from a ledger, and the devices that a reset affects
together.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct

from topobus.values.device import Device
from topobus.values.ledger import Allocation, Holders
from topobus.values.request import Owner, OwnerKind

__all__ = ["DeviceHolder", "holders_of_devices", "owners_of_devices", "pods_of_devices", "reset_together"]


class DeviceHolder(Struct, frozen=True, kw_only=True, order=True):
    """The names of one holder of a device, as far as they are known. Empty: not known, or none."""

    namespace: str = ""
    pod: str = ""
    container: str = ""
    """Empty where several containers of the pod have the device."""
    claim: str = ""


def owners_of_devices(ledger: Holders | None, device_class: str) -> dict[str, tuple[Owner, ...]]:
    """Turn a ledger into device name -> its holders.

    The ledger has CPUs as ids. Here they are devices named `cpu-<id>`.
    """
    return _by_device(ledger, device_class, lambda allocation: (allocation.shown,))


def pods_of_devices(ledger: Holders | None, device_class: str) -> dict[str, tuple[Owner, ...]]:
    """Turn a ledger into device name -> the pods that use it: holders themselves, or users of a
    claim or of an allocation of kubelet's.
    """
    return _by_device(ledger, device_class, _pods_of)


def holders_of_devices(ledger: Holders | None, device_class: str) -> dict[str, tuple[DeviceHolder, ...]]:
    """Turn a ledger into device name -> the names of each pod that has it, and of its claim.

    A claim that is not prepared is a holder without a pod: its pod does not run yet, or has ended.
    So is an allocation whose pod kubelet has not named yet.
    Order: sorted.
    """
    by_device: dict[str, set[DeviceHolder]] = {}
    for allocation in (ledger.allocations if ledger else {}).values():
        owner = allocation.owner
        claim = owner.name if owner.kind is OwnerKind.CLAIM else ""
        pods = _pods_of(allocation) if not claim or allocation.is_prepared else ()
        unnamed = DeviceHolder(namespace=owner.namespace, claim=claim) if claim else DeviceHolder()
        for holding in allocation.holdings:
            holders = {
                DeviceHolder(
                    namespace=pod.namespace,
                    pod=pod.name,
                    container=holding.container or allocation.container,
                    claim=claim,
                )
                for pod in pods
            } or {unnamed}
            for name in holding.devices.get(device_class, ()):
                by_device.setdefault(name, set()).update(holders)
    return {name: tuple(sorted(holders)) for name, holders in by_device.items()}


def _pods_of(allocation: Allocation) -> tuple[Owner, ...]:
    owner = allocation.owner
    if owner.kind is OwnerKind.CONTAINER:
        # It is named after its pod.
        return (Owner(kind=OwnerKind.POD, namespace=owner.namespace, name=owner.name, uid=""),)
    return (owner,) if owner.kind is OwnerKind.POD else allocation.pods


def _by_device(
    ledger: Holders | None, device_class: str, people: Callable[[Allocation], tuple[Owner, ...]]
) -> dict[str, tuple[Owner, ...]]:
    by_device: dict[str, tuple[Owner, ...]] = {}
    for _, allocation in sorted((ledger.allocations if ledger else {}).items()):
        for holding in allocation.holdings:
            names = holding.devices.get(device_class, ())
            if device_class == "cpu":
                names = (*names, *(f"cpu-{cpu}" for cpu in holding.cpus))
            for name in names:
                before = by_device.get(name, ())
                by_device[name] = (*before, *(owner for owner in people(allocation) if owner not in before))
    return by_device


def reset_together(device: Device, devices: Iterable[Device]) -> tuple[Device, ...]:
    """List the devices that a reset of a device affects: itself, its parts, and those that are the
    same PCI function.

    Order: by name.
    """
    others = [
        other
        for other in devices
        if other.name != device.name
        and (device.name in (other.parent, other.partition_of) or (device.pci is not None and other.pci == device.pci))
    ]
    return tuple(sorted((device, *others), key=lambda each_device: each_device.name))
