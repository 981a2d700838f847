"""Reads all network interfaces of this network namespace, with what each is: a PCI function's, a
scalable function's, or one without hardware of its own.

Values are the state at the time of the call. It never writes and never uses netlink.
Source: Documentation/ABI/testing/sysfs-class-net; `DEVTYPE` of the kernel's drivers/net; if_inet6
and route of proc_pid_net(5).
"""

from __future__ import annotations

import re

from msgspec import Struct

from topobus.sysfs.net import NetInterface, read_interface, read_node_file
from topobus.sysfs.tree import Tree
from topobus.values.pci import PciAddress

__all__ = [
    "NetDevice",
    "addressed_interfaces",
    "innermost_function",
    "interface_path",
    "list_net_devices",
    "read_net_device",
]

NET = "sys/class/net"
# IFF_TAP of linux/if_tun.h: frames, not packets.
_IFF_TAP = 0x2
_VIRTUAL = "sys/devices/virtual/"


class NetDevice(Struct, frozen=True, kw_only=True):
    """One interface and what it is."""

    interface: NetInterface
    kind: str
    """`pci` (a PCI function's own, virtio included), `scalable-function`, the kernel's name
    (`bridge`, `bond`, `vlan`, `vxlan`, `ipvlan` …), `tun`, `tap`, `veth`, `stacked` (above another
    interface, of a kind that the kernel does not show here, such as macvlan), `virtual` (without
    hardware, none of these), or `other`."""
    driver: str = ""
    """The kernel driver of the device below; empty for an interface without one."""
    function: PciAddress | None = None
    """The PCI function that the interface belongs to, itself or as a
    part (a scalable function's)."""


def interface_path(name: str) -> str:
    """Give an interface's folder in the tree, by its name."""
    return f"{NET}/{name}"


def list_net_devices(tree: Tree) -> tuple[str, ...]:
    """Name the interfaces that this network namespace shows, in natural
    order, loopback included.
    """
    # Beside the interfaces' folders there are files: bonding_masters.
    return tuple(name for name in tree.names(NET) if tree.exists(f"{NET}/{name}/ifindex"))


def read_net_device(tree: Tree, name: str) -> NetDevice | None:
    """Read one interface. None when this network namespace has none of that name.

    Errors: raises HardwareError for a file that exists and cannot be read.
    """
    folder = interface_path(name)
    if "/" in name or not tree.exists(f"{folder}/ifindex"):
        return None
    real = tree.real(folder) or ""
    bus = tree.link_name(f"{folder}/device/subsystem")
    return NetDevice(
        interface=read_interface(tree, folder, name),
        kind=_kind(tree, folder, real, bus),
        driver=tree.link_name(f"{folder}/device/driver"),
        function=innermost_function(real),
    )


def addressed_interfaces(tree: Tree) -> frozenset[str]:
    """Name the interfaces over which the node has an address of more than the link's own reach, or
    any route of the main table.

    Shapes: result — the interfaces that the node itself uses; an IPv4 address without a network (a
    /32 alone) leaves no trace in the files that name interfaces.
    """
    names: set[str] = set()
    for line in read_node_file(tree, "route").splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 8:
            names.add(fields[0])
    for line in read_node_file(tree, "if_inet6").splitlines():
        # address ifindex prefix-length scope flags name, numbers in hexadecimal; scope 0 is global
        # (IPV6_ADDR_SCOPE_*, net/ipv6.h)
        fields = line.split()
        if len(fields) >= 6 and re.fullmatch(r"0+", fields[3]) is not None:
            names.add(fields[5])
    return frozenset(names)


def _kind(tree: Tree, folder: str, real: str, bus: str) -> str:
    if not real.startswith(_VIRTUAL):
        if bus == "auxiliary":
            return "scalable-function"
        return "pci" if bus == "pci" or (bus == "virtio" and innermost_function(real) is not None) else "other"
    match = re.search(r"^DEVTYPE=([a-z0-9-]{1,32})$", tree.read(f"{folder}/uevent") or "", re.MULTILINE)
    if match is not None:
        return match.group(1)
    flags = tree.read_int(f"{folder}/tun_flags", 0)
    if flags is not None:
        return "tap" if flags & _IFF_TAP else "tun"
    if tree.exists(f"{folder}/bridge"):
        return "bridge"
    if tree.exists(f"{folder}/bonding"):
        return "bond"
    if any(entry.startswith("lower_") for entry in tree.names(folder)):
        return "stacked"
    # A veth names its peer's number here; others without hardware name their own, or 0.
    index, link = tree.read_int(f"{folder}/ifindex"), tree.read_int(f"{folder}/iflink")
    return "veth" if link and index != link else "virtual"


def innermost_function(real: str) -> PciAddress | None:
    """Find the innermost PCI function in the path of a real folder. None where it is below none.

    >>> innermost_function("sys/devices/pci0000:00/0000:00:03.0/virtio0/net/eth0"), innermost_function("sys/devices/virtual/net/lo")
    (PciAddress('0000:00:03.0'), None)
    """  # noqa: E501
    for part in reversed(real.split("/")):
        if re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", part):
            return PciAddress.parse(part)
    return None
