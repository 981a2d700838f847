"""Who has which device of a class, from a ledger; and which devices one shares its fate with when it is reset. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from topobus.domain.device import Device
from topobus.domain.ledger import Holders
from topobus.domain.request import Owner

__all__ = ["owners_of_devices", "reset_together"]


def owners_of_devices(ledger: Holders | None, device_class: str) -> dict[str, tuple[Owner, ...]]:
    """Turn a ledger into device name -> who holds it. CPUs stand as ids in the ledger and are devices named `cpu-<id>`."""
    held: dict[str, tuple[Owner, ...]] = {}
    for _, allocation in sorted((ledger.allocations if ledger else {}).items()):
        for holding in allocation.holdings:
            names = holding.devices.get(device_class, ())
            if device_class == "cpu":
                names = (*names, *(f"cpu-{cpu}" for cpu in holding.cpus))
            for name in names:
                owners = held.get(name, ())
                held[name] = owners if allocation.shown in owners else (*owners, allocation.shown)
    return held


def reset_together(device: Device, devices: Iterable[Device]) -> tuple[Device, ...]:
    """List what a reset of a device touches: itself, its parts, and what is the same PCI function. Order: by name."""
    others = [
        other
        for other in devices
        if other.name != device.name
        and (device.name in (other.parent, other.partition_of) or (device.pci is not None and other.pci == device.pci))
    ]
    return tuple(sorted((device, *others), key=lambda each_device: each_device.name))
