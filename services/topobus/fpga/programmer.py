"""The kernel calls that program a region and reset a port, behind a protocol: the only place that
changes a card.

A port is opened with O_EXCL while its region is programmed or the port is reset. The kernel refuses
that (EBUSY) when any process has the port open, and no process can open it meanwhile
(drivers/fpga/dfl-afu-main.c, afu_open). Releasing the port (DFL_FPGA_FME_PORT_RELEASE) would prove
the same, but would remove its node.

Source: numbers and layouts are the kernel's and XRT's:
    DFL  include/uapi/linux/fpga-dfl.h: magic 0xB6; DFL_FPGA_PORT_RESET _IO(0x40),
         DFL_FPGA_FME_PORT_PR _IO(0x80), struct dfl_fpga_fme_port_pr of 24 bytes
    XRT  mgmt-ioctl.h / xmgmt-ioctl.h: magic 'X'; XCLMGMT_IOCICAPDOWNLOAD_AXLF _IOW(6), a struct of
         one pointer
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = [
    "DFL_FPGA_FME_PORT_PR",
    "DFL_FPGA_PORT_RESET",
    "FME_PORT_PR",
    "ICAP_DOWNLOAD",
    "XCLMGMT_IOCICAPDOWNLOAD_AXLF",
    "DflProgrammer",
    "KernelDflProgrammer",
    "KernelXrtProgrammer",
    "RegionUntouched",
    "XrtProgrammer",
]

_WRITE = 1
_DFL_MAGIC, _DFL_PORT_BASE, _DFL_FME_BASE = 0xB6, 0x40, 0x80


def _request(direction: int, magic: int, number: int, size: int) -> int:
    """Compute the number of an ioctl.

    Source: include/uapi/asm-generic/ioctl.h: direction, 14 bits of size, 8 of type, 8 of number.
    """
    return direction << 30 | size << 16 | magic << 8 | number


FME_PORT_PR = struct.Struct("=IIIIQ")
"""struct dfl_fpga_fme_port_pr: argsz, flags (0), port_id, buffer_size, buffer_address."""
ICAP_DOWNLOAD = struct.Struct("=Q")
"""struct xclmgmt_ioc_bitstream_axlf: a pointer to the file in memory (64 bits: XRT has no driver
for others)."""
DFL_FPGA_PORT_RESET = _request(0, _DFL_MAGIC, _DFL_PORT_BASE + 0, 0)
DFL_FPGA_FME_PORT_PR = _request(0, _DFL_MAGIC, _DFL_FME_BASE + 0, 0)
XCLMGMT_IOCICAPDOWNLOAD_AXLF = _request(_WRITE, ord("X"), 6, ICAP_DOWNLOAD.size)


class RegionUntouched(OSError):
    """Raised when certainly nothing was changed: a node cannot be opened, or the region is in
    use.
    """


class DflProgrammer(Protocol):
    """The changes that are made to a DFL card."""

    def program(self, engine: str, port_node: str, port: int, image: bytes) -> None:
        """Load an image into the region behind a port, by the management engine's node.

        Errors: raises RegionUntouched when nothing was changed; any other OSError when the content
        of the region is unknown.
        """
        ...

    def reset(self, port_node: str) -> None:
        """Reset a port and its function.

        Errors: raises OSError when the kernel refuses.
        """
        ...


class XrtProgrammer(Protocol):
    """The changes that are made to a Xilinx card."""

    def program(self, management: str, image: bytes) -> None:
        """Load an xclbin by the management function's node.

        Errors: raises RegionUntouched when nothing was changed; any other OSError when the content
        of the card is unknown.
        """
        ...


class KernelDflProgrammer:
    """Programs by the kernel's dfl-fme and dfl-afu drivers."""

    def program(self, engine: str, port_node: str, port: int, image: bytes) -> None:
        """Program, with the port closed to other processes."""
        with _opened(port_node, os.O_EXCL), _opened(engine) as descriptor:
            # The kernel reads from our memory, which must stay where it is.
            content = bytearray(image)
            view = (ctypes.c_char * len(content)).from_buffer(content)
            _call(
                descriptor,
                DFL_FPGA_FME_PORT_PR,
                FME_PORT_PR.pack(FME_PORT_PR.size, 0, port, len(content), ctypes.addressof(view)),
                engine,
            )

    def reset(self, port_node: str) -> None:
        """Reset, with the port closed to other processes."""
        with _opened(port_node, os.O_EXCL) as descriptor:
            _call(descriptor, DFL_FPGA_PORT_RESET, b"", port_node)


class KernelXrtProgrammer:
    """Programs by XRT's xclmgmt driver, which refuses (EBUSY) while a process has a context on the
    card.
    """

    def program(self, management: str, image: bytes) -> None:
        """Load an xclbin by the management function's node."""
        with _opened(management) as descriptor:
            content = bytearray(image)
            view = (ctypes.c_char * len(content)).from_buffer(content)
            _call(descriptor, XCLMGMT_IOCICAPDOWNLOAD_AXLF, ICAP_DOWNLOAD.pack(ctypes.addressof(view)), management)


@contextmanager
def _opened(path: str, flags: int = 0) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags)
    except OSError as err:
        raise RegionUntouched(err.errno, err.strerror, path) from err
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _call(descriptor: int, request: int, argument: bytes, path: str) -> None:
    try:
        fcntl.ioctl(descriptor, request, argument)
    except OSError as err:
        kind = RegionUntouched if err.errno == errno.EBUSY else OSError
        raise kind(err.errno, err.strerror, path) from err
