"""Reads the kernel's names of what is behind PCI functions, as lstopo shows them: network
interfaces (`eth0`), disks (`vda`, `nvme0n1`, `sda`), RDMA devices (`mlx5_0`).

The names are for people. A name changes when an interface is renamed or moves into a pod, so
nothing is decided by it.
Source: Documentation/ABI/testing/sysfs-class-net, sysfs-block, sysfs-class-infiniband.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from topobus.sysfs.net import function_interfaces
from topobus.sysfs.netdevs import innermost_function
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.pci import PciAddress

__all__ = ["DISKS", "disk_function", "read_kernel_names"]

DISKS = "sys/class/block"
# A path of a multipath namespace, which is never opened itself: the disk is nvme0n1.
_NVME_PATH = re.compile(r"nvme\d+c\d+n\d+")


def read_kernel_names(tree: Tree, functions: Iterable[PciAddress]) -> dict[PciAddress, tuple[str, ...]]:
    """Name what is behind each function, wherever it is below it (virtio, NVMe, SATA, SCSI):
    interfaces, disks, RDMA devices, each kind sorted.

    Functions without any are left out. An interface in another network namespace is not seen.
    Cost: some folders per function, and a link per block device; read it once, for a drawing.
    """
    disks = _disks(tree)
    names = {
        address: (
            *(interface.name for interface in function_interfaces(tree, address, only_link=True)),
            *sorted(disks.get(address, ())),
            *tree.names(f"{pci_folder(address)}/infiniband"),
        )
        for address in functions
    }
    return {address: kernel for address, kernel in names.items() if kernel}


def _disks(tree: Tree) -> dict[PciAddress, list[str]]:
    disks: dict[PciAddress, list[str]] = {}
    for name in tree.names(DISKS):
        if (function := disk_function(tree, name)) is not None:
            disks.setdefault(function, []).append(name)
    return disks


def disk_function(tree: Tree, name: str) -> PciAddress | None:
    """Find the function that a disk is below: the innermost one.

    None for partitions, which are parts of a disk, and for disks below no function.
    """
    real = tree.real(f"{DISKS}/{name}")
    if real is None or _NVME_PATH.fullmatch(name) or tree.read(f"{real}/partition") is not None:
        return None
    return innermost_function(real)
