"""Reads what `oci` needs from this host: numbers of device nodes, and CDI files. All functions block: call them in a thread.

Flows in: paths. Flows out: facts for `oci`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from topobus.devicekit.cdi import parse
from topobus.devicekit.oci import CdiFile, HostNode
from topobus.domain.errors import ContractError

__all__ = ["look_up", "read_cdi_files"]


def look_up(paths: Iterable[str]) -> dict[str, HostNode]:
    """Read kind, numbers, mode and owner of device nodes; blocks.

    Shapes: result — path to node; a path that is absent, unreadable or no device node is left out, and `oci_spec` reports it.
    Errors: raises nothing.
    """
    host_nodes: dict[str, HostNode] = {}
    for path in paths:
        try:
            status = Path(path).stat()
        except OSError:
            continue
        kinds = {"c": stat.S_ISCHR, "b": stat.S_ISBLK, "p": stat.S_ISFIFO}
        kind = next((name for name, is_kind in kinds.items() if is_kind(status.st_mode)), None)
        if kind is not None:
            host_nodes[path] = HostNode(
                kind=kind,
                major=os.major(status.st_rdev),
                minor=os.minor(status.st_rdev),
                mode=stat.S_IMODE(status.st_mode),
                uid=status.st_uid,
                gid=status.st_gid,
            )
    return host_nodes


def read_cdi_files(folders: Sequence[Path], pattern: str = "*.json") -> tuple[tuple[CdiFile, ...], tuple[str, ...]]:
    """Read CDI files; a later folder has the higher priority.

    Shapes: result — the files, and a sentence for each one that could not be read: like a runtime, it is left out and the others stay good.
    """
    files: list[CdiFile] = []
    problems: list[str] = []
    for priority, folder in enumerate(folders):
        for path in sorted(folder.glob(pattern)) if folder.is_dir() else ():
            try:
                files.append(CdiFile(path=str(path), spec=parse(path.read_bytes(), where=str(path)), priority=priority))
            except (OSError, ContractError) as err:
                problems.append(str(err))
    return tuple(files), tuple(problems)
