"""Answers that drivers of many makes share: a file that cannot be read, a card that left, a device's own variable."""

from __future__ import annotations

from collections.abc import Sequence

from topobus.devicekit.pci import pci_folder
from topobus.domain.device import Device
from topobus.domain.errors import HardwareError
from topobus.domain.health import Dimension, HealthState, Observation
from topobus.domain.outcome import Reason, Refusal
from topobus.sysfs.tree import Tree

__all__ = ["gone", "own_variable", "unreadable"]

# Enough of a raw value to recognise it in an event.
_RAW_CHARACTERS = 60


def unreadable(err: HardwareError) -> Observation:
    """Say that nobody knows how a device is, because one of its files exists and cannot be read; its neighbours are not touched."""
    return Observation(
        dimension=Dimension.DRIVER,
        state=HealthState.UNKNOWN,
        reason="tree-unreadable",
        message=err.message,
        evidence={"path": str(err.facts.get("path", "")), "value": str(err.facts.get("raw", ""))[:_RAW_CHARACTERS]},
    )


def gone(tree: Tree, devices: Sequence[Device]) -> Refusal | None:
    """Refuse devices whose PCI function is no longer there; None when all are."""
    names = tuple(sorted(one.name for one in devices if one.pci is not None and not tree.exists(pci_folder(one.pci))))
    if not names:
        return None
    reason = Reason(code="device-gone", message=f"no longer on the bus: {', '.join(names)}", facts={"devices": names})
    return Refusal(reasons=(reason,))


def own_variable(device: Device) -> str:
    """Name the variable that stands for one device.

    Every device has one: CDI refuses a device without edits, and a container with two claims of a class keeps both sets of them, while the
    second claim's list variable replaces the first's.

    >>> own_variable(Device(name="nic-0000-3b-00-0", device_class="nic"))
    'TOPOBUS_NIC_0000_3B_00_0'
    """
    return f"TOPOBUS_{device.name.upper().replace('-', '_')}"
