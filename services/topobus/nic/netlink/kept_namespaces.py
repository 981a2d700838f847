"""Keeps a pod's network namespace as long as an interface of ours is in it.

The kernel deletes virtual interfaces with their namespace (and returns hardware under the pod's
name). A pod may end while the gateway, NATS or this service is away, and then its interface is not
taken out in time. So the namespace is bind-mounted to a file of ours before anything moves, and
released when the interface is back. The mount survives this process. Where mounting is not
permitted (AppArmor's profile for containers), a descriptor keeps the namespace until this process
ends.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from topobus.devicekit.device_record import DeviceRecord
from topobus.nic.netlink.identity import boot_id
from topobus.nic.netlink.places import Places, open_namespace
from topobus.process.logging import get_logger
from topobus.values.outcome import Refusal, refuse

__all__ = ["KEEP", "KeptNamespaces", "mount_namespace", "unmount_namespace"]

KEEP = "keep"
"""The step's name in a device's record."""
# sys/mount.h
_MS_BIND = 0x1000
_MNT_DETACH = 2


class KeptNamespaces:
    """The namespaces of one process. All calls block, with one thread at a time for each device."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._descriptors: dict[str, int] = {}
        """Where mounting is not permitted: what keeps a namespace, by its file."""
        self._has_warned = False

    def keep(self, namespace: str, record: DeviceRecord, key: str) -> Refusal | None:
        """Keep a namespace under a name of the device and its owner.

        Errors: refuses what `open_namespace` refuses.
        """
        if namespace.startswith(("/proc/self/", "/proc/thread-self/", f"/proc/{os.getpid()}/")):
            return _not_a_runtimes(namespace)
        descriptor = open_namespace(self._places, namespace)
        if isinstance(descriptor, Refusal):
            return descriptor
        # Compare where it is mounted, because a path may be written in many ways.
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{os.path.realpath(self._places.kept)}/"):
            os.close(descriptor)
            return _not_a_runtimes(namespace)
        # An owner's uid is text from outside.
        file = Path(self._places.kept, quote(key, safe="@:"))
        # Record the namespace that the runtime's path leads to: after this pod has ended the path
        # may lead to another pod's (`/proc/<pid>/ns/net`), and an inode is used again after a
        # reboot.
        record.intend(KEEP, {"file": str(file), "inode": os.fstat(descriptor).st_ino, "boot_id": boot_id(self._places)})
        try:
            mount_namespace(f"/proc/self/fd/{descriptor}", file)
        except OSError as err:
            self._descriptors[str(file)] = os.dup(descriptor)
            if not self._has_warned:
                self._has_warned = True
                get_logger().warning(
                    "namespace.not-mounted",
                    file=str(file),
                    error=f"{err.strerror or err}",
                    consequence="a virtual interface is lost if its pod ends while this service is away",
                    next_step="permit mounting (AppArmor: unconfined) and a writable interfaces.kept_namespaces_dir",
                )
        finally:
            os.close(descriptor)
        record.done(KEEP)
        return None

    def open(self, namespace: str, record: DeviceRecord) -> str:
        """Return the path by which the device's namespace is found now: the kept one, else the
        runtime's.

        Empty where the runtime's path leads to another namespace by now.
        """
        step = record.step(KEEP)
        if step is None:
            return namespace
        file = str(step.before["file"])
        descriptor = self._descriptors.get(file)
        path = file if descriptor is None else f"/proc/self/fd/{descriptor}"
        kept = open_namespace(self._places, path)
        if isinstance(kept, Refusal):
            # The service was killed before it was mounted, or the node was rebooted.
            return namespace if self._is_still(namespace, step.before) else ""
        os.close(kept)
        return path

    def _is_still(self, namespace: str, before: Mapping[str, Any]) -> bool:
        if before["boot_id"] != boot_id(self._places):
            return False
        descriptor = open_namespace(self._places, namespace)
        if isinstance(descriptor, Refusal):
            return False
        try:
            return bool(before["inode"] == os.fstat(descriptor).st_ino)
        finally:
            os.close(descriptor)

    def let_go(self, record: DeviceRecord) -> None:
        """Release a namespace. It is no error when none was kept.

        Errors: raises OSError when the file cannot be removed; the caller repeats the call.
        """
        step = record.step(KEEP)
        if step is None:
            return
        file = str(step.before["file"])
        descriptor = self._descriptors.pop(file, None)
        if descriptor is not None:
            os.close(descriptor)
        unmount_namespace(Path(file))
        with suppress(FileNotFoundError):
            Path(file).unlink()
        record.undone(KEEP)


def _not_a_runtimes(namespace: str) -> Refusal:
    """Refuse a path of our own: a request with it would reach into another pod."""
    return refuse(
        "namespace-gone", f"network namespace {namespace} is none that a container runtime made", path=namespace
    )


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
