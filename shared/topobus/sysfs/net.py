"""Reads network interfaces of PCI functions and which of them are the function's own ports, and the
interfaces that carry the default route.

Values are the state at the time of the call. It never writes and never uses netlink. An interface
in another network namespace is not visible here, which is no fault.
Source: Documentation/ABI/testing/sysfs-class-net, proc_net_route(5);
Documentation/networking/representors.rst.
"""

from __future__ import annotations

import re

from msgspec import Struct, structs

from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.pci import PciAddress

__all__ = [
    "FunctionPorts",
    "NetInterface",
    "default_route_interfaces",
    "function_interfaces",
    "function_ports",
    "read_interface",
    "read_node_file",
]

# IFF_UP of linux/if.h: the administrator (or a CNI plugin) has switched the interface on.
_IFF_UP = 0x1
# RTF_UP of linux/route.h: the route is in use.
_RTF_UP = 0x1
# A link of links (bond over VLAN over NIC) deeper than this is a loop in a recorded tree.
_MAX_STACK = 8
# phys_port_name: `p0`, `p0s1` is a port of the card, `pf0vf1`, `pf0sf88`, `c1pf0vf1`, `pf0hpf` the
# representor of another function (net/devlink/port.c).
_REPRESENTOR = re.compile(r"(c\d+)?pf\d+")
_PORT = re.compile(r"p\d+(s\d+)?")


class NetInterface(Struct, frozen=True, kw_only=True):
    """One network interface as the kernel shows it.

    Fields that an interface does not show while it is down are None.
    """

    name: str
    path: str
    """Its folder in the tree: `sys/bus/pci/devices/0000:3b:00.0/net/eth0`."""
    mac: str = ""
    is_up: bool = False
    """Switched on by the administrator, whether or not there is a cable."""
    carrier: bool | None = None
    """Whether the link partner is there; None while the interface is switched off."""
    speed_mbps: int | None = None
    duplex: str = ""
    mtu: int | None = None


class FunctionPorts(Struct, frozen=True, kw_only=True):
    """The interfaces that are a PCI function's own, without those that represent other functions of
    its switch (representors).
    """

    interfaces: tuple[NetInterface, ...] = ()
    """By port number where the kernel shows it, else by name."""
    first: NetInterface | None = None
    """The one that the function is known by: its only one, or that of its first port; None where
    there is none, and where it is unclear."""
    unclear: str = ""
    """Why it is not known which one it is, for people: the end of a sentence."""
    others: tuple[str, ...] = ()
    """Names of interfaces in its folder that belong to other functions."""


def function_interfaces(tree: Tree, address: PciAddress, *, only_link: bool = False) -> tuple[NetInterface, ...]:
    """Read the interfaces of one PCI function that this network namespace sees, sorted by name.

    A virtio function has them one folder further down, below `virtioN`.
    Cost: one read per field. `only_link` reads the fields of the link (switched on, carrier, speed,
    duplex) and leaves the others as their defaults: for a look each second.
    """
    base = pci_folder(address)
    folders = [
        base,
        *(
            f"{base}/{name}"
            for name in tree.names(base)
            if name.startswith("virtio") and re.fullmatch(r"virtio\d+", name)
        ),
    ]
    return tuple(
        read_interface(tree, f"{folder}/net/{name}", name, only_link=only_link)
        for folder in folders
        for name in tree.names(f"{folder}/net")
    )


def function_ports(tree: Tree, address: PciAddress, *, only_link: bool = False) -> FunctionPorts:
    """Read which interfaces of a PCI function are its own ports, and which of them represents it.

    The folder of a physical function also lists the representors of its virtual and scalable
    functions, and all its ports where it has several (mlx4). The order of names has no meaning.
    Cost: `function_interfaces`, and one read per interface; one more each where there are several.
    Source: Documentation/networking/representors.rst; phys_port_name and dev_port in
    Documentation/ABI/testing/sysfs-class-net.
    """
    names = {
        interface: tree.read(f"{interface.path}/phys_port_name") or ""
        for interface in function_interfaces(tree, address, only_link=only_link)
    }
    own = [interface for interface, name in names.items() if _REPRESENTOR.match(name) is None]
    # If one has the name of a port, those without such a name are not ports (representors of old
    # drivers have a bare number).
    ports = [interface for interface in own if _PORT.fullmatch(names[interface])] or own
    others = tuple(interface.name for interface in names if interface not in ports)
    if len(ports) < 2:
        return FunctionPorts(interfaces=tuple(ports), first=ports[0] if ports else None, others=others)
    numbers = {port.name: number for port in ports if (number := tree.read_int(f"{port.path}/dev_port")) is not None}
    if len(numbers) == len(ports) == len(set(numbers.values())):
        ports.sort(key=lambda port: numbers[port.name])
        return FunctionPorts(interfaces=tuple(ports), first=ports[0], others=others)
    listed = ", ".join(port.name for port in ports)
    return FunctionPorts(
        interfaces=tuple(ports),
        others=others,
        unclear=f"it has {listed}, and neither phys_port_name nor dev_port distinguishes them",
    )


def default_route_interfaces(tree: Tree) -> frozenset[str]:
    """Name the interfaces that carry the machine's default routes, IPv4 and IPv6, with every
    interface below them (members of a bond or bridge, a VLAN's parent).

    Used to leave these cards out of the inventory.

    Shapes: result — interface names; stacks deeper than `_MAX_STACK` are cut off.
    Errors: raises HardwareError when a route table cannot be read.
    Source: proc(5) /proc/net/route; `lower_*` links of sysfs-class-net.
    """
    names = _default_routes_ipv4(tree) | _default_routes_ipv6(tree)
    roots: set[str] = set()
    for _ in range(_MAX_STACK):
        names -= roots
        if not names:
            break
        roots |= names
        names = {
            entry.removeprefix("lower_")
            for name in names
            for entry in tree.names(f"sys/class/net/{name}")
            if entry.startswith("lower_")
        }
    return frozenset(roots)


def read_interface(tree: Tree, path: str, name: str, *, only_link: bool = False) -> NetInterface:
    """Read one interface from its folder. `only_link` as in `function_interfaces`."""
    if only_link:
        return _read_link(tree, path, name)
    return structs.replace(
        _read_link(tree, path, name),
        mac=tree.read(f"{path}/address") or "",
        mtu=tree.read_int(f"{path}/mtu"),
    )


def read_node_file(tree: Tree, name: str) -> str:
    """Read a file of /proc/net as the node's first process sees it. In a container, proc/net is the
    container's own network, not the node's.
    """
    return tree.read(f"proc/1/net/{name}") or tree.read(f"proc/net/{name}") or ""


def _read_link(tree: Tree, path: str, name: str) -> NetInterface:
    flags = tree.read_int(f"{path}/flags", 0)
    carrier = tree.read_int(f"{path}/carrier")
    speed = tree.read_int(f"{path}/speed")
    return NetInterface(
        name=name,
        path=path,
        is_up=bool(flags is not None and flags & _IFF_UP),
        carrier=None if carrier is None else carrier != 0,
        # -1 (and its unsigned form in old kernels) is SPEED_UNKNOWN of linux/ethtool.h.
        speed_mbps=speed if speed is not None and 0 < speed < 0xFFFFFFFF else None,
        duplex=tree.read(f"{path}/duplex") or "",
    )


def _default_routes_ipv4(tree: Tree) -> set[str]:
    names: set[str] = set()
    for line in read_node_file(tree, "route").splitlines()[1:]:
        # Iface Destination Gateway Flags RefCnt Use Metric Mask …, numbers in hexadecimal
        fields = line.split()
        if len(fields) >= 8 and _is_zero(fields[1]) and _is_zero(fields[7]) and _has_flag(fields[3]):
            names.add(fields[0])
    return names


def _default_routes_ipv6(tree: Tree) -> set[str]:
    names: set[str] = set()
    for line in read_node_file(tree, "ipv6_route").splitlines():
        # destination prefix-length source prefix-length next-hop metric refcount use flags device;
        # `lo` holds the kernel's own reject route
        fields = line.split()
        if (
            len(fields) >= 10
            and _is_zero(fields[0])
            and _is_zero(fields[1])
            and _has_flag(fields[8])
            and fields[9] != "lo"
        ):
            names.add(fields[9])
    return names


def _is_zero(text: str) -> bool:
    return re.fullmatch(r"0+", text) is not None


def _has_flag(text: str) -> bool:
    return re.fullmatch(r"[0-9a-fA-F]+", text) is not None and bool(int(text, 16) & _RTF_UP)
