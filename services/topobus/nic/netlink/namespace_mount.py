"""Mounts a network namespace over a file, so that it outlives its processes, and unmounts it again.

All calls block and need CAP_SYS_ADMIN.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = ["mount_namespace", "unmount_namespace"]

# sys/mount.h
_MS_BIND = 0x1000
_MNT_DETACH = 2


def mount_namespace(source: str, file: Path) -> None:
    """Mount the namespace at `source` (a path below /proc) over a file, in place of all that is
    mounted there.

    The file is made when it does not exist.

    Errors: raises OSError; the file is then gone.
    """
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # No link is followed: the folder is ours, but this runs as root.
    os.close(os.open(file, os.O_CREAT | os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o400))
    # An earlier run may have left a mount when its journal was lost: two mounts on top of each
    # other would keep the file for good.
    unmount_namespace(file)
    library = ctypes.CDLL(None, use_errno=True)
    if library.mount(source.encode(), os.fsencode(file), None, _MS_BIND, None) != 0:
        error = ctypes.get_errno()
        file.unlink(missing_ok=True)
        raise OSError(error, os.strerror(error), str(file))


def unmount_namespace(file: Path) -> None:
    """Unmount all that is mounted at a file, until nothing is."""
    library = ctypes.CDLL(None, use_errno=True)
    while library.umount2(os.fsencode(file), _MNT_DETACH) == 0:
        pass
