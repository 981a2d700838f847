"""Reads and writes files of a container's root from outside, and never leaves the root.

Paths are those of the container. This code runs as root on the host, and an image may have a link
at any place. So every link is read and followed here, step by step from the root, and each step is
opened without following links. Magic links of /proc are read as text like all others.
Source: openat(2), O_NOFOLLOW; path_resolution(7).
"""

from __future__ import annotations

import errno
import os
import stat
from types import TracebackType
from typing import Self

__all__ = ["ContainerRoot"]

# Linux follows at most as many (MAXSYMLINKS, include/linux/namei.h).
_MAX_LINKS = 40
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe or a device in the place of a file must not block the reader.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ContainerRoot:
    """The root folder of a container, used in a `with` block.

    Errors: methods raise OSError for what is absent or of the wrong kind.
    """

    def __init__(self, path: str) -> None:
        """Open the folder."""
        self._root = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        """Return the root itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        os.close(self._root)

    def read(self, path: str, limit: int, offset: int = 0) -> bytes:
        """Read a part of a regular file."""
        handle = self._open(path, _READ)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(errno.EINVAL, "no regular file", path)
            return os.pread(handle, limit, offset)
        finally:
            os.close(handle)

    def names(self, folder: str) -> tuple[str, ...]:
        """List a folder, or nothing when it is absent."""
        try:
            handle = self._open(folder, _READ | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            return ()
        try:
            return tuple(sorted(os.listdir(handle)))  # noqa: PTH208 - of a descriptor
        finally:
            os.close(handle)

    def exists(self, path: str) -> bool:
        """Return whether a path leads to something."""
        try:
            os.close(self._open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))
        except OSError:
            return False
        return True

    def write(self, folder: str, name: str, data: bytes) -> None:
        """Replace what is at a path by a file, a link included.

        The folder is made when it is missing.
        """
        handle = self._open_or_make(folder)
        temporary = f".{name}.topobus"
        try:
            try:
                os.unlink(temporary, dir_fd=handle)
            except FileNotFoundError:
                pass
            descriptor = os.open(
                temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=handle
            )
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                os.fchmod(descriptor, 0o644)
            os.rename(temporary, name, src_dir_fd=handle, dst_dir_fd=handle)
        finally:
            os.close(handle)

    def _open_or_make(self, folder: str) -> int:
        try:
            return self._open(folder, _STEP)
        except FileNotFoundError:
            parent, _, name = folder.rstrip("/").rpartition("/")
            above = self._open_or_make(parent) if parent else os.dup(self._root)
            try:
                os.mkdir(name, 0o755, dir_fd=above)
                return os.open(name, _STEP, dir_fd=above)
            finally:
                os.close(above)

    def _open(self, path: str, flags: int) -> int:
        """Open what a path leads to inside the root."""
        steps = [os.dup(self._root)]
        parts = _parts(path)
        links = 0
        try:
            while parts:
                part = parts.pop()
                if part == "..":
                    if len(steps) > 1:
                        os.close(steps.pop())
                    continue
                target = _link(part, steps[-1])
                if target is None:
                    last = not parts
                    handle = os.open(part, flags if last else _STEP, dir_fd=steps[-1])
                    if last:
                        return handle
                    steps.append(handle)
                    continue
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                if target.startswith("/"):
                    while len(steps) > 1:
                        os.close(steps.pop())
                parts += _parts(target)
            # The path ended in "..", or was the root.
            return os.open(".", flags, dir_fd=steps[-1])
        finally:
            for step in steps:
                os.close(step)


def _parts(path: str) -> list[str]:
    """List the parts of a path, the last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _link(name: str, folder: int) -> str | None:
    """Read a link, or return None for anything else."""
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError as err:
        if err.errno == errno.EINVAL:
            return None
        raise
