"""The leaves of a machine's PCI tree for a drawing: devices of the inventories, or plain PCI
functions where no service publishes any.

Each leaf has its root complex, switch, NUMA node, sign and text. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, structs

from topobus.values.device import Device, DeviceRole, Inventory
from topobus.values.health import HealthState
from topobus.values.machine import Machine, PciDevice
from topobus.values.pci import PciAddress

__all__ = ["HEALTH_SIGNS", "Leaf", "PciIds", "PciNames", "leaves_of", "short_address"]

PciIds = tuple[int, int]
"""Vendor and device."""
PciNames = Mapping[PciIds | PciAddress, str]
"""What functions are called: by ids the vendor's and the model's name, by address what the kernel
calls that is behind one (`eth0`)."""

HEALTH_SIGNS = {
    HealthState.HEALTHY: " ",
    HealthState.DEGRADED: "~",
    HealthState.RECOVERING: "r",
    HealthState.UNHEALTHY: "!",
    HealthState.UNKNOWN: "?",
}

# PCI base classes worth drawing where no device service reports what they are (PCI Code and ID
# Assignment, section 1).
_KINDS = {0x01: "disk", 0x02: "nic", 0x03: "display", 0x04: "media", 0x0B: "coproc", 0x10: "crypto", 0x12: "accel"}
# Multimedia controllers for sound: no server's work, and every display has one.
_SOUND = (0x0401, 0x0403)
# Memory controllers are of the base class 0x05, and most of them parts of a processor;
# a CXL memory device is a card.
_CXL_MEMORY, _CXL_CLASS = "cxl", 0x0502
# No device service offers disks, so beside offered devices they would be drawn for nothing.
_NEVER_OFFERED = "disk"


class Leaf(Struct, frozen=True, kw_only=True):
    """One thing at the end of a PCI path."""

    device_class: str
    name: str
    text: str
    """What follows the name: model, parts, or what is wrong."""
    numa_node: int | None
    """The node it is drawn in: the lowest of its nodes; None when the machine does not show it."""
    root: str = ""
    switch: str = ""
    health: HealthState = HealthState.HEALTHY
    device: Device | None = None
    """None for a function that no service offers."""
    parts: tuple[Device, ...] = ()
    """Virtual functions or partitions below it that are devices of their own."""


def leaves_of(machine: Machine, inventories: Iterable[Inventory], names: PciNames | None) -> tuple[Leaf, ...]:
    """List what to draw, ordered by root complex, switch, class and name; CPUs are drawn elsewhere.

    Shapes: names — for functions whose model no service reports. Functions that are not offered are
            drawn with the reason where a service gives one, else with their driver, or with the
            remark that they have none: a card without a driver is visible. Disks are drawn only
            where no service has looked.
    """
    known_inventories = [inventory for inventory in inventories if inventory.device_class != "cpu"]
    known_names = names or {}
    if not known_inventories:
        leaves = [
            leaf
            for leaf in (_function_leaf(function, known_names) for function in machine.pci_devices)
            if leaf is not None
        ]
    else:
        leaves = [
            leaf
            for inventory in known_inventories
            for leaf in (*_device_leaves(inventory), *_kept_leaves(machine, inventory))
        ]
        leaves += _other_leaves(machine, known_inventories, known_names)
    return tuple(sorted(leaves, key=lambda leaf: (leaf.root, leaf.switch, leaf.device_class, leaf.name)))


def short_address(text: str) -> str:
    """Leave out PCI domain 0, as lspci does.

    >>> short_address("0000:3b:00.0"), short_address("10000:00:02.0")
    ('3b:00.0', '10000:00:02.0')
    """
    return text.removeprefix("0000:")


def _device_leaves(inventory: Inventory) -> Iterable[Leaf]:
    names = {device.name for device in inventory.devices}
    parts: dict[str, list[Device]] = {}
    for device in inventory.devices:
        if device.parent in names:
            parts.setdefault(device.parent, []).append(device)
    for device in inventory.devices:
        if device.parent not in names:
            yield _device_leaf(device, tuple(parts.get(device.name, ())))


def _device_leaf(device: Device, parts: tuple[Device, ...]) -> Leaf:
    worst = device.health.worst
    text = worst.reason if worst is not None else device.model or device.vendor
    if device.role is not DeviceRole.COMPUTE:
        text = f"{device.role} {text}"
    what = "parts" if device.pci is not None and all(part.pci == device.pci for part in parts) else "VF"
    return Leaf(
        device_class=device.device_class,
        name=device.name,
        text=text + (f" +{len(parts)} {what}" if parts else ""),
        numa_node=device.numa_nodes.lowest if device.numa_nodes else None,
        root=device.pcie_root,
        switch=str(device.pcie_switch or ""),
        health=device.health.state,
        device=device,
        parts=parts,
    )


def _kept_leaves(machine: Machine, inventory: Inventory) -> Iterable[Leaf]:
    functions = {function.address: function for function in machine.pci_devices}
    # The management function of a card that is drawn is a part of it, and no news.
    drawn = {device.pci.key[:3] for device in inventory.devices if device.pci is not None}
    for kept in inventory.kept:
        function = functions.get(kept.pci)
        if function is not None and not (kept.role is DeviceRole.MANAGEMENT and kept.pci.key[:3] in drawn):
            yield Leaf(
                device_class=inventory.device_class,
                name=f"{inventory.device_class} {short_address(str(kept.pci))}",
                text=f"{kept.role}: {kept.why}",
                numa_node=function.numa_node,
                root=function.root,
                switch=str(function.switch or ""),
            )


def _other_leaves(machine: Machine, inventories: Iterable[Inventory], names: PciNames) -> Iterable[Leaf]:
    """Draw the functions that no service reports.

    Further functions of a card that a service reports are parts of it.
    """
    listed_keys = {
        device.pci.key[:3] for inventory in inventories for device in inventory.devices if device.pci is not None
    }
    listed_keys |= {kept.pci.key[:3] for inventory in inventories for kept in inventory.kept}
    for function in machine.pci_devices:
        leaf = _function_leaf(function, names) if function.address.key[:3] not in listed_keys else None
        if leaf is not None and leaf.device_class == _CXL_MEMORY:
            # Its memory is a NUMA node's, which is placed as such.
            yield leaf
        elif leaf is not None and leaf.device_class != _NEVER_OFFERED:
            yield structs.replace(leaf, text=f"{'not offered' if function.driver else 'no driver'}: {leaf.text}")


def _function_leaf(function: PciDevice, names: PciNames) -> Leaf | None:
    kind = _CXL_MEMORY if function.class_code >> 8 == _CXL_CLASS else _KINDS.get(function.class_code >> 16)
    if kind is None or function.is_bridge or function.physfn is not None or function.class_code >> 8 in _SOUND:
        return None
    name = names.get((function.vendor, function.device), f"[{function.vendor:04x}:{function.device:04x}]")
    if function.address in names:
        name = f"{names[function.address]}  {name}"
    return Leaf(
        device_class=kind,
        name=f"{kind} {short_address(str(function.address))}",
        text=f"{name} ({function.driver})" if function.driver else name,
        numa_node=function.numa_node,
        root=function.root,
        switch=str(function.switch or ""),
    )
