"""Caches what was read from a hardware tree, and checks it at each use, so that a poll every second
does not re-read files that did not change.

A recorded tree has file times: a cached answer is valid while the file has the same inode, size and
times (for an absent file and for a link: the folder). The kernel's own files have no meaningful
times, so such a file is kept open and read from its start again. The kernel computes the content
for each read, or answers ENODEV once the device is gone.
Source: Documentation/filesystems/sysfs.rst ("the buffer will always be refreshed"), stat(2),
racy-git.
"""

from __future__ import annotations

import os
import time
from typing import Any

from msgspec import Struct

__all__ = ["OpenFiles", "StampedAnswers"]

# A file system's clock ticks at most every 10 ms (CONFIG_HZ 100): what changed so shortly before it
# was read may change again under the same time.
_FRESH_NS = 50_000_000
# Well below the 1,024 descriptors that a process may have by default, and more than the health
# files of all cards of a large node.
_MOST_FILES = 384
# The names that a look reads change with the devices. A file that was not read for so long may be
# closed in favour of others.
_OPEN_FOR_S = 60.0
_READ_BYTES = 64 * 1024


class _Answer(Struct, frozen=True):
    at: str
    stamp: tuple[int, ...]
    value: Any


class StampedAnswers:
    """Answers by kind of question and path."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], _Answer] = {}

    def find(self, kind: str, path: str, stamps: dict[str, tuple[int, ...]] | None = None) -> _Answer | None:
        """Give the answer if it still holds.

        Cost: one stat; none for a file or folder that is in `stamps`, where one look at many files
        keeps what it has seen.
        """
        answer = self._answers.get((kind, path))
        if answer is None:
            return None
        stamp = stamps.get(answer.at) if stamps is not None else None
        try:
            if stamp is None:
                stamp = _stamp(os.stat(answer.at))  # noqa: PTH116 - asked for hundreds of files a second
            if stamps is not None:
                stamps[answer.at] = stamp
            if stamp == answer.stamp:
                return answer
        except OSError:
            pass
        self._answers.pop((kind, path), None)
        return None

    def keep(self, kind: str, path: str, value: object, *, at: str, real: str, began_ns: int) -> None:
        """Keep an answer, unless its file is so fresh that a next change could not be detected.

        `at`: the file or folder whose times prove it, by the requested path. `real`: the same with
        all links resolved inside the tree. Where the two are not the same file, the system would
        follow a link out of the tree, and the answer is not kept. `began_ns`: when it was read, by
        the system's clock.
        """
        try:
            stat, resolved = os.stat(at), os.stat(real)  # noqa: PTH116
        except OSError:
            return
        if (stat.st_dev, stat.st_ino) != (resolved.st_dev, resolved.st_ino):
            return
        if max(stat.st_mtime_ns, stat.st_ctime_ns) < began_ns - _FRESH_NS:
            self._answers[kind, path] = _Answer(at, _stamp(stat), value)


class OpenFiles:
    """Kernel files that stay open between two looks."""

    def __init__(self) -> None:
        self._files: dict[str, _OpenFile] = {}

    def read(self, path: str) -> bytes | None:
        """Read a kept file again.

        None when it is not kept (any more). Open it by its name then, which raises the reason.
        """
        file = self._files.get(path)
        if file is None:
            return None
        if time.monotonic() < file.until_s:
            try:
                # A name may lead to another file by now although the old one still exists:
                # interfaces that were renamed, or moved into a pod's network.
                if os.stat(path).st_ino == file.inode:  # noqa: PTH116 - asked for hundreds of files a second
                    return os.pread(file.descriptor, _READ_BYTES, 0)
            except OSError:
                pass
        self._files.pop(path, None)
        return None

    def keep(self, path: str, descriptor: int) -> bool:
        """Take over a descriptor. False when there are too many: it stays the caller's."""
        if len(self._files) >= _MOST_FILES:
            # A file that was not read within its time belongs to a device that is gone, and nothing
            # else would ever close it.
            now_s = time.monotonic()
            for old, file in list(self._files.items()):
                if file.until_s <= now_s:
                    self._files.pop(old, None)
            if len(self._files) >= _MOST_FILES:
                return False
        self._files[path] = _OpenFile(descriptor, os.fstat(descriptor).st_ino, time.monotonic() + _OPEN_FOR_S)
        return True


class _OpenFile:
    """Closes its descriptor with its last reference, because another thread may be reading when it
    is dropped.
    """

    def __init__(self, descriptor: int, inode: int, until_s: float) -> None:
        self.descriptor = descriptor
        self.inode = inode
        self.until_s = until_s

    def __del__(self) -> None:
        os.close(self.descriptor)


def _stamp(stat: os.stat_result) -> tuple[int, ...]:
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
