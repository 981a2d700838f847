"""Reads a driver root of the host: names in folders, and where a path really leads, as the
container runtime will find it.

Every link of a path is resolved. A link inside a driver root that is a whole system (a driver
container) is resolved from that root, a link in a plain folder (NixOS, `/usr/local/nvidia`) from
the host's root. Which of the two a root is shows by which path exists.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from topobus.gpu.driver_root.elf import Elf, read_elf
from topobus.sysfs.regular_file import open_regular

__all__ = ["HostFiles"]

_MAX_LINKS = 40


class HostFiles:
    """One driver root.

    What is absent or cannot be read counts as absent, and raises nothing.
    """

    def __init__(self, host_root: str, root: str) -> None:
        """Take the path at which this process sees the host's root folder, and the driver root's
        path on the host.
        """
        self._host = host_root.rstrip("/")
        self.root = f"/{root.strip('/')}"

    def names(self, folder: str) -> tuple[str, ...]:
        """List a folder of the root, sorted, or nothing when it is absent."""
        real = self.real(folder)
        try:
            return tuple(sorted(os.listdir(self._seen(real)))) if real else ()  # noqa: PTH208 - names only
        except OSError:
            return ()

    def real(self, path: str) -> str:
        """Find the path of the host that a path of the root leads to, or "" when it leads to
        nothing.
        """
        done: list[str] = []
        todo = list(reversed([*self.root.split("/"), *path.split("/")]))
        links = 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = done[:-1]
                continue
            here = "/".join(("", *done, part))
            try:
                target = os.readlink(self._seen(here))
            except OSError:
                done.append(part)
                continue
            links += 1
            if links > _MAX_LINKS:
                return ""
            if target.startswith("/"):
                done = []
                inside = f"{self.root.rstrip('/')}{target}"
                target = inside if os.path.lexists(self._seen(inside)) else target
            todo += reversed(target.split("/"))
        text = f"/{'/'.join(done)}"
        return text if os.path.exists(self._seen(text)) else ""  # noqa: PTH110 - a text, as everywhere here

    def host_path(self, path: str) -> str:
        """Return an absolute path of the host with its links resolved, or "" when it does not
        exist.
        """
        return HostFiles(self._host, "/").real(path)

    def is_file(self, real: str) -> bool:
        """Return whether a path of the host is a regular file."""
        return self._has(real, stat.S_ISREG)

    def is_socket(self, real: str) -> bool:
        """Return whether a path of the host is a socket."""
        return self._has(real, stat.S_ISSOCK)

    def elf(self, real: str) -> Elf | None:
        """Read a library's facts, or return None when the file is no library."""
        try:
            descriptor = open_regular(self._seen(real))
        except OSError:
            return None
        try:
            return read_elf(lambda offset, size: os.pread(descriptor, size, offset))
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def stamp(self, folder: str) -> tuple[str, int]:
        """Return a value that changes when a file of a folder comes, goes or is replaced."""
        real = self.real(folder)
        try:
            return real, Path(self._seen(real)).stat().st_mtime_ns if real else 0
        except OSError:
            return real, 0

    def _has(self, real: str, is_kind: Callable[[int], bool]) -> bool:
        try:
            return bool(real) and is_kind(Path(self._seen(real)).stat().st_mode)
        except OSError:
            return False

    def _seen(self, path: str) -> str:
        return f"{self._host}{path}"
