"""Reads files that a user names, with a limit on their size: an endless or special file is an error
instead of exhausted memory or an endless wait.

The path `-` is standard input. A pipe is read where the shell made it for this command (`<(…)`,
/dev/stdin). A FIFO or device named by its path is refused, because opening one may block or change
the device.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from topobus.cli.exits import InputError
from topobus.values.errors import ContractError

__all__ = ["DOCUMENT_BYTES", "MANIFEST_BYTES", "SNAPSHOT_BYTES", "read_bytes", "read_text", "shown_name"]

MANIFEST_BYTES = 1 << 20
"""An API server takes 3 MiB at most. A manifest beyond 1 MiB would not fit a KV value either."""
DOCUMENT_BYTES = 16 << 20
"""A decision, or an OCI spec: NATS takes 1 MiB per message, and runc reads specs of some hundred
KiB."""
SNAPSHOT_BYTES = 256 << 20
"""A machine with its devices: some KiB per CPU and device."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device file"),
    (stat.S_ISBLK, "a device file"),
    (stat.S_ISSOCK, "a socket"),
)
# A Path has collapsed a URL's double slash.
_URL = re.compile(r"(https?|ftp):/+(.*)")
# The paths that shells pass for `<(…)` and `<file`.
_HANDED_OVER = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")


def shown_name(path: Path) -> str:
    """Name an input for people."""
    return "standard input" if str(path) == "-" else str(path)


def read_bytes(path: Path, *, limit_bytes: int, next_step: str) -> bytes:
    """Read a whole file, or standard input for `-`.

    Errors: raises InputError for what cannot be read or is no file, ContractError for more than
    `limit_bytes`. Never more than that is in memory.
    """
    where = shown_name(path)
    if (url := _URL.match(str(path))) is not None:
        text = f"{url[1]}://{url[2]}"
        raise InputError(
            f"cannot read {text}: URLs are not read",
            next_step=f"fetch it, and look at it: curl -fsSL {text} -o manifest.yaml",
        )
    try:
        if str(path) == "-":
            return _bounded(sys.stdin.buffer, where, limit_bytes)
        is_handed_over = str(path).startswith(_HANDED_OVER)
        # Without O_NONBLOCK the opening of a FIFO waits for its writer.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if is_handed_over else os.O_NONBLOCK))
        try:
            mode = os.fstat(handle).st_mode
            kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "")
            if kind and not (is_handed_over and stat.S_ISFIFO(mode)):
                raise InputError(f"cannot read {where}: it is {kind}, wanted a file", next_step=next_step)
            with open(handle, "rb", closefd=False) as file:
                return _bounded(file, where, limit_bytes)
        finally:
            os.close(handle)
    except OSError as err:
        raise InputError(f"cannot read {where}: {err.strerror}", next_step=next_step) from err


def read_text(path: Path, *, limit_bytes: int, next_step: str) -> str:
    """Read a whole text.

    Errors: as `read_bytes`, and ContractError for invalid UTF-8, with its line.
    """
    data = read_bytes(path, limit_bytes=limit_bytes, next_step=next_step)
    try:
        return data.decode()
    except UnicodeDecodeError as err:
        line = data.count(b"\n", 0, err.start) + 1
        raise ContractError(
            f"{shown_name(path)}, line {line}: this is not text: {err.reason} at byte {err.start}",
            next_step="give a YAML or JSON manifest",
        ) from err


def _bounded(file: BinaryIO, where: str, limit_bytes: int) -> bytes:
    data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise ContractError(
            f"{where}: it has more than {limit_bytes} bytes", next_step="give a smaller file, or several"
        )
    return data
