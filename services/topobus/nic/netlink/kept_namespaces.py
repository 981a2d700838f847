"""Keep a pod's network namespace for as long as an interface of ours is in it.

The kernel deletes virtual interfaces with their namespace (and returns hardware under the pod's
name). A pod may end while the gateway, NATS or this service is away, and nobody takes the interface
out in time; so the namespace is bind-mounted to a file of ours before anything moves, and let go
when the interface is home. The mount outlives this process; where mounting is not permitted
(AppArmor's profile for containers), a descriptor keeps the namespace until this process ends.

Flows in: the namespace's path as the runtime tells it, the device's record. Flows out: a path by
which the namespace is found after the runtime has removed its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from topobus.devicekit.device_record import DeviceRecord
from topobus.nic.netlink.identity import boot_id
from topobus.nic.netlink.namespace_mount import mount_namespace, unmount_namespace
from topobus.nic.netlink.places import Places, open_namespace, refused
from topobus.process.logging import get_logger
from topobus.values.outcome import Reason, Refusal

__all__ = ["KEEP", "KeptNamespaces"]

KEEP = "keep"
"""The step's name in a device's record."""


class KeptNamespaces:
    """The namespaces of one process; blocking, each device by one thread at a time."""

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
        # By where it is mounted, for a path may be written in many ways.
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{os.path.realpath(self._places.kept)}/"):
            os.close(descriptor)
            return _not_a_runtimes(namespace)
        # An owner's uid is others' text.
        file = Path(self._places.kept, quote(key, safe="@:"))
        # What the path of the runtime leads to: a path may be another pod's after this one has
        # ended (`/proc/<pid>/ns/net`), and an inode is given again after a reboot.
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
        """Give the path by which the device's namespace is found now: the kept one, else the
        runtime's.

        Empty where that one leads to another namespace by now.
        """
        step = record.step(KEEP)
        if step is None:
            return namespace
        file = str(step.before["file"])
        descriptor = self._descriptors.get(file)
        path = file if descriptor is None else f"/proc/self/fd/{descriptor}"
        kept = open_namespace(self._places, path)
        if isinstance(kept, Refusal):
            # Killed before it was mounted, or rebooted.
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
        """Let a namespace go; none was kept is no error.

        Errors: raises OSError when the file cannot be removed; ask again.
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
    """Refuse a path of our own: whoever asks with it would reach into another pod."""
    return refused(
        Reason(
            code="namespace-gone",
            message=f"network namespace {namespace} is none that a container runtime made",
            facts={"path": namespace},
        )
    )
