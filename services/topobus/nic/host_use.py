"""Finds how the node itself uses a PCI function's interfaces, which must not be interrupted.

Each use is a sentence for people.
Source: Documentation/ABI/testing/sysfs-class-net (master, upper_*), proc(5) route tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.devicekit.pci import awaits_driver, is_passthrough_driver
from topobus.nic.netlink.vf_count import functions_in_use
from topobus.sysfs.net import default_route_interfaces, function_interfaces
from topobus.sysfs.netdevs import addressed_interfaces
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.pci import PciAddress

__all__ = ["function_users", "host_uses", "lacks_interface"]


def host_uses(tree: Tree, address: PciAddress) -> tuple[str, ...]:
    """Describe how the node uses a function: its default route, an address or a route, a bridge or
    bond, an interface on top of it.

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


def function_users(tree: Tree, address: PciAddress, virtual: Sequence[PciAddress]) -> tuple[str, ...]:
    """Describe who uses a physical function, or one of its virtual ones, although no device of it
    is held.
    """
    fresh = Tree(tree.settings)
    virtual_users = functions_in_use(fresh.path(pci_folder(address))) if virtual else []
    return (*host_uses(fresh, address), *virtual_users)


def lacks_interface(tree: Tree, address: PciAddress) -> str:
    """Return what a new virtual function lacks, or "" when it is complete.

    Its driver binds a moment after the function appears, and makes the interface a moment later.
    These are complete without an interface: a function whose interface is in another namespace, one
    that VFIO has, one that no driver binds to by itself, and one with an RDMA device whose physical
    function has no interface either (InfiniBand without IPoIB).
    """
    folder = pci_folder(address)
    if awaits := awaits_driver(tree, address):
        return awaits
    driver = tree.link_name(f"{folder}/driver")
    # The folder stays, empty, when the interface moves into another namespace.
    has_interface = tree.exists(f"{folder}/net") or function_interfaces(tree, address, only_link=True)
    if not driver or is_passthrough_driver(driver) or has_interface:
        return ""
    if tree.exists(f"{folder}/infiniband") and not tree.exists(f"{folder}/physfn/net"):
        return ""
    return "its interface is not there yet"
