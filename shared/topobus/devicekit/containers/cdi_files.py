"""Writes CDI files to disk: atomically, and durable across a crash.

`cdi` renders the bytes. The container runtime watches the folder. All functions block: call them in
a thread.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from topobus.devicekit.journal import durable_file
from topobus.devicekit.journal.durable_file import delete, remove_leftovers

__all__ = ["check_writable", "delete", "find_files", "remove_leftovers", "restore_files", "write", "write_missing"]


def write(folder: Path, name: str, data: bytes) -> Path:
    """Write a file so that a runtime sees it whole or not at all, and so that it survives a crash
    once this returns.

    Errors: raises OSError when the folder cannot be written.
    """
    # Runtimes read *.json and *.yaml only, so the temporary name is never taken for a file; and a
    # runtime may run as another user.
    return durable_file.write(folder, name, data, mode=0o644)


def find_files(folder: Path, vendor: str) -> tuple[str, ...]:
    """List the names of a vendor's files for claims, and remove half-written ones that a crash
    left.

    Only files named as `file_name` names them are listed, because the others belong to other tools.
    """
    if not folder.is_dir():
        return ()
    remove_leftovers(folder, f"{vendor}-*")
    return tuple(sorted(path.name for path in folder.glob(f"{vendor}-*_*.json")))


def write_missing(folder: Path, wanted: Mapping[str, bytes]) -> list[str]:
    """Write the files that are absent or differ, and return their names.

    Errors: raises OSError when the folder cannot be written.
    """
    written: list[str] = []
    for name, data in sorted(wanted.items()):
        path = folder / name
        if not path.is_file() or path.read_bytes() != data:
            write(folder, name, data)
            written.append(name)
    return written


def restore_files(folder: Path, vendor: str, wanted: Mapping[str, bytes]) -> tuple[list[str], list[str]]:
    """Make a vendor's files for claims exactly those.

    Return the names of the written and of the removed ones.

    Errors: raises OSError when the folder cannot be written.
    """
    written = write_missing(folder, wanted)
    orphans = [name for name in find_files(folder, vendor) if name not in wanted]
    for name in orphans:
        delete(folder, name)
    return written, orphans


def check_writable(folder: Path, vendor: str) -> None:
    """Make the folder if it is absent, and check that files can be made in it.

    Errors: raises OSError when not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Named like the files that `find_files` removes, in case we are killed in between.
    handle, probe = tempfile.mkstemp(prefix=f".{vendor}-probe.", suffix=".tmp", dir=folder)
    os.close(handle)
    Path(probe).unlink()
