"""Recognises the interface that was handed over, wherever it is and whatever a pod did to it.

It compares the interface's state on the host, the present state of its device in sysfs, and the
links of one namespace.
- Hardware is recognised by its device on the bus and by its port there, as long as that very device
  stays. The folder of a device that comes back (another card in the slot, a card plugged in again,
  functions made again) has another inode, and a reboot another boot id. Then the permanent address
  distinguishes the same card from another one. A virtual function has no permanent address: it
  takes another one at each reset. One that was made again is another one, on which nothing of ours
  is left.
- A virtual interface is recognised by its index and its other end, in the same boot, because it
  never survives one.

Source: net/core/rtnetlink.c (IFLA_PERM_ADDRESS, IFLA_PHYS_PORT_NAME, IFLA_PARENT_DEV_NAME);
Documentation/ABI/testing/sysfs-class-net (dev_port); fs/kernfs/dir.c (inodes).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from topobus.nic.interfaces.rules.interface_state import InterfaceState
from topobus.nic.netlink.places import Places
from topobus.nic.netlink.reading import bus_device_of, get_link, kind_of, list_links, permanent_mac, port_name
from topobus.sysfs.boot import read_boot_id
from topobus.sysfs.tree import HardwareSettings, Tree

__all__ = ["Present", "boot_id", "find_interface", "identified", "is_same", "present_of"]


class Present(Struct, frozen=True, kw_only=True):
    """What the host now has where an interface was."""

    is_same_boot: bool = True
    is_there: bool = True
    """Whether there is a device on its bus at its address; True for a virtual interface."""
    is_same_device: bool = True
    """Whether that device has been there all the time."""
    has_interface: bool = True
    """Whether the device has an interface in some namespace."""
    is_virtual_function: bool = False


def boot_id(places: Places) -> str:
    """Read this boot's id. Empty where the kernel has none."""
    return read_boot_id(Tree(HardwareSettings(root="/", proc=places.proc)))


def identified(state: InterfaceState, places: Places) -> InterfaceState:
    """Add to an interface's state on the host the facts that identify it later."""
    folder = _folder(places, state.bus_device)
    is_function = folder is not None and (folder / "physfn").exists()
    return structs.replace(
        state,
        boot_id=boot_id(places),
        device_inode=_inode(folder),
        permanent_mac="" if is_function else state.permanent_mac,
        is_virtual_function=is_function,
        device_port=_device_port(places, state.name),
        is_only_port=folder is not None and _ports(folder) == 1,
    )


def present_of(before: InterfaceState, places: Places) -> Present:
    """Read from sysfs the present state of the device that an interface belongs to.

    Shapes: before — as `identified` returned it.
    """
    is_same_boot = before.boot_id == boot_id(places)
    folder = _folder(places, before.bus_device)
    if folder is None:
        return Present(is_same_boot=is_same_boot, is_same_device=is_same_boot)
    inode = _inode(folder)
    is_function = before.is_virtual_function or (folder / "physfn").exists()
    return Present(
        is_same_boot=is_same_boot,
        # A sysfs without any bus proves nothing.
        is_there=inode != 0 or not Path(places.sys, "bus").is_dir(),
        is_same_device=is_same_boot and inode != 0 and inode == before.device_inode,
        # The kernel keeps this folder while the device has an interface in any namespace, but lists
        # only those of one namespace.
        has_interface=(folder / "net").is_dir(),
        is_virtual_function=is_function,
    )


def find_interface(
    socket: Any,
    before: InterfaceState,
    present: Present,
    *,
    tag: str,
    macs: frozenset[str] = frozenset(),
    host: Places | None = None,
) -> int | None:
    """Find the interface that was handed over, whatever its name and index are now.

    None when it is not here.

    Shapes: tag — the alias that we gave it: a pod can give it to its own interface, so it counts
    only for one that could be ours; macs — hardware addresses that it had from us; host — where
    sysfs shows this namespace's interfaces, which it does for the host's.
    """
    # It mostly keeps its index, and a host may have hundreds of interfaces.
    link = get_link(socket, index=before.index)
    if link is not None and is_same(link, before, present, macs, host):
        return before.index
    # Two tries: "not here" may be taken for "lost", and the kernel does not report that the end of
    # a list changed while it was read.
    for _ in range(2):
        links = list_links(socket)
        by_itself = [int(link["index"]) for link in links if is_same(link, before, present, macs, host)]
        by_tag = [
            int(link["index"])
            for link in links
            if not before.bus_device and link.get("ifalias") == tag and _could_be(link, before, present, host)
        ]
        if by_itself or by_tag:
            return (by_itself or by_tag)[0]
    return None


def is_same(
    link: Mapping[str, Any],
    before: InterfaceState,
    present: Present,
    macs: frozenset[str] = frozenset(),
    host: Places | None = None,
) -> bool:
    """Return whether a link is the interface of a state, by what a pod cannot change. The pod may
    have changed alias, name and hardware address.
    """
    if not _could_be(link, before, present, host):
        return False
    if before.bus_device:
        # With several ports without names, only its own address identifies the one that is in a
        # pod.
        is_only = present.is_virtual_function or (before.is_only_port and present.is_same_device)
        return is_only or permanent_mac(link) == before.permanent_mac
    if link["index"] != before.index:
        return False
    return bool(before.link) or (link.get("address") or "").lower() in macs | {before.mac}


def _could_be(link: Mapping[str, Any], before: InterfaceState, present: Present, host: Places | None) -> bool:
    """Return whether kind, bus, port and other end are those of a state, and nothing shows that the
    device is another one.
    """
    if kind_of(link) != before.kind or bus_device_of(link) != before.bus_device:
        return False
    if not before.bus_device:
        return present.is_same_boot and (not before.link or link.get("link") == before.link)
    if port_name(link) != before.port_name:
        return False
    if (
        host is not None
        and before.device_port is not None
        and _device_port(host, str(link.get("ifname"))) not in (None, before.device_port)
    ):
        return False
    # The same card, plugged in again or after a reboot.
    is_same_card = (
        not present.is_virtual_function and before.permanent_mac != "" and permanent_mac(link) == before.permanent_mac
    )
    return present.is_same_device or is_same_card


def _folder(places: Places, bus_device: str) -> Path | None:
    bus, _, device = bus_device.partition("/")
    return Path(places.sys, "bus", bus, "devices", device) if device else None


def _ports(folder: Path) -> int:
    try:
        return len(list((folder / "net").iterdir()))
    except OSError:
        return 0


def _inode(folder: Path | None) -> int:
    try:
        return folder.stat().st_ino if folder is not None else 0
    except OSError:
        return 0


def _device_port(places: Places, name: str) -> int | None:
    try:
        return int(Path(places.sys, "class", "net", name, "dev_port").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
