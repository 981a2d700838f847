"""Reports changes in one folder through inotify: a file was created, removed or written.

Wake-ups come through the event loop. A folder in which nothing happens costs no thread and no
timer. A wake-up does not name the change: the receiver reads the folder. Source: inotify(7).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from pathlib import Path
from typing import Self

__all__ = ["FolderEvents"]

# sys/inotify.h
_IN_ATTRIB = 0x4
_IN_CLOSE_WRITE = 0x8
_IN_MOVED_FROM, _IN_MOVED_TO = 0x40, 0x80
_IN_CREATE, _IN_DELETE = 0x100, 0x200
_IN_DELETE_SELF, _IN_MOVE_SELF = 0x400, 0x800
_IN_UNMOUNT, _IN_IGNORED = 0x2000, 0x8000
_IN_ONLYDIR = 0x1000000
_WANTED = (
    _IN_ATTRIB
    | _IN_CLOSE_WRITE
    | _IN_MOVED_FROM
    | _IN_MOVED_TO
    | _IN_CREATE
    | _IN_DELETE
    | _IN_DELETE_SELF
    | _IN_MOVE_SELF
    | _IN_ONLYDIR
)
_GONE = _IN_DELETE_SELF | _IN_MOVE_SELF | _IN_UNMOUNT | _IN_IGNORED
# struct inotify_event: watch, mask, cookie, length of the name that follows.
_HEAD = struct.Struct("iIII")
_READ_BYTES = 64 * 1024
# Changes come in bursts (a file is made, written, renamed); one
# wake-up for those of so many seconds.
_SETTLE_S = 0.01
_LIBC = ctypes.CDLL(None, use_errno=True)


class FolderEvents:
    """Listens to one folder until closed.

    Changes between `__init__` and the first `next` are not missed.

    Cost: one inotify instance and one watch of the system's, and a wake-up for each burst
    of changes. Source: inotify(7).
    """

    def __init__(self, folder: Path, *, suffix: str = "") -> None:
        """Begin to listen; a change of a name that does not end with `suffix` is no news.

        Errors: raises OSError when the path is no folder, or the system has no watch left
        (fs.inotify.max_user_watches).
        """
        self._suffix = os.fsencode(suffix)
        self._is_there, self._is_news = True, False
        self._channel = _checked(_LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), folder)
        try:
            _checked(_LIBC.inotify_add_watch(self._channel, os.fsencode(folder), _WANTED), folder)
        except OSError:
            os.close(self._channel)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._channel)

    async def next(self) -> bool:
        """Wait until something in the folder has changed.

        False when the folder itself is gone, and nothing comes any more. A cancelled wait loses
        nothing.
        """
        if not self._is_news:
            loop = asyncio.get_running_loop()
            came: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self._channel, self._notice, came)
            try:
                await came
            finally:
                loop.remove_reader(self._channel)
        await asyncio.sleep(_SETTLE_S)
        self._take()
        self._is_news = False
        return self._is_there

    def _notice(self, came: asyncio.Future[None]) -> None:
        self._take()
        if self._is_news and not came.done():
            came.set_result(None)

    def _take(self) -> None:
        try:
            data = os.read(self._channel, _READ_BYTES)
        except BlockingIOError:
            return
        at = 0
        while at < len(data):
            _, mask, _, length = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            name = data[at : at + length].rstrip(b"\0")
            at += length
            self._is_there = self._is_there and not mask & _GONE
            # What has no name is about the folder itself.
            self._is_news = self._is_news or not name or name.endswith(self._suffix)


def _checked(result: int, folder: Path) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))
    return result
