"""Reads from KFD which processes compute on an AMD GPU, and how much of its memory they use.

KFD has a file for each GPU in each process that has opened it, with 0 for a GPU that the process
does not use. A GPU in parts has several KFD nodes.
Source: drivers/gpu/drm/amd/amdkfd/kfd_process.c, sysfs files `vram_<gpu id>`; gpu_id in
kfd_topology.c.
"""

from __future__ import annotations

from collections.abc import Collection

from topobus.sysfs.tree import Tree

__all__ = ["kfd_processes"]

_KFD = "sys/class/kfd/kfd"


def kfd_processes(tree: Tree, nodes: Collection[int]) -> dict[int, int]:
    """Find the processes with memory on any of these nodes: pid to bytes.

    Errors: raises HardwareError when a file is no number.
    """
    ids = [tree.read_int(f"{_KFD}/topology/nodes/{node}/gpu_id") for node in sorted(nodes)]
    processes: dict[int, int] = {}
    for name in tree.names(f"{_KFD}/proc"):
        if name.isdecimal():
            used = sum(tree.read_int(f"{_KFD}/proc/{name}/vram_{gpu_id}") or 0 for gpu_id in ids if gpu_id)
            if used:
                processes[int(name)] = used
    return processes
