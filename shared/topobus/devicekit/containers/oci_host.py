"""Reads what `oci` needs from this host: numbers of device nodes, and CDI files.

All functions block: call them in a thread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from topobus.formats.containers.cdi import CdiSpec, read_value
from topobus.formats.containers.oci import CdiFile, HostNode
from topobus.sysfs.regular_file import read_regular
from topobus.values.errors import ContractError

__all__ = ["look_up", "read_cdi_files"]

_ENDINGS = (".json", ".yaml")
# A file of NVIDIA's for sixteen GPUs has some 100 KB.
_MOST_BYTES = 16 << 20


def look_up(paths: Iterable[str]) -> dict[str, HostNode]:
    """Read kind, numbers, mode and owner of device nodes.

    Shapes: result — path to node; a path that is absent, unreadable or no device node is left out,
    and `oci_spec` reports it.
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


def read_cdi_files(folders: Sequence[Path]) -> tuple[tuple[CdiFile, ...], tuple[str, ...]]:
    """Read CDI files as runtimes do, `*.json` and `*.yaml`. A later folder has the higher priority.

    Shapes: result — the files, and a sentence for each one that could not be read or that has
    another ending: like a runtime, it is left out and the others stay valid. Folders and hidden
    files are ignored.
    Source: CDI pkg/cdi/spec-dirs.go. Both endings are read as YAML there, of which JSON is a part.
    """
    files: list[CdiFile] = []
    problems: list[str] = []
    for priority, folder in enumerate(folders):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_dir() or path.name.startswith("."):
                continue
            if path.suffix not in _ENDINGS:
                problems.append(
                    f"{path} was not looked at: container runtimes read only files that end in {' or '.join(_ENDINGS)}"
                )
                continue
            try:
                files.append(CdiFile(path=str(path), spec=_read(path), priority=priority))
            except ContractError as err:
                problems.append(err.message)
            except OSError as err:
                problems.append(f"{path} cannot be read: {err.strerror}")
    return tuple(files), tuple(problems)


def _read(path: Path) -> CdiSpec:
    data = read_regular(path, _MOST_BYTES)
    try:
        # Nearly all JSON, and every file of our own, is read a hundred times faster this way.
        value = msgspec.json.decode(data) if path.suffix == ".json" else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = None
    if value is None:
        # Imported here: it costs megabytes in every gateway, and few meet such a file.
        from topobus.formats.containers.cdi_yaml import read_yaml

        value = read_yaml(data, str(path))
    return read_value(value, where=str(path))
