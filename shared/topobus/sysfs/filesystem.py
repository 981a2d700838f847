"""Distinguishes the kernel's file systems (sysfs, procfs) from those on a disk.

A file of sysfs always has the size of a page, one of procfs has size 0, and their times mean
nothing: only reading it shows whether it changed.
Source: statfs(2).
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["is_kernels"]

# linux/magic.h: sysfs and procfs
_KERNELS = frozenset({0x62656572, 0x9FA0})
# struct statfs is 120 bytes where a long has 8, and begins with the type; room for one that grows.
_STATFS_BYTES = 512
_LIBC = ctypes.CDLL(None, use_errno=True)


def is_kernels(folder: str) -> bool:
    """Return whether a folder is on sysfs or procfs, wherever that is mounted.

    False when there is no such folder, and where the system cannot find out.

    >>> is_kernels("/proc"), is_kernels("/absent")
    (True, False)
    """
    ask = getattr(_LIBC, "statfs", None)
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if ask is None or ask(os.fsencode(folder), answer) != 0:
        return False
    # The type is a long on most machines, and an unsigned int on s390x, where a long would include
    # the block size.
    return any(kind.from_buffer(answer).value in _KERNELS for kind in (ctypes.c_ulong, ctypes.c_uint))
