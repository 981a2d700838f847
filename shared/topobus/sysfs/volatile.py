"""Reads the parts of a machine that can change while its kernel runs, to decide cheaply whether the
full read (`read_machine`) is needed.

The result equals the earlier one as long as nothing changed. It includes what the kernel changes by
itself or on request: CPUs online, memory, huge pages, the cpuset of this process, PCI functions
with their drivers and lanes. It excludes the structure of a CPU or card (caches, cores, ids), which
comes and goes with the CPU or the card.
Cost: some 200 files for 224 CPUs and 56 functions, where the full read takes 5,000.
"""

from __future__ import annotations

import re

from msgspec import Struct

from topobus.sysfs.boot import read_boot_id
from topobus.sysfs.cpus import CPU_FOLDER
from topobus.sysfs.limits import Limits, read_limits
from topobus.sysfs.numa import NODE_FOLDER
from topobus.sysfs.pci import PCI_DEVICES, pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError

__all__ = ["VolatileFacts", "read_volatile"]


class VolatileFacts(Struct, frozen=True, kw_only=True):
    """Texts of the tree, which are only compared and never interpreted."""

    boot_id: str
    cpu_folders: tuple[str, ...]
    """Names below the CPU folder: a CPU that is plugged in gets one."""
    online_cpus: tuple[str | None, ...]
    nodes: tuple[tuple[str, ...], ...]
    """For each node (or the machine, without NUMA) its CPUs, memory and huge pages."""
    limits: Limits
    functions: tuple[tuple[str, ...], ...]
    """For each PCI function its address, which folder it is, its driver, its lanes now and its NUMA
    node."""


def read_volatile(tree: Tree) -> VolatileFacts:
    """Read what can change.

    Errors: raises HardwareError for what exists and cannot be read.
    """
    scan = tree.for_scan()
    cpu_folders = scan.names(CPU_FOLDER)
    return VolatileFacts(
        boot_id=read_boot_id(scan),
        cpu_folders=cpu_folders,
        online_cpus=_read_online(scan, cpu_folders),
        nodes=_read_nodes(scan),
        limits=read_limits(scan) if tree.settings.honours_cpuset else Limits(),
        functions=tuple(_read_function(scan, name) for name in scan.names(PCI_DEVICES)),
    )


def _read_online(tree: Tree, cpu_folders: tuple[str, ...]) -> tuple[str | None, ...]:
    online = tree.read(f"{CPU_FOLDER}/online")
    if online is not None:
        return (online,)
    # Kernels without the list: each CPU has a file of its own.
    return tuple(tree.read(f"{CPU_FOLDER}/{name}/online") for name in cpu_folders if re.fullmatch(r"cpu\d+", name))


def _read_nodes(tree: Tree) -> tuple[tuple[str, ...], ...]:
    nodes = [name for name in tree.names(NODE_FOLDER) if re.fullmatch(r"node\d+", name)]
    if not nodes:
        return (("", _read_memory(tree, "proc/meminfo"), *_read_pages(tree, "sys/kernel/mm/hugepages")),)
    folders = [f"{NODE_FOLDER}/{name}" for name in nodes]
    online = tree.read(f"{NODE_FOLDER}/online") or ""
    return (
        (online,),
        *(
            (
                folder,
                tree.read(f"{folder}/cpulist") or tree.read(f"{folder}/cpumap") or "",
                _read_memory(tree, f"{folder}/meminfo"),
                *_read_pages(tree, f"{folder}/hugepages"),
            )
            for folder in folders
        ),
    )


def _read_memory(tree: Tree, path: str) -> str:
    """Read the line of the total: the others move with every allocation."""
    text = tree.read(path) or ""
    at = text.find("MemTotal:")
    return text[at : text.find("\n", at)] if at >= 0 else ""


def _read_pages(tree: Tree, folder: str) -> tuple[str, ...]:
    """Read the totals of the pools: free pages move by themselves."""
    return tuple(f"{name} {tree.read(f'{folder}/{name}/nr_hugepages')}" for name in tree.names(folder))


def _read_function(tree: Tree, name: str) -> tuple[str, ...]:
    folder = pci_folder(name)
    # A card that was removed and put back between two looks has another folder under the same name.
    return (
        name,
        tree.identity(folder),
        tree.link_name(f"{folder}/driver"),
        _read_width(tree, folder),
        tree.read(f"{folder}/numa_node") or "",
    )


def _read_width(tree: Tree, folder: str) -> str:
    """Read a function's lanes.

    An error is part of the result, so that the other functions are read all the same.
    """
    try:
        return tree.read(f"{folder}/current_link_width") or ""
    except HardwareError as err:
        return err.message
