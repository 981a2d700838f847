"""The RDMA netlink messages, byte by byte, and the conversation with a kernel that answers as
nldev.c does.

NOT CHECKED here: a real move, for no kernel at hand has RDMA; the requests are those that
`rdma dev set NAME netns NS` sends.
"""

from __future__ import annotations

import errno
import struct
import sys
from pathlib import Path

import pytest

from topobus.nic.rdma.rdma_netlink import (
    RdmaLink,
    RdmaNetlink,
    encode_get_links,
    encode_get_mode,
    encode_set_namespace,
    open_socket,
)
from topobus.values.errors import HardwareError

pytestmark = pytest.mark.skipif(
    sys.byteorder != "little", reason="NOT CHECKED: the bytes below are those of a little-endian machine"
)

# RDMA_NLDEV_SYS_ATTR_NETNS_MODE, one byte, padded.
MODE = "0500420000000000"
SHARED = "0500420001000000"


class Kernel:
    """Answers requests as the kernel would: a socket whose far end has some devices and a mode."""

    def __init__(self, *, mode: str = MODE, devices: dict[int, str] | None = None, refusal: int = 0) -> None:
        self.mode = bytes.fromhex(mode)
        self.devices = {3: "mlx5_0", 4: "mlx5_1"} if devices is None else devices
        self.refusal = refusal
        self.requests: list[bytes] = []
        self.is_closed = False
        self._answers: list[bytes] = []

    def send(self, data: bytes, /) -> int:
        """Take one request and lay its answers out."""
        self.requests.append(data)
        _, kind, _, sequence, _ = struct.unpack_from("=IHHII", data)
        # Something that somebody else asked for comes in between.
        self._answers.append(message(kind, 0xFFFF, b""))
        if kind == 0x1406:
            self._answers.append(message(kind, sequence, self.mode))
        elif kind == 0x1401:
            parts = [
                message(kind, sequence, attribute(1, struct.pack("=I", index)) + attribute(2, name.encode() + b"\0"))
                for index, name in self.devices.items()
            ]
            self._answers += [b"".join(parts), message(3, sequence, struct.pack("=i", 0))]
        else:
            self._answers.append(message(2, sequence, struct.pack("=i", -self.refusal) + data[:16]))
        return len(data)

    def recv(self, size: int, /) -> bytes:
        """Give the next datagram; without one, as a socket with a time limit."""
        if not self._answers:
            raise TimeoutError(errno.EAGAIN, "timed out")
        return self._answers.pop(0)[:size]

    def close(self) -> None:
        """Close."""
        self.is_closed = True


def message(kind: int, sequence: int, payload: bytes) -> bytes:
    """Make one netlink message of the kernel's."""
    padded = payload + b"\0" * (-len(payload) % 4)
    return struct.pack("=IHHII", 16 + len(payload), kind, 0, sequence, 0) + padded


def attribute(kind: int, value: bytes) -> bytes:
    """Make one attribute."""
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


@pytest.mark.parametrize(
    ("request_bytes", "wanted"),
    [
        pytest.param(encode_get_mode(1), "10000000 0614 0100 01000000 00000000", id="system get"),
        pytest.param(encode_get_links(2), "10000000 0114 0103 02000000 00000000", id="device dump"),
        pytest.param(
            encode_set_namespace(3, 11, 4),
            "20000000 0214 0500 04000000 00000000 08000100 03000000 08004400 0b000000",
            id="device set",
        ),
    ],
)
def test_requests_are_those_of_the_rdma_tool(request_bytes: bytes, wanted: str) -> None:
    """Length, type (client 5 and operation), flags, sequence, port.

    Then index and namespace as attributes 1 and 68.
    """
    assert request_bytes.hex() == wanted.replace(" ", "")


@pytest.mark.parametrize(
    ("mode", "name"),
    [(MODE, "exclusive"), (SHARED, "shared"), ("", "shared")],
    ids=["exclusive", "shared", "older kernel"],
)
def test_mode_is_read_when_the_kernel_tells_it(mode: str, name: str) -> None:
    """A kernel that tells no mode knows the shared one alone."""
    with RdmaNetlink(Kernel(mode=mode)) as rdma:
        assert rdma.mode() == name


def test_links_are_read_from_several_messages_of_one_datagram() -> None:
    """Devices come by name, each with its index."""
    assert RdmaNetlink(Kernel()).links() == (RdmaLink(index=3, name="mlx5_0"), RdmaLink(index=4, name="mlx5_1"))


def test_move_asks_for_the_device_of_that_name() -> None:
    """One look for the index, then one request that the kernel acknowledges.

    The socket is closed in the end.
    """
    kernel = Kernel()
    with RdmaNetlink(kernel) as rdma:
        rdma.move("mlx5_1", 11)

    assert [request.hex() for request in kernel.requests] == [
        encode_get_links(1).hex(),
        encode_set_namespace(4, 11, 2).hex(),
    ]
    assert kernel.is_closed


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        pytest.param(Kernel(refusal=errno.EOPNOTSUPP), "rdma system set netns exclusive", id="shared mode"),
        pytest.param(Kernel(refusal=errno.EPERM), "not permitted", id="no right"),
        pytest.param(Kernel(devices={}), "RDMA device mlx5_0 is not in this network namespace", id="it is elsewhere"),
    ],
)
def test_move_says_why_when_the_kernel_refuses(kernel: Kernel, words: str) -> None:
    """The reason is the kernel's, the next step is ours."""
    with pytest.raises(HardwareError) as caught:
        RdmaNetlink(kernel).move("mlx5_0", 11)

    assert words in str(caught.value)


def test_answer_of_an_impossible_length_is_an_error_when_it_comes() -> None:
    """Bytes are looked at before they are believed."""
    kernel = Kernel()
    kernel.recv = lambda _size, /: struct.pack("=IHHII", 9999, 0x1406, 0, 1, 0)  # type: ignore[method-assign]

    with pytest.raises(HardwareError, match="impossible length"):
        RdmaNetlink(kernel).mode()


def test_open_socket_says_so_when_the_kernel_has_no_rdma() -> None:
    """On a node without RDMA the refusal says what is missing."""
    if Path("/sys/class/infiniband").exists():
        pytest.skip("NOT CHECKED: this kernel has RDMA")

    with pytest.raises(HardwareError, match="CONFIG_INFINIBAND"):
        open_socket()
