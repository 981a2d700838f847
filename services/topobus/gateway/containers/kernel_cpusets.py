"""Reads from the kernel which CPUs containers have: their control groups' cpusets, of version 1 and
2, below the configured root.

Control groups are named as the container runtime writes them (`cgroups_path` of the OCI
specification, in either of its two forms). Nothing is written, because only the container runtime
writes cpusets. Source: runc, libcontainer/cgroups/systemd (ExpandSlice, getUnitName).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.idset import CpuSet

__all__ = ["KernelCpusets", "control_group_folder"]

# Each hierarchy with its files, of which the first non-empty one counts: in version 2 the first
# file is empty where the parent's set applies.
_FILES = (
    ("sys/fs/cgroup/cpuset", ("cpuset.cpus", "cpuset.effective_cpus")),
    ("sys/fs/cgroup", ("cpuset.cpus", "cpuset.cpus.effective")),
)


class KernelCpusets:
    """The cpusets of this machine's containers."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    @property
    def where(self) -> str:
        """The folder below which control groups are read."""
        return str(self._tree.root / "sys/fs/cgroup")

    async def read(self, groups: Mapping[str, str]) -> dict[str, CpuSet]:
        """Read control groups by container. A missing one is left out."""
        return await asyncio.to_thread(self._read_all, groups)

    def _read_all(self, groups: Mapping[str, str]) -> dict[str, CpuSet]:
        read = {container_id: self._read(control_group_folder(path)) for container_id, path in groups.items()}
        return {container_id: cpus for container_id, cpus in read.items() if cpus is not None}

    def _read(self, folder: str) -> CpuSet | None:
        for hierarchy, files in _FILES if folder else ():
            for file in files:
                try:
                    text = self._tree.read(f"{hierarchy}/{folder}/{file}")
                    if text:
                        return CpuSet.parse(text)
                except (HardwareError, ValueError):
                    continue
        return None


def control_group_folder(path: str) -> str:
    """Return the folder of a control group. Empty when the path names none.

    >>> control_group_folder("/kubepods/besteffort/pod1/c0ffee")
    'kubepods/besteffort/pod1/c0ffee'
    >>> control_group_folder("kubepods-besteffort-pod1.slice:cri-containerd:c0ffee")
    'kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1.slice/cri-containerd-c0ffee.scope'
    """
    if path.count(":") != 2:
        parts = [part for part in path.split("/") if part not in ("", ".")]
        return "" if ".." in parts else "/".join(parts)
    unit, prefix, name = path.split(":")
    scope = name if name.endswith(".slice") else f"{prefix}-{name}.scope" if prefix else f"{name}.scope"
    steps = (unit or "system.slice").removesuffix(".slice").split("-")
    slices = ["-".join(steps[:length]) + ".slice" for length in range(1, len(steps) + 1)]
    return "/".join([*slices, scope]) if all(steps) and "/" not in path else ""
