"""Checks network namespaces by path: whether one still exists, which one it is, and whether an
interface is in it.

Paths are those that the plugins see. It changes nothing. It blocks, and enters a namespace on its
own thread, which ends afterwards.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from pathlib import Path

__all__ = ["has_interface", "namespace_inode"]

_CLONE_NEWNET = 0x40000000
_OWN = Path("/proc/self/ns/net")


def namespace_inode(path: str) -> int:
    """Return the inode of the network namespace at a path, or 0 when there is none.

    The mount of a namespace that is gone leaves a plain file behind. So the file system is
    compared: all namespaces are on one (nsfs).
    """
    try:
        there, own = Path(path).stat(), _OWN.stat()
    except (OSError, ValueError):
        return 0
    return there.st_ino if there.st_dev == own.st_dev else 0


def has_interface(path: str, interface: str) -> bool | None:
    """Return whether an interface is in the namespace at a path, or None when it cannot be read."""
    answers: list[bool | None] = [None]

    def look() -> None:
        # Only this thread changes its namespace, and it ends right after. os.setns came with Python
        # 3.12.
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            if libc.setns(descriptor, _CLONE_NEWNET) == 0:
                answers[0] = interface in {name for _, name in socket.if_nameindex()}
        except OSError:
            return
        finally:
            os.close(descriptor)

    thread = threading.Thread(target=look, name="cni-look")
    thread.start()
    thread.join()
    return answers[0]
