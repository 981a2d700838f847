"""Small trees for the readers' tests, written from a few words."""

from __future__ import annotations

import os
from pathlib import Path

from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.drivers.driver_contract import files_below
from topobus.values.idset import CpuSet

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"


def write(root: Path, files: dict[str, object]) -> Tree:
    """Write files below a root and give the tree."""
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, bytes):
            file.write_bytes(text)
        else:
            file.write_text(f"{text}\n")
    return Tree(HardwareSettings(root=str(root)))


def contents(root: Path) -> dict[str, bytes | str]:
    """Take all files and links of a tree, for comparison."""
    return {
        entry.path: os.readlink(entry.path) if entry.is_symlink() else Path(entry.path).read_bytes()
        for entry in files_below(root)
        if entry.is_symlink() or entry.is_file(follow_symlinks=False)
    }


def mask(*cpus: int) -> str:
    """Write CPUs as a mask of one word."""
    return f"{CpuSet(*cpus).bits:08x}"


def cpu_files(cpus: int = 4, *, threads: int = 1, sockets: int = 1, is_old: bool = False) -> dict[str, object]:
    """Describe CPUs numbered core by core, socket by socket; `is_old`: with the file names and
    masks of kernels before 4.20.
    """
    files: dict[str, object] = {f"{CPU}/online": f"0-{cpus - 1}", "proc/meminfo": "MemTotal:  1024 kB"}
    for cpu in range(cpus):
        core = [index for index in range(cpus) if index // threads == cpu // threads]
        width = cpus // sockets
        socket = [index for index in range(cpus) if index // width == cpu // width]
        topology = f"{CPU}/cpu{cpu}/topology"
        files[f"{topology}/core_id"] = cpu // threads
        files[f"{topology}/physical_package_id"] = cpu // width
        files[f"{topology}/{'thread_siblings' if is_old else 'core_cpus'}"] = mask(*core)
        files[f"{topology}/{'core_siblings' if is_old else 'package_cpus'}"] = mask(*socket)
    return files


def node_files(node: int, cpus: tuple[int, ...], *, distance: str = "", memory_kib: int = 1024) -> dict[str, object]:
    """Describe a NUMA node."""
    folder = f"{NODE}/node{node}"
    files: dict[str, object] = {
        f"{folder}/cpumap": mask(*cpus),
        f"{folder}/meminfo": f"Node {node} MemTotal:  {memory_kib} kB",
    }
    if distance:
        files[f"{folder}/distance"] = distance
    return files
