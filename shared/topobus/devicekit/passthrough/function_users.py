"""The users of a PCI function on this node: processes that have its device nodes open, and
interfaces of it that the node has in use.

They are sentences for people, none when the function is idle. A process whose open files cannot be
read does not count as idle: the result has the number of such processes.
Source: Documentation/ABI/testing/sysfs-class-net (master, upper_*); proc(5) fd, route tables;
`DEVNAME` in a device's uevent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator

from msgspec import Struct

from topobus.sysfs.net import default_route_interfaces, function_interfaces
from topobus.sysfs.netdevs import addressed_interfaces
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.pci import PciAddress

__all__ = ["OpenNodes", "function_nodes", "function_uses", "host_uses", "interface_uses", "openers"]

# A node's folder lies at most so far below its function: drm/card0,
# infiniband_verbs/uverbs0, misc/vfio.
_DEEPEST = 4
_FUNCTION = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class OpenNodes(Struct, frozen=True, kw_only=True):
    """The processes that have device nodes open, and other uses of a function."""

    users: tuple[str, ...] = ()
    """`process 4711 (python3) has /dev/nvidia0 open`."""
    unseen: int = 0
    """Processes whose open files we may not see."""


def function_uses(tree: Tree, address: PciAddress, own_nodes: Collection[str]) -> OpenNodes:
    """Find what uses a function: processes with its nodes, or its driver's own ones, open, and its
    interfaces.
    """
    busy = openers(tree, {*function_nodes(tree, address), *own_nodes})
    return OpenNodes(users=(*interface_uses(tree, address), *busy.users), unseen=busy.unseen)


def function_nodes(tree: Tree, address: PciAddress) -> tuple[str, ...]:
    """Name the device nodes that the kernel has made for a function, relative to dev:
    `dri/renderD128`.

    Sorted. Nodes of functions behind it (if it is a bridge) are left out.
    """
    return tuple(sorted(set(_nodes(tree, pci_folder(address), 0))))


def openers(tree: Tree, nodes: Collection[str]) -> OpenNodes:
    """Find the processes that have one of these nodes (relative to dev) open.

    Cost: one readlink for each open file of the node: a tenth of a second and more.
    """
    # A tree that caches listings would keep each process without end.
    tree = Tree(tree.settings)
    users: list[str] = []
    unseen = 0
    for process in tree.names("proc") if nodes else ():
        if not process.isdecimal():
            continue
        try:
            files = tree.names(f"proc/{process}/fd")
            folder = tree.path(f"proc/{process}/fd")
        except HardwareError:
            unseen += 1
            continue
        # By the end of the path: a container's /dev, and that of a host mounted elsewhere, has
        # another beginning.
        opened = sorted({node for file in files for node in nodes if _target(f"{folder}/{file}").endswith(f"/{node}")})
        if opened:
            program = tree.read(f"proc/{process}/comm") or "?"
            users.append(f"process {process} ({program}) has {', '.join(f'/dev/{node}' for node in opened)} open")
    return OpenNodes(users=tuple(users), unseen=unseen)


def interface_uses(tree: Tree, address: PciAddress) -> tuple[str, ...]:
    """Describe how the node, or another network namespace, uses a function's network interfaces.

    Empty when it has none, or they are idle.

    Errors: raises HardwareError for a file that exists and cannot be read.
    """
    tree = Tree(tree.settings)
    is_away = tree.exists(f"{pci_folder(address)}/net") and not function_interfaces(tree, address, only_link=True)
    return ("its interface is in another network namespace",) if is_away else host_uses(tree, address)


def host_uses(tree: Tree, address: PciAddress) -> tuple[str, ...]:
    """Describe how the node uses a function's interfaces: its default route, an address or a route, a
    bridge or bond, an interface on top.

    Errors: raises HardwareError for a file that exists and cannot be read.
    """
    interfaces = function_interfaces(tree, address, only_link=True)
    if not interfaces:
        return ()
    routed, addressed = default_route_interfaces(tree), addressed_interfaces(tree)
    uses: list[str] = []
    for interface in interfaces:
        name = interface.name
        master = tree.link_name(f"{interface.path}/master")
        above = sorted(
            entry.removeprefix("upper_") for entry in tree.names(interface.path) if entry.startswith("upper_")
        )
        if name in routed:
            uses.append(f"the default route of this node goes over {name}")
        elif name in addressed:
            uses.append(f"the node has an address or a route over {name}")
        if master:
            uses.append(f"{name} is a port of {master}")
        elif above:
            uses.append(f"{name} carries {', '.join(above)}")
    return tuple(uses)


def _nodes(tree: Tree, folder: str, depth: int) -> Iterator[str]:
    names = tree.names(folder)
    if "dev" in names:
        match = re.search(r"^DEVNAME=(.+)$", tree.read(f"{folder}/uevent") or "", re.MULTILINE)
        yield (match.group(1) if match is not None else folder.rpartition("/")[2]).removeprefix("/dev/")
    for name in names if depth < _DEEPEST else ():
        path = f"{folder}/{name}"
        if not tree.is_link(path) and not _FUNCTION.fullmatch(name) and tree.path(path).is_dir():
            yield from _nodes(tree, path, depth + 1)


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        # Closed meanwhile, or not ours to follow.
        return ""
