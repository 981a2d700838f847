"""Kernel events: what is one, and what happens where there are none."""

from __future__ import annotations

import socket
from pathlib import Path

from support.sysfs_trees import write
from topobus.sysfs.uevent import UeventSource, UeventsUnavailable, open_uevents, parse_uevent


def test_parse_uevent_reads_action_path_and_subsystem_when_the_kernel_sends() -> None:
    """A message of the kernel's is an action, a path and fields."""
    event = parse_uevent(
        b"offline@/devices/system/cpu/cpu3\0ACTION=offline\0DEVPATH=/devices/system/cpu/cpu3\0SUBSYSTEM=cpu\0SEQNUM=4\0"
    )

    assert event is not None
    assert (event.action, event.path, event.subsystem) == ("offline", "/devices/system/cpu/cpu3", "cpu")


def test_parse_uevent_gives_none_when_udev_or_garbage_speaks() -> None:
    """Udev's own messages (another format) and garbage are no events."""
    assert parse_uevent(b"libudev\0\xfe\xed\xca\xfe") is None
    assert parse_uevent(b"") is None
    assert parse_uevent(b"\xff@\xff") is None


def test_open_uevents_says_why_when_the_tree_is_recorded(tmp_path: Path) -> None:
    """A recorded tree has no events: the answer is a reason, not an error."""
    answer = open_uevents(write(tmp_path, {"sys/x": ""}))

    assert isinstance(answer, UeventsUnavailable)
    assert str(tmp_path) in answer.reason


async def test_uevent_source_skips_what_others_send_when_waiting() -> None:
    """Only messages of the kernel's own port (0) count.

    Here a stand-in socket gives one of each.
    """
    ours, sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.settimeout(0.0)

    class FromKernel(socket.socket):
        """Tells senders as netlink does: the first message from a process, the second from the
        kernel.
        """

        senders = iter(((4711, 1), (0, 1)))

        def recvfrom(self, *args: int) -> tuple[bytes, tuple[int, int]]:  # type: ignore[override]
            data, _ = super().recvfrom(*args)
            return data, next(self.senders)

    channel = FromKernel(fileno=ours.detach())
    sock.send(b"add@/devices/forged\0SUBSYSTEM=pci\0")
    sock.send(b"remove@/devices/real\0SUBSYSTEM=pci\0")
    with sock, UeventSource(channel) as source:
        event = await source.next()

    assert event.path == "/devices/real"


def test_uevent_source_gives_what_is_pending_without_waiting() -> None:
    """All that arrived, the kernel's own alone, and nothing when nothing did."""
    ours, sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.settimeout(0.0)

    class FromKernel(socket.socket):
        """Tells senders as netlink does: the first message from a process, the others from the
        kernel.
        """

        senders = iter(((4711, 1), (0, 1), (0, 1)))

        def recvfrom(self, *args: int) -> tuple[bytes, tuple[int, int]]:  # type: ignore[override]
            data, _ = super().recvfrom(*args)
            return data, next(self.senders)

    channel = FromKernel(fileno=ours.detach())
    channel.settimeout(0.0)
    card = "/devices/pci0000:00/0000:03:00.0/drm/card1"
    sock.send(b"change@/devices/forged\0SUBSYSTEM=drm\0WEDGED=rebind\0")
    for methods in ("none", "rebind,bus-reset"):
        sock.send(f"change@{card}\0ACTION=change\0SUBSYSTEM=drm\0WEDGED={methods}\0".encode())
    with sock, UeventSource(channel) as source:
        taken, left = source.pending(), source.pending()

    assert ([(event.path, event.wedged) for event in taken], left) == ([(card, "none"), (card, "rebind,bus-reset")], [])
