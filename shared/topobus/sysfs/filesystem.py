"""Which file system a folder lies on: the kernel's own files say less about themselves than a disk's do.

A file of sysfs always has the size of a page and a time that means nothing: only to read it tells whether it changed. Source: statfs(2).
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["is_sysfs"]

# linux/magic.h
_SYSFS_MAGIC = 0x62656572
# struct statfs is 120 bytes where a long has 8, and begins with the type; room for one that grows.
_STATFS_BYTES = 512
_LIBC = ctypes.CDLL(None, use_errno=True)


def is_sysfs(folder: str) -> bool:
    """Say whether a folder lies on sysfs, wherever that is mounted; False when there is no such folder, and where the system cannot say.

    >>> is_sysfs("/proc")
    False
    """
    ask = getattr(_LIBC, "statfs", None)
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if ask is None or ask(os.fsencode(folder), answer) != 0:
        return False
    return ctypes.c_ulong.from_buffer(answer).value == _SYSFS_MAGIC
