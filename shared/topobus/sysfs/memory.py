"""Reads memory and huge pages of one NUMA node or of the whole machine.

Source: Documentation/ABI/stable/sysfs-devices-node (meminfo, hugepages),
Documentation/admin-guide/mm/hugetlbpage.rst.
"""

from __future__ import annotations

import re

from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.machine import HugepagePool

__all__ = ["read_hugepages", "read_memory"]


def read_memory(tree: Tree, path: str, warnings: list[str]) -> int:
    """Read MemTotal of a meminfo file in bytes.

    0 where it is unknown (some memory-only nodes have no file).
    """
    try:
        text = tree.read(path)
    except HardwareError as err:
        warnings.append(err.message)
        return 0
    match = re.search(r"MemTotal:\s+(\d+)", text or "")
    return int(match[1]) * 1024 if match else 0


def read_hugepages(tree: Tree, folder: str, warnings: list[str]) -> tuple[HugepagePool, ...]:
    """Read the pools below a hugepages folder, smallest page first. Empty when there is none."""
    pools: list[HugepagePool] = []
    for name in tree.names(folder):
        size = re.fullmatch(r"hugepages-(\d+)kB", name)
        if size is None:
            continue
        try:
            total = tree.read_int(f"{folder}/{name}/nr_hugepages") or 0
            free = tree.read_int(f"{folder}/{name}/free_hugepages")
        except HardwareError as err:
            warnings.append(err.message)
            continue
        pools.append(HugepagePool(page_bytes=int(size[1]) * 1024, total=total, free=total if free is None else free))
    return tuple(sorted(pools, key=lambda pool: pool.page_bytes))
