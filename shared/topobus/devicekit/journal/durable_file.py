"""Writes and deletes single files so that a completed change survives a crash.

All functions block: call them in a thread.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["delete", "remove_leftovers", "write"]


def write(folder: Path, name: str, data: bytes, *, mode: int) -> Path:
    """Write a file so that a reader sees it whole or not at all, and so that it survives a crash
    once this returns.

    The folder is made if it is absent.

    Errors: raises OSError when the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{name}.", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            # mkstemp makes 0600.
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(temporary).rename(folder / name)
    except BaseException as err:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(err, OSError):
            # The error of a full disk has no file name, and our temporary one means nothing to a
            # reader.
            err.filename, err.filename2 = str(folder / name), None
        raise
    _sync_folder(folder)
    return folder / name


def delete(folder: Path, name: str) -> bool:
    """Delete a file durably.

    Shapes: result — whether the file existed.
    Errors: raises OSError for anything but an absent file.
    """
    try:
        (folder / name).unlink()
    except FileNotFoundError:
        return False
    _sync_folder(folder)
    return True


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove the temporary files that a crash during `write` left.

    Shapes: pattern — a glob of file names. Only the one process that writes these names may call
    it: it would delete another's write.
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
