"""A client of the kernel's RDMA netlink: reads the namespace mode and the RDMA devices, and moves a
device into a network namespace.

It waits for each answer. In shared mode (the kernel's default) every namespace sees every RDMA
device, and none can be moved. `rdma system set netns exclusive` changes that for the whole node. A
device whose namespace ends returns to the first namespace by itself.

Source: include/uapi/rdma/rdma_netlink.h, drivers/infiniband/core/nldev.c of the Linux kernel;
netlink(7).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Protocol, Self

from msgspec import Struct

from topobus.values.errors import HardwareError

__all__ = [
    "RdmaLink",
    "RdmaNetlink",
    "decode_links",
    "decode_mode",
    "encode_get_links",
    "encode_get_mode",
    "encode_set_namespace",
    "open_socket",
]

# NETLINK_RDMA of linux/netlink.h.
_PROTOCOL = 20
# RDMA_NL_NLDEV << 10 is the client's part of a message's type. The operations are those of enum
# rdma_nldev_command.
_CLIENT = 5 << 10
_GET, _SET, _SYSTEM_GET = 1, 2, 6
# enum rdma_nldev_attr.
_DEVICE_INDEX, _DEVICE_NAME, _SYSTEM_NAMESPACE_MODE, _NAMESPACE_FD = 1, 2, 66, 68
# linux/netlink.h.
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_READ_BYTES = 64 * 1024
# The kernel answers at once. A longer silence means a stuck RDMA driver.
_LIMIT_S = 3.0


class RdmaLink(Struct, frozen=True, kw_only=True):
    """One RDMA device as a namespace shows it."""

    index: int
    name: str


class NetlinkSocket(Protocol):
    """The part of a netlink socket that is used."""

    def send(self, data: bytes, /) -> int: ...
    def recv(self, size: int, /) -> bytes: ...
    def close(self) -> None: ...


def open_socket() -> NetlinkSocket:
    """Open a socket in the calling thread's network namespace.

    Errors: raises HardwareError on a kernel without RDMA.
    """
    try:
        opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _PROTOCOL)
    except OSError as err:
        raise HardwareError(
            f"RDMA netlink: {err.strerror}",
            next_step="load the module ib_core, or build the kernel with CONFIG_INFINIBAND",
        ) from err
    opened.settimeout(_LIMIT_S)
    return opened


def encode_get_mode(sequence: int) -> bytes:
    """Encode the question for the namespace mode.

    >>> encode_get_mode(7).hex()
    '10000000061401000700000000000000'
    """
    return _message(_SYSTEM_GET, _REQUEST, sequence)


def encode_get_links(sequence: int) -> bytes:
    """Encode the question for all RDMA devices of the socket's namespace."""
    return _message(_GET, _REQUEST | _DUMP, sequence)


def encode_set_namespace(index: int, namespace_fd: int, sequence: int) -> bytes:
    """Encode the request to move a device into an open namespace. The kernel acknowledges it."""
    return _message(_SET, _REQUEST | _ACK, sequence, _u32(_DEVICE_INDEX, index), _u32(_NAMESPACE_FD, namespace_fd))


def decode_mode(payloads: Sequence[bytes]) -> str:
    """Read the mode: `shared` or `exclusive`.

    Kernels before 5.2 do not report it, and have the shared one alone.
    """
    for payload in payloads:
        for kind, value in _attributes(payload):
            if kind == _SYSTEM_NAMESPACE_MODE and value:
                return "shared" if value[0] else "exclusive"
    return "shared"


def decode_links(payloads: Sequence[bytes]) -> tuple[RdmaLink, ...]:
    """Read the devices, by name."""
    links: list[RdmaLink] = []
    for payload in payloads:
        attributes = dict(_attributes(payload))
        index, name = attributes.get(_DEVICE_INDEX, b""), attributes.get(_DEVICE_NAME, b"")
        if len(index) == 4 and name:
            links.append(
                RdmaLink(index=int(struct.unpack("=I", index)[0]), name=name.rstrip(b"\0").decode("utf-8", "replace"))
            )
    return tuple(sorted(links, key=lambda link: link.name))


class RdmaNetlink:
    """A connection to the kernel, closed at the end of a `with` block."""

    def __init__(self, opened: NetlinkSocket) -> None:
        self._socket = opened
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def mode(self) -> str:
        """Ask for the namespace mode.

        Errors: raises HardwareError when the kernel refuses or does not answer.
        """
        return decode_mode(self._ask(encode_get_mode(self._next())))

    def links(self) -> tuple[RdmaLink, ...]:
        """Ask for the devices of this namespace.

        Errors: raises HardwareError when the kernel refuses or does not answer.
        """
        return decode_links(self._ask(encode_get_links(self._next()), is_dump=True))

    def move(self, name: str, namespace_fd: int) -> None:
        """Move a device into an open namespace.

        Errors: raises HardwareError with the kernel's reason, and for a device that is not in this
        namespace.
        """
        link = next((link for link in self.links() if link.name == name), None)
        if link is None:
            raise HardwareError(f"RDMA device {name} is not in this network namespace", device=name)
        try:
            self._ask(encode_set_namespace(link.index, namespace_fd, self._next()), is_acknowledged=True)
        except HardwareError as err:
            raise HardwareError(
                f"RDMA device {name} is not moved: {err.message}", next_step=err.next_step, device=name
            ) from err

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _ask(self, request: bytes, *, is_dump: bool = False, is_acknowledged: bool = False) -> list[bytes]:
        payloads: list[bytes] = []
        try:
            self._socket.send(request)
            while True:
                for kind, sequence, payload in _messages(self._socket.recv(_READ_BYTES)):
                    if sequence != self._sequence:
                        continue
                    if kind == _DONE:
                        return payloads
                    if kind == _ERROR:
                        _raise_error(payload)
                        return payloads
                    payloads.append(payload)
                    if not is_dump and not is_acknowledged:
                        return payloads
        except OSError as err:
            raise HardwareError(f"RDMA netlink: {err.strerror or 'no answer from the kernel'}") from err


def _message(operation: int, flags: int, sequence: int, *attributes: bytes) -> bytes:
    payload = b"".join(attributes)
    return _HEADER.pack(_HEADER.size + len(payload), _CLIENT + operation, flags, sequence, 0) + payload


def _u32(kind: int, value: int) -> bytes:
    return _ATTRIBUTE.pack(8, kind) + struct.pack("=I", value)


def _messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, _, sequence, _ = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size or offset + length > len(data):
            raise HardwareError(
                "RDMA netlink: the kernel's answer has a message of an impossible length", raw=str(length)
            )
        yield kind, sequence, data[offset + _HEADER.size : offset + length]
        offset += _aligned(length)


def _attributes(payload: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + _ATTRIBUTE.size <= len(payload):
        length, kind = _ATTRIBUTE.unpack_from(payload, offset)
        if length < _ATTRIBUTE.size or offset + length > len(payload):
            return
        # The two upper bits are flags (nested, byte order).
        yield kind & 0x3FFF, payload[offset + _ATTRIBUTE.size : offset + length]
        offset += _aligned(length)


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _raise_error(payload: bytes) -> None:
    code = -int(struct.unpack_from("=i", payload)[0]) if len(payload) >= 4 else errno.EPROTO
    if code == 0:
        return
    # The kernel returns this error on a node that shares its devices, and for a driver that cannot
    # move a device which a process has open (rdma_rxe).
    next_step = (
        "`rdma system set netns exclusive` where the node shares them; else leave rdma.mode out"
        if code == errno.EOPNOTSUPP
        else ""
    )
    raise HardwareError(f"RDMA netlink: {os.strerror(code)}", next_step=next_step, errno=code)
