"""Gives devices the ids that other tools expect from kubelet: a PCI address, a UUID, or the name
that Topobus uses everywhere else.

Each entry of a resource's list gets one id, and each id is used once. Multus passes that id to CNI
plugins as `deviceID` (sriov-cni requires a PCI address), and exporters find a pod's GPU by it (a
UUID). Within Topobus a device keeps its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import structs

from topobus.gateway.device_plugins.rules.list_entry import ListEntry
from topobus.values.device import Device
from topobus.values.pci import PciAddress
from topobus.values.shares import device_of_replica
from topobus.values.vendor_profiles import IdProfile

__all__ = ["address_of", "kubelet_id", "with_kubelet_ids"]

_WANTED = {"pci": "a PCI address", "uuid": "a UUID", "card": "a PCI address"}
# The proto's limit for an id's length. kubelet does not check it.
_LONGEST = 63


def kubelet_id(device: Device, profile: IdProfile) -> str:
    """Return a device's id for kubelet. Empty when it has none of this kind.

    >>> kubelet_id(Device(name="nic-0000-3b-00-1", device_class="nic", pci=PciAddress.parse("3b:00.1")), "pci")
    '0000:3b:00.1'
    """
    if profile == "topobus":
        return device.name
    if profile == "card" and device.attributes.get("type") == "partition":
        # Its PCI address is its card's, which all parts of that card share.
        return device.name
    text = device.uuid if profile == "uuid" else str(device.pci) if device.pci is not None else ""
    return text if len(text) <= _LONGEST else ""


def with_kubelet_ids(
    entries: Sequence[ListEntry],
    devices: Mapping[str, Device],
    profile: IdProfile,
    *,
    previous: Sequence[ListEntry] = (),
) -> tuple[ListEntry, ...]:
    """Add the ids for kubelet to a resource's list.

    Shapes: devices — the inventory by name; previous — the previous list, by which a device that is
    gone keeps its id. A device without such an id, or with the same one as another, is listed under
    its name and not healthy, so that it is never given under an id that means another device. Of
    two with the same id, the one that had it before, or that is held, keeps it, because kubelet
    knows it by that id.
    """
    if profile == "topobus":
        return tuple(entries)
    before = {entry.id: entry.kubelet_id for entry in previous if entry.kubelet_id}
    ids = {entry.id: _id_of(entry.id, devices, profile, before) for entry in entries}
    counts = Counter(ids.values())
    named: list[ListEntry] = []
    for entry in entries:
        wanted = ids[entry.id]
        rivals = [other for other in entries if ids[other.id] == wanted] if wanted and counts[wanted] > 1 else []
        if not wanted:
            reason = f"it has not {_WANTED[profile]}, by which this resource's devices are named (setting ids)"
        elif (rivals and not _keeps(entry, rivals, wanted, before)) or (wanted != entry.id and wanted in ids):
            others = ", ".join(rival.id for rival in rivals if rival.id != entry.id) or wanted
            reason = (
                f"it has the same id {wanted} as {others}, so that kubelet could not distinguish them (setting ids)"
            )
        else:
            named.append(structs.replace(entry, kubelet_id=wanted))
            continue
        named.append(
            structs.replace(
                entry, kubelet_id=entry.id, is_healthy=False, reason=entry.reason or reason, is_unnamed=True
            )
        )
    return tuple(named)


def address_of(name: str, device_class: str) -> PciAddress | None:
    """Read the PCI address from a device's name. None for a name that has none.

    >>> address_of("nic-0000-3b-00-1", "nic"), address_of("nic-veth0", "nic")
    (PciAddress('0000:3b:00.1'), None)
    """
    parts = name.removeprefix(f"{device_class}-").split("-")
    if len(parts) != 4 or not name.startswith(f"{device_class}-"):
        return None
    try:
        return PciAddress.parse(f"{parts[0]}:{parts[1]}:{parts[2]}.{parts[3]}")
    except ValueError:
        return None


def _id_of(name: str, devices: Mapping[str, Device], profile: IdProfile, before: Mapping[str, str]) -> str:
    """Find a device's id in the inventory, the previous list or, after a restart, its name."""
    own = device_of_replica(name)
    device, suffix = devices.get(own), name.removeprefix(own)
    if device is not None and (text := kubelet_id(device, profile)):
        return text + suffix
    if name in before and before[name] != name:
        return before[name]
    address = address_of(own, own.partition("-")[0]) if device is None and profile in ("pci", "card") else None
    return f"{address}{suffix}" if address is not None else ""


def _keeps(entry: ListEntry, rivals: Sequence[ListEntry], wanted: str, before: Mapping[str, str]) -> bool:
    """Return whether, of several devices with an id, this is the one that kubelet knows by it."""
    known_by_it = [rival for rival in rivals if before.get(rival.id) == wanted] or [
        rival for rival in rivals if rival.is_held
    ]
    return known_by_it == [entry]
