"""Kernel events: a device or CPU was added, removed or changed.

An event only triggers another read of the tree. Its content is not used as state.

The NETLINK_KOBJECT_UEVENT socket is used for a kernel's own tree only, wherever it is mounted. It
needs no right. A recorded machine sends none. In a network namespace other than the host's the
kernel sends those of PCI functions, graphics and CPUs alike, and of network interfaces its own
alone. In a user namespace of its own it sends nothing. The regular polls detect what is not sent.
Source: netlink(7), lib/kobject_uevent.c of the Linux kernel (uevent_net_broadcast_untagged); tried
on Linux 6.18 as another user in a new network namespace.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from types import TracebackType
from typing import Self

from msgspec import Struct

from topobus.sysfs.tree import Tree

__all__ = ["Uevent", "UeventSource", "UeventsUnavailable", "open_uevents", "parse_uevent"]

_NETLINK_KOBJECT_UEVENT = 15
# Group 1 is the kernel's own, group 2 udev's.
_KERNEL_GROUP = 1
# Every process with the right may send to the group. The kernel's port is 0.
_KERNEL_PORT = 0
# The kernel's own limit (UEVENT_BUFFER_SIZE) is 2 KiB and a header; room for one that grows.
_MAX_BYTES = 16 * 1024
# A hot-plugged card sends hundreds of events. Those that do not fit are reported as `is_lost`.
_BUFFER_BYTES = 1024 * 1024


class Uevent(Struct, frozen=True, kw_only=True):
    """One event.

    `path` is the device's folder below sys (`/devices/pci0000:15/…`). `is_lost` marks that events
    were missed.
    """

    action: str
    path: str = ""
    subsystem: str = ""
    wedged: str = ""
    """What a graphics driver that gave its device up asks for: `rebind,bus-reset`, `unknown`;
    `none` when it helped itself. Empty: not about that."""
    is_lost: bool = False


_LOST = Uevent(action="change", is_lost=True)


class UeventsUnavailable(Struct, frozen=True, kw_only=True):
    """Why there are no events here."""

    reason: str


class UeventSource:
    """Receives events until closed."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def pending(self) -> list[Uevent]:
        """Take the events that arrived since the last call, without waiting.

        Errors: raises OSError when the socket breaks for good.
        """
        events: list[Uevent] = []
        while True:
            try:
                data, sender = self._channel.recvfrom(_MAX_BYTES)
            except BlockingIOError:
                return events
            except OSError as err:
                if err.errno != errno.ENOBUFS:
                    raise
                events.append(_LOST)
                continue
            if sender[0] == _KERNEL_PORT and (event := parse_uevent(data)) is not None:
                events.append(event)

    async def next(self) -> Uevent:
        """Wait for the kernel's next event.

        Errors: raises OSError when the socket breaks for good.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                data, sender = await loop.sock_recvfrom(self._channel, _MAX_BYTES)
            except OSError as err:
                if err.errno == errno.ENOBUFS:
                    return _LOST
                raise
            if sender[0] == _KERNEL_PORT and (event := parse_uevent(data)) is not None:
                return event


def open_uevents(tree: Tree) -> UeventSource | UeventsUnavailable:
    """Open the kernel's uevent socket.

    Shapes: result — a source to be closed by the caller; UeventsUnavailable with the reason for a
    recorded tree, or where the kernel gives no such socket.
    Errors: raises nothing.
    Source: netlink(7), NETLINK_KOBJECT_UEVENT.
    """
    if tree.is_recorded:
        return UeventsUnavailable(reason=f"{tree.root} is a recorded tree")
    try:
        channel = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_KOBJECT_UEVENT)
    except OSError as err:
        return UeventsUnavailable(reason=f"no uevent socket: {os.strerror(err.errno or 0)}")
    try:
        channel.settimeout(0.0)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        channel.bind((0, _KERNEL_GROUP))
    except OSError as err:
        channel.close()
        return UeventsUnavailable(reason=f"cannot listen to uevents: {os.strerror(err.errno or 0)}")
    return UeventSource(channel)


def parse_uevent(data: bytes) -> Uevent | None:
    r"""Read one message of the kernel's: `ACTION@PATH`, then `KEY=value` fields, each ended by a
    NUL. None for anything else.

    >>> parse_uevent(b"remove@/devices/pci0000:15/0000:15:01.0\0ACTION=remove\0SUBSYSTEM=pci\0").subsystem
    'pci'
    """
    head, *fields = data.decode("utf-8", errors="replace").split("\0")
    action, at, path = head.partition("@")
    if not at or not action.isalpha() or not path.startswith("/"):
        return None
    values = dict(field.split("=", 1) for field in fields if "=" in field)
    return Uevent(action=action, path=path, subsystem=values.get("SUBSYSTEM", ""), wedged=values.get("WEDGED", ""))
