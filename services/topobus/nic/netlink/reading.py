"""Reads interfaces by netlink as values.

A state leaves out what the kernel makes by itself and will make again: link-local addresses, those
of router advertisements, routes that follow from addresses, and the table `local`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from topobus.nic.interfaces.rules.interface_fields import SYSCTLS
from topobus.nic.interfaces.rules.interface_state import HeldAddress, HeldRoute, InterfaceState
from topobus.nic.netlink.requests import request_routes

__all__ = [
    "bus_device_of",
    "get_link",
    "kind_of",
    "link_names",
    "list_links",
    "names_of",
    "permanent_mac",
    "port_name",
    "read_state",
    "sysctl_path",
]

_IFF_UP = 1
_AF_INET, _AF_INET6 = 2, 10
_FOR_EVER = 0xFFFFFFFF
# linux/if_addr.h: made by the kernel for a link-local address, or by a router's advertisement.
_KERNEL_PROTOCOLS = (1, 2, 3)
_NODAD, _HOMEADDRESS, _MANAGETEMPADDR, _NOPREFIXROUTE, _TEMPORARY = 0x02, 0x10, 0x100, 0x200, 0x01
_KEPT_FLAGS = _NODAD | _HOMEADDRESS | _MANAGETEMPADDR | _NOPREFIXROUTE
_TABLE_LOCAL = 255
_UNICAST = 1
_RTM_F_CLONED = 0x200
_ONLINK = 4
# linux/netlink.h: the list is not consistent. A host that makes interfaces all the time may change
# it more than once.
_NLM_F_DUMP_INTR = 0x10
_MOST_DUMPS = 10
# linux/rtnetlink.h: made by the kernel, and by router advertisements.
_DERIVED_ROUTES = (2, 9)


def read_state(socket: Any, proc: str, *, index: int) -> InterfaceState | None:
    """Read one interface, or return None when there is none of that index."""
    link = get_link(socket, index=index)
    if link is None:
        return None
    master = get_link(socket, index=link.get("master")) if link.get("master") else None
    name = link.get("ifname")
    return InterfaceState(
        name=name,
        alternative_names=tuple(sorted(names_of(link) - {name})),
        index=index,
        mac=(link.get("address") or "").lower(),
        permanent_mac=permanent_mac(link),
        port_name=port_name(link),
        mtu=link.get("mtu") or 0,
        least_mtu=link.get("min_mtu") or 0,
        largest_mtu=link.get("max_mtu") or 0,
        is_up=bool(link["flags"] & _IFF_UP),
        has_carrier=bool(link.get("carrier")),
        kind=kind_of(link),
        alias=link.get("ifalias") or "",
        tx_queue_length=link.get("txqlen") or 0,
        link=link.get("link") or 0,
        link_namespace=link.get("link_netnsid"),
        bus_device=bus_device_of(link),
        master=master.get("ifname") if master is not None else "",
        # IPv4 in the kernel's order, where the first one is the primary. The kernel lists IPv6
        # newest first.
        addresses=tuple(
            sorted(
                _addresses(socket, index),
                key=lambda held: (":" in held.address, held.address if ":" in held.address else ""),
            )
        ),
        routes=tuple(sorted(_routes(socket, index), key=str)),
        sysctls=_sysctls(proc, name),
    )


def get_link(socket: Any, *, index: int = 0, name: str = "") -> Any | None:
    """Ask for one interface by its index, or by one of its names. None when there is none.

    Errors: raises NetlinkError for any other answer of the kernel.
    """
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        links = list(socket.link("get", **({"index": index} if index else {"ifname": name})))
    except NetlinkError as err:
        if err.code == errno.ENODEV:
            return None
        raise
    return links[0] if links else None


def kind_of(link: Any) -> str:
    """Return the kind of a virtual interface, such as `veth`, or "" for hardware."""
    info = link.get("linkinfo") or {"attrs": []}
    return dict(info["attrs"]).get("IFLA_INFO_KIND") or ""


def names_of(link: Any) -> set[str]:
    """Return all names of an interface, alternative ones as well."""
    others = link.get("prop_list") or {"attrs": []}
    return {link.get("ifname")} | {name for key, name in others["attrs"] if key == "IFLA_ALT_IFNAME"}


def link_names(socket: Any) -> dict[str, int]:
    """Map all names of a namespace's interfaces, each of which is taken there, to the interface's
    index.
    """
    return {name: link["index"] for link in list_links(socket) for name in names_of(link)}


def list_links(socket: Any) -> list[Any]:
    """List a namespace's interfaces."""
    return _dump(socket.get_links)


def permanent_mac(link: Mapping[str, Any]) -> str:
    """Return the address that a driver names as the hardware's own, or "" for a virtual
    interface.
    """
    permanent = (link.get("perm_address") or "").lower()
    return "" if permanent.strip("0:") == "" else permanent


def bus_device_of(link: Mapping[str, Any]) -> str:
    """Return bus and device that an interface belongs to, or "" for a virtual interface."""
    bus, device = link.get("parent_dev_bus_name"), link.get("parent_dev_name")
    return f"{bus}/{device}" if bus and device else ""


def port_name(link: Mapping[str, Any]) -> str:
    """Return the name, or the id, of the device's port that an interface is.

    Empty where the driver names none.
    """
    return str(link.get("phys_port_name") or link.get("phys_port_id") or "")


def sysctl_path(proc: str, setting: str, interface: str) -> Path:
    """Return the file of a setting of an interface, such as `net.ipv4.conf.IFNAME.rp_filter`."""
    return Path(proc, "sys", *(interface if part == "IFNAME" else part for part in setting.split(".")))


def _dump(act: Callable[..., Any], **filters: Any) -> list[Any]:
    """List all of something, again when it changed while it was listed (pyroute2 returns such
    lists).
    """
    messages: list[Any] = []
    for _ in range(_MOST_DUMPS):
        messages = list(act(**filters))
        if not any(message["header"]["flags"] & _NLM_F_DUMP_INTR for message in messages):
            break
    return messages


def _sysctls(proc: str, name: str) -> dict[str, int]:
    values: dict[str, int] = {}
    for setting in SYSCTLS:
        try:
            values[setting] = int(sysctl_path(proc, setting, name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue  # this kernel has it not, or IPv6 is not there: nothing to put back
    return values


def _addresses(socket: Any, index: int) -> Iterator[HeldAddress]:
    for message in _dump(socket.get_addr, index=index):
        if message["index"] != index:
            continue
        flags = message.get("IFA_FLAGS") or message["flags"]
        is_ipv6 = message["family"] == _AF_INET6
        if is_ipv6 and (
            message.get("IFA_PROTO") in _KERNEL_PROTOCOLS or flags & _TEMPORARY or _is_link_local_of_kernel(message)
        ):
            continue
        local, far = message.get("IFA_LOCAL"), message.get("IFA_ADDRESS")
        address = local or far
        times = message.get("IFA_CACHEINFO") or {}
        valid, preferred = (
            times.get("ifa_valid", _FOR_EVER),
            times.get("ifa_preferred", times.get("ifa_prefered", _FOR_EVER)),
        )
        yield HeldAddress(
            address=f"{address}/{message['prefixlen']}",
            peer=far if local and far and far != local else "",
            broadcast=message.get("IFA_BROADCAST") or "",
            # The kernel uses the interface's name as the label of an IPv4 address that has none.
            label=label if (label := message.get("IFA_LABEL") or "") and ":" in label else "",
            scope=message["scope"],
            flags=flags & _KEPT_FLAGS,
            valid_s=None if valid == _FOR_EVER else valid,
            preferred_s=None if preferred == _FOR_EVER else preferred,
        )


def _is_link_local_of_kernel(message: Any) -> bool:
    # Kernels before 5.18 do not show who made an address. A link-local one is made again when the
    # interface is switched on.
    return message.get("IFA_PROTO") is None and str(message.get("IFA_ADDRESS")).startswith("fe80:")


def _routes(socket: Any, index: int) -> Iterator[HeldRoute]:
    for family in (_AF_INET, _AF_INET6):
        # The kernel selects those of the interface: a host may have a million others.
        for message in _dump(request_routes, socket=socket, family=family, index=index):
            table = message.get("RTA_TABLE") or message["table"]
            if message.get("RTA_OIF") != index or table == _TABLE_LOCAL or message["proto"] in _DERIVED_ROUTES:
                continue
            # Multicast routes of IPv6 come with the interface. Cached ones are no routes.
            if message["type"] != _UNICAST or message["flags"] & _RTM_F_CLONED:
                continue
            everything = "0.0.0.0" if family == _AF_INET else "::"
            yield HeldRoute(
                destination=f"{message.get('RTA_DST') or everything}/{message['dst_len']}",
                gateway=message.get("RTA_GATEWAY") or "",
                source=message.get("RTA_PREFSRC") or "",
                metric=message.get("RTA_PRIORITY") or 0,
                table=table,
                scope=message["scope"],
                protocol=message["proto"],
                type=message["type"],
                is_onlink=bool(message["flags"] & _ONLINK),
            )
