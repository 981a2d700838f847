"""Reads what amdgpu and KFD publish of one partition of a card: how busy its compute dies are, and
the memory that processes have of it.

A card's table `gpu_metrics` has its partitions from revision 1.6 on, each with the use of its dies
in percent, all bits set where there is no number. Each revision has another layout, and 1.9 has no
partitions. Power, temperatures and clocks are the card's. KFD counts the memory of each process by
KFD node; what the driver keeps for itself is no process'.
Source: drivers/gpu/drm/amd/include/kgd_pp_interface.h (gpu_metrics_v1_6 to v1_8,
amdgpu_xcp_metrics); drivers/gpu/drm/amd/pm/swsmu/smu13/smu_v13_0_6_ppt.c (get_gpu_metrics: entry i
is partition i); drivers/gpu/drm/amd/amdkfd/kfd_process.c (`vram_<gpu id>`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from topobus.gpu.amd.amd_cards import AmdPartition
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.readings import Quantity, Reading

__all__ = ["partition_readings", "read_kfd_memory"]

_KFD = "sys/class/kfd/kfd"
_HEADER = struct.Struct("<HBB")
"""The table's size, and its revision in two numbers."""
# By the second number of the revision, bytes: where the first partition begins, and the size of each.
_PARTITIONS = {6: (312, 168), 7: (344, 232), 8: (344, 376)}
_MOST_PARTITIONS = 8
_DIES = struct.Struct("<8I")
"""With these a partition begins."""


def partition_readings(
    tree: Tree, table: bytes, partition: AmdPartition, memory_bytes: int, used: Mapping[int, int]
) -> list[Reading]:
    """Read a partition.

    Shapes: table — the card's file `gpu_metrics`, empty without; memory_bytes — the partition's own
            memory, 0 without; used — what `read_kfd_memory` gave.
    """
    dies = [percent for percent in _dies_of(table, partition.index) if percent <= 100]
    readings = [Reading(quantity=Quantity.UTILIZATION, value=sum(dies) / len(dies) / 100)] if dies else []
    try:
        gpu_id = tree.read_int(f"{_KFD}/topology/nodes/{partition.node.number}/gpu_id")
    except HardwareError:
        gpu_id = None
    if gpu_id and tree.exists(f"{_KFD}/proc"):
        readings.append(Reading(quantity=Quantity.MEMORY_USED, value=float(used.get(gpu_id, 0))))
    if memory_bytes:
        readings.append(Reading(quantity=Quantity.MEMORY_SIZE, value=float(memory_bytes)))
    return readings


def read_kfd_memory(tree: Tree) -> dict[int, int]:
    """Sum the bytes that all processes have, by the id of KFD's GPU.

    Cost: O(processes × the GPUs that each has opened), a file each.
    """
    used: dict[int, int] = {}
    for process in tree.names(f"{_KFD}/proc"):
        for name in tree.names(f"{_KFD}/proc/{process}"):
            kind, _, gpu_id = name.partition("_")
            if kind == "vram" and gpu_id.isdecimal():
                used[int(gpu_id)] = used.get(int(gpu_id), 0) + _bytes_of(tree, f"{_KFD}/proc/{process}/{name}")
    return used


def _bytes_of(tree: Tree, path: str) -> int:
    try:
        return tree.read_int(path) or 0
    except HardwareError:
        # The process has ended.
        return 0


def _dies_of(table: bytes, index: int) -> tuple[int, ...]:
    if len(table) < _HEADER.size:
        return ()
    _, major, minor = _HEADER.unpack_from(table)
    begin, size = _PARTITIONS.get(minor, (0, 0)) if major == 1 else (0, 0)
    place = begin + index * size
    if not size or index >= _MOST_PARTITIONS or len(table) < place + _DIES.size:
        return ()
    return _DIES.unpack_from(table, place)
