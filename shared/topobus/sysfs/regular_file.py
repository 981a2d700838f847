"""Opens and reads files that another user may have put there: only regular ones, and no more of
them than requested.

A FIFO would block the reader without end, a device may act when it is opened, and a sparse file of
a few bytes on the disk has any size. Each is an OSError with the reason. All functions block.
Source: open(2) O_NONBLOCK, inode(7).
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["inside_root", "open_regular", "read_all", "read_regular"]

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
# Linux gives up after as many links (MAXSYMLINKS, include/linux/namei.h).
_MAX_LINKS = 40
_PART_BYTES = 64 * 1024


def inside_root(root: Path, path: str) -> Path:
    """Return the file of a path below a root with all links resolved as in a container of that
    root: absolute ones begin there, and ".." never leads out.

    Errors: raises OSError ELOOP for too many links.
    """
    at, left, links = root, [part for part in reversed(path.split("/")) if part not in ("", ".")], 0
    while left:
        part = left.pop()
        if part == "..":
            at = at.parent if at != root else root
            continue
        try:
            target = os.readlink(at / part)
        except OSError:
            at /= part
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        at = root if target.startswith("/") else at
        left += [step for step in reversed(target.split("/")) if step not in ("", ".")]
    return at


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading. The caller closes the descriptor.

    Errors: raises OSError: as open(2) does, IsADirectoryError, and EMEDIUMTYPE for a file that is
    not regular, an error that no kernel file gives.
    """
    # Looked at before it is opened: a device may act on being opened. And after:
    # another one may have taken its name.
    _refuse_others(os.stat(path), path)  # noqa: PTH116 - asked for every file of a recorded tree
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _refuse_others(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Read a whole regular file.

    Errors: raises OSError as `open_regular` does, and EFBIG for a file of more than `limit` bytes.
    """
    descriptor = open_regular(path)
    try:
        if os.fstat(descriptor).st_size > limit:
            raise _too_large(path, limit)
        return read_all(descriptor, path, limit)
    finally:
        os.close(descriptor)


def read_all(descriptor: int, path: str | os.PathLike[str], limit: int) -> bytes:
    """Read an open file to its end, which may be far beyond its size (the kernel's files have
    none).

    Errors: raises OSError as read(2) does, and EFBIG beyond `limit` bytes.
    """
    data = os.read(descriptor, _PART_BYTES)
    if not (more := os.read(descriptor, _PART_BYTES) if data else b""):
        return data
    parts = [data]
    size = len(data)
    while more:
        parts.append(more)
        size += len(more)
        if size > limit:
            raise _too_large(path, limit)
        more = os.read(descriptor, _PART_BYTES)
    return b"".join(parts)


def _refuse_others(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if kind != stat.S_IFREG:
        raise OSError(
            errno.EMEDIUMTYPE, f"it is {_KINDS.get(kind, 'of an unknown kind')}, wanted a regular file", os.fspath(path)
        )


def _too_large(path: str | os.PathLike[str], limit: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than {limit} bytes", os.fspath(path))
