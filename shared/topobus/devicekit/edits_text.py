"""Texts and names that drivers of several vendors share: a file that cannot be read, a removed
card, a device's own variable.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.devicekit.left_out import LeftOut
from topobus.devicekit.pci import function_role, why_not_offered
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.errors import HardwareError
from topobus.values.health import Observation
from topobus.values.health_reasons import sign
from topobus.values.outcome import Reason, Refusal, refuse
from topobus.values.pci import PciAddress

__all__ = ["gone", "is_offered", "own_variable", "unreadable", "unusable"]

# Enough of a raw value to recognise it in an event.
_RAW_CHARACTERS = 60


def unreadable(err: HardwareError) -> Observation:
    """Make the observation for a device one of whose files exists and cannot be read.

    Its health is Unknown, and other devices keep theirs.

    Shapes: err — with the facts `path` and `raw`, which become the evidence.
    """
    return sign(
        "tree-unreadable", err.message, str(err.facts.get("path", "")), str(err.facts.get("raw", ""))[:_RAW_CHARACTERS]
    )


def gone(tree: Tree, devices: Sequence[Device]) -> Refusal | None:
    """Refuse devices whose PCI function is no longer on the bus.

    Shapes: result — one `device-gone` reason that names all of them, sorted; None when all are
    there. Devices without a PCI address are not checked.
    """
    names = tuple(
        sorted(device.name for device in devices if device.pci is not None and not tree.exists(pci_folder(device.pci)))
    )
    if not names:
        return None
    reason = Reason(code="device-gone", message=f"no longer on the bus: {', '.join(names)}", facts={"devices": names})
    return Refusal(reasons=(reason,))


def is_offered(tree: Tree, address: PciAddress, left_out: LeftOut) -> bool:
    """Return whether a function can be offered as what it is.

    When not, add it to `left_out` with its role and the reason. A function that cannot be read is
    offered: `observe` reports what is wrong with it.
    """
    try:
        role, why = function_role(tree, address)
    except HardwareError:
        return True
    if why:
        left_out.keep(address, role, why)
    return not why


def unusable(tree: Tree, devices: Sequence[Device]) -> Refusal | None:
    """Refuse devices that left the bus, or that a container cannot use any more: held for
    passthrough, or shared through virtual functions.

    `discover` leaves these out, but its last look may be seconds old when a claim is prepared.
    """
    refusal = gone(tree, devices)
    if refusal is not None:
        return refusal
    causes = {
        device.name: why for device in devices if device.pci is not None and (why := why_not_offered(tree, device.pci))
    }
    if not causes:
        return None
    text = "; ".join(f"{name}: {why}" for name, why in sorted(causes.items()))
    return refuse("device-not-offered", text, devices=tuple(sorted(causes)))


def own_variable(device: Device) -> str:
    """Name the variable of one device.

    Every device has one: CDI refuses a device without edits, and a container with two claims of a
    class keeps both sets of them, while the second claim's list variable replaces the first's.

    >>> own_variable(Device(name="nic-0000-3b-00-0", device_class="nic"))
    'TOPOBUS_NIC_0000_3B_00_0'
    """
    return f"TOPOBUS_{device.name.upper().replace('-', '_')}"
