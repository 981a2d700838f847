"""The messages between an asker and a fork server (support.fork_server): an order with three
descriptors one way, a pid the other.
"""

from __future__ import annotations

import array
import platform
import socket
import struct
import sys

import msgspec

__all__ = ["CLONE_NUMBER", "Order", "confirm", "receive", "send"]

_LENGTH = struct.Struct("!I")
# clone(2) on Linux, asm/unistd.h of each architecture; 0 where a server
# cannot make a child of its asker.
CLONE_NUMBER = {"x86_64": 56, "aarch64": 220}.get(platform.machine(), 0) if sys.platform == "linux" else 0


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: `python -m module arguments…` or `python script arguments…`, in this folder and
    environment.
    """

    module: str = ""
    script: str = ""
    """A file, in place of a module."""
    arguments: tuple[str, ...]
    folder: str
    environment: dict[str, str]
    is_own_session: bool = False
    before: bytes = b""
    """A pickled function to call first, as `preexec_fn`; empty for none."""


def send(connection: socket.socket, order: Order, descriptors: tuple[int, int, int]) -> int:
    """Ask a server for a process; its pid, or 0 when the kernel refuses."""
    content = msgspec.json.encode(order)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    connection.sendmsg([_LENGTH.pack(len(content))], rights)
    connection.sendall(content)
    return int(_LENGTH.unpack(_read(connection, _LENGTH.size))[0])


def receive(connection: socket.socket) -> tuple[Order, list[int]] | None:
    """Wait for the next order; None when the asker is gone."""
    descriptors = array.array("i")
    head, ancillary, _, _ = connection.recvmsg(_LENGTH.size, socket.CMSG_SPACE(3 * descriptors.itemsize))
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content)
    if not head:
        return None
    head += _read(connection, _LENGTH.size - len(head))
    return msgspec.json.decode(_read(connection, _LENGTH.unpack(head)[0]), type=Order), list(descriptors)


def confirm(connection: socket.socket, pid: int) -> None:
    """Send the asker the pid of its copy, or 0 when there is none."""
    connection.sendall(_LENGTH.pack(pid))


def _read(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            raise ConnectionError("the fork server has ended")
        content += part
    return content
