"""Children of a shared interface: a macvlan or ipvlan link on it, made on the host, handed over to
a pod and deleted afterwards. The parent stays as it is.

Sources: include/uapi/linux/if_link.h (IFLA_MACVLAN_MODE, IFLA_IPVLAN_MODE); drivers/net/macvlan.c.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

from msgspec import structs

from topobus.devicekit.device_record import DeviceRecord
from topobus.nic.interfaces.rules.interface_config import ShareFields
from topobus.nic.interfaces.rules.interface_state import InterfaceState
from topobus.nic.netlink.places import Places, with_netlink
from topobus.nic.netlink.reading import get_link, read_state
from topobus.nic.netlink.requests import attribute, create_link, link_body
from topobus.values.outcome import Refusal, refuse

__all__ = ["child_name", "child_request", "make_child"]

# linux/if_link.h
_IFLA_IFNAME, _IFLA_LINK, _IFLA_LINKINFO = 3, 5, 18
_IFLA_INFO_KIND, _IFLA_INFO_DATA = 1, 2
_IFLA_MACVLAN_MODE, _IFLA_IPVLAN_MODE, _IFLA_IPVLAN_FLAGS = 1, 1, 2
_MACVLAN = {"private": 1, "vepa": 2, "bridge": 4, "passthru": 8}
_IPVLAN = {"l2": 0, "l3": 1, "l3s": 2}


def child_name(tag: str) -> str:
    """Name a child on the host, where it stays for a moment. The same tag has the same name."""
    return f"tbc{zlib.crc32(tag.encode()):08x}"


def child_request(parent_index: int, name: str, share: ShareFields) -> bytes:
    """Return the body of the RTM_NEWLINK that makes a child."""
    if share.mode == "macvlan":
        data = attribute(_IFLA_MACVLAN_MODE, struct.pack("=I", _MACVLAN[share.submode or "bridge"]))
    else:
        data = attribute(_IFLA_IPVLAN_MODE, struct.pack("=H", _IPVLAN[share.submode or "l2"]))
        data += attribute(_IFLA_IPVLAN_FLAGS, struct.pack("=H", 0))
    info = attribute(_IFLA_INFO_KIND, share.mode.encode()) + attribute(_IFLA_INFO_DATA, data)
    return link_body(
        0,
        attribute(_IFLA_LINK, struct.pack("=I", parent_index))
        + attribute(_IFLA_IFNAME, name.encode() + b"\0")
        + attribute(_IFLA_LINKINFO, info),
    )


def make_child(
    places: Places, parent: InterfaceState, share: ShareFields, record: DeviceRecord, *, tag: str
) -> InterfaceState | Refusal:
    """Make a child on the host, switched off and without addresses.

    Errors: refuses `share-failed` with the kernel's message: a parent that cannot carry children,
    or a kernel without the kind.
    """
    name = child_name(tag)
    record.intend(
        "share", {"tag": tag, "name": name, "parent": parent.name, "kind": share.mode, "boot_id": parent.boot_id}
    )

    def make(socket: Any) -> InterfaceState | Refusal:
        from pyroute2.netlink.exceptions import NetlinkError

        try:
            create_link(socket, child_request(parent.index, name, share))
        except NetlinkError as err:
            return refuse(
                "share-failed",
                f"the kernel makes no {share.mode} child of {parent.name}: {err.args[1]}",
                interface=parent.name,
                mode=share.mode,
                error=int(err.code),
            )
        link = get_link(socket, name=name)
        child = read_state(socket, places.proc, index=link["index"]) if link is not None else None
        return (
            structs.replace(child, boot_id=parent.boot_id)
            if child is not None
            else refuse(
                "share-failed",
                f"the child {name} of {parent.name} went away at once",
                interface=parent.name,
                mode=share.mode,
            )
        )

    child = with_netlink(places, None, make)
    if not isinstance(child, Refusal):
        record.done("share", {"index": child.index})
    return child
