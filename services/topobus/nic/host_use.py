"""Finds who uses a physical function that is to be cut, and what a new virtual function lacks.

Each use is a sentence for people.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.devicekit.passthrough.function_users import host_uses
from topobus.devicekit.pci import awaits_driver, is_passthrough_driver
from topobus.nic.netlink.vf_count import functions_in_use
from topobus.sysfs.net import function_interfaces
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.pci import PciAddress

__all__ = ["function_users", "lacks_interface"]


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
