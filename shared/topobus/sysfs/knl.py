"""Reads Knights Landing (Xeon Phi 7200): its fast memory is a NUMA node, a cache in front of the
others, or half of each.

Its firmware reports large distances to the fast memory on purpose, so that no program gets it by
default. These distances are a policy and not a latency. They are treated as unknown once they have
shown which fast node belongs to which cluster.
Source: hwloc 2.9, whose recorder keeps what only root may read in `knl_memoryside_cache`; Intel's
"Intel Xeon Phi Processor NUMA modes".
"""

from __future__ import annotations

import re

from topobus.sysfs.tree import Tree
from topobus.values.idset import CpuSet

__all__ = ["is_knl", "knl_caches"]

# Knights Landing and Knights Mill.
_MODELS = ("87", "133")
# hwloc's dump of the DMI table, where distributions put it.
_SIDE_FILES = ("/var/run/hwloc/knl_memoryside_cache", "/run/hwloc/knl_memoryside_cache")


def is_knl(tree: Tree) -> bool:
    """Say whether the first processor is a Knights Landing."""
    text = tree.read("proc/cpuinfo") or ""
    block = text.split("\n\n", 1)[0]

    def value_of(key: str) -> str:
        match = re.search(rf"^{key}[ \t]*: *(.*)$", block, re.MULTILINE)
        return match[1].strip() if match else ""

    return value_of("vendor_id") == "GenuineIntel" and value_of("cpu family") == "6" and value_of("model") in _MODELS


def knl_caches(tree: Tree, cpus: dict[int, CpuSet]) -> tuple[CpuSet, ...]:
    """Return the CPUs behind each memory-side cache: those of each cluster, when the fast memory
    (or a part of it) is a cache.

    `cpus` are the nodes' own. Where no file shows the mode, fast memory that is in no node must be
    a cache.
    """
    for path in _SIDE_FILES:
        match = re.search(r"^cache_size: (-?\d+)", tree.read_mounted(path) or "", re.MULTILINE)
        if match is not None:
            is_cached = int(match[1]) > 0
            break
    else:
        is_cached = all(cpus.values())
    return tuple(own for own in cpus.values() if own) if is_cached else ()
