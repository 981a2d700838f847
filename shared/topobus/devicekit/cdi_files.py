"""Writes CDI files to disk: atomically, and durable across a crash.

Flows in: bytes that `cdi` rendered. Flows out: files in the folder that the container runtime watches. All functions block: call them in a thread.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["check_writable", "delete", "find_files", "remove_leftovers", "restore_files", "write", "write_missing"]


def write(folder: Path, name: str, data: bytes) -> Path:
    """Write a file so that a runtime sees it whole or not at all, and so that it survives a crash once this returns.

    Errors: raises OSError when the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Runtimes read *.json and *.yaml only, so the temporary name is never taken for a file.
    handle, temporary = tempfile.mkstemp(prefix=f".{name}.", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            # mkstemp makes 0600; a runtime may run as another user.
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        Path(temporary).rename(folder / name)
    except BaseException as err:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(err, OSError):
            # A full disk does not say for which file, and nobody knows our temporary one.
            err.filename, err.filename2 = str(folder / name), None
        raise
    _sync_folder(folder)
    return folder / name


def delete(folder: Path, name: str) -> bool:
    """Delete a CDI file durably; blocks.

    Shapes: result — whether the file existed.
    Errors: raises OSError for anything but an absent file.
    """
    try:
        (folder / name).unlink()
    except FileNotFoundError:
        return False
    _sync_folder(folder)
    return True


def find_files(folder: Path, vendor: str) -> tuple[str, ...]:
    """List the names of a vendor's files that live as long as a claim, and remove half-written ones that a crash left.

    Only files named as `file_name` names them are told: other tools' files are none of ours.
    """
    if not folder.is_dir():
        return ()
    remove_leftovers(folder, f"{vendor}-*")
    return tuple(sorted(path.name for path in folder.glob(f"{vendor}-*_*.json")))


def write_missing(folder: Path, wanted: Mapping[str, bytes]) -> list[str]:
    """Write the files that are not there, or are not as they should be; their names.

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
    """Make a vendor's files that live as long as a claim exactly those; the names of what was written and of what was removed.

    Errors: raises OSError when the folder cannot be written.
    """
    written = write_missing(folder, wanted)
    orphans = [name for name in find_files(folder, vendor) if name not in wanted]
    for name in orphans:
        delete(folder, name)
    return written, orphans


def check_writable(folder: Path, vendor: str) -> None:
    """Make the folder if it is not there, and see whether files can be made in it.

    Errors: raises OSError when not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Named as what `find_files` removes, should we be killed in between.
    handle, probe = tempfile.mkstemp(prefix=f".{vendor}-probe.", suffix=".tmp", dir=folder)
    os.close(handle)
    Path(probe).unlink()


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove the temporary files that a crash during `write` left; blocks.

    Shapes: pattern — a glob of file names as `file_name` makes them. Only the one process that writes these names may call it: it would delete another's write.
    Errors: raises OSError.
    """
    for leftover in folder.glob(f".{pattern}.*.tmp"):
        leftover.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make a rename or unlink survive a crash: the entry lives in the folder, not in the file."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
