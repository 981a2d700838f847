"""IOMMU groups: the functions that a virtual machine gets together or not at all, because they can
reach each other's memory past the IOMMU.

Source: Documentation/driver-api/vfio.rst; vfio_dev_viable in drivers/vfio/group.c for the functions
that may share a group.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.pci import PciAddress

__all__ = ["IommuGroup", "function_number", "others", "read_group", "vfio_nodes"]

# Base class 06: bridges, which the kernel needs and no machine gets.
_BRIDGE = 0x06
# Holds a function without using it: an operator sets aside with it a function that shares a group
# (a GPU's sound).
_NOBODYS = ("pci-stub",)


class IommuGroup(Struct, frozen=True, kw_only=True):
    """One group."""

    number: str
    functions: tuple[PciAddress, ...]


def read_group(tree: Tree, address: PciAddress) -> IommuGroup | None:
    """Read a function's group.

    None where there is no IOMMU, or the members of the group are unknown.
    """
    folder = f"{pci_folder(address)}/iommu_group"
    number = tree.link_name(folder)
    members = tree.names(f"{folder}/devices")
    if not number or not members:
        return None
    return IommuGroup(number=number, functions=tuple(sorted(PciAddress.parse(member) for member in members)))


def others(tree: Tree, group: IommuGroup, own: Collection[PciAddress]) -> dict[PciAddress, str]:
    """Find the functions of a group that prevent passthrough, with the driver of each.

    A claim's own functions, bridges, and functions that are set aside do not.
    """
    found_functions: dict[PciAddress, str] = {}
    for address in group.functions:
        driver = tree.link_name(f"{pci_folder(address)}/driver")
        code = tree.read_int(f"{pci_folder(address)}/class", 0) or 0
        if address not in own and code >> 16 != _BRIDGE and driver not in _NOBODYS:
            found_functions[address] = driver
    return found_functions


def function_number(tree: Tree, address: PciAddress) -> str:
    """Name the node of a function that VFIO has, below dev/vfio/devices: `vfio3`.

    Empty when there is none.
    """
    return next(iter(tree.names(f"{pci_folder(address)}/vfio-dev")), "")


def vfio_nodes(tree: Tree, address: PciAddress) -> tuple[str, ...]:
    """Name the nodes, relative to dev, that open a function that VFIO has: the group's
    and its own.
    """
    group = tree.link_name(f"{pci_folder(address)}/iommu_group")
    number = function_number(tree, address)
    return (*([f"vfio/{group}"] if group else ()), *([f"vfio/devices/{number}"] if number else ()))
