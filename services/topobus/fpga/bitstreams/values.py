"""Frozen values that describe a bitstream, and the notation of function ids. Pure."""

from __future__ import annotations

import re
from enum import StrEnum

from msgspec import Struct

from topobus.fpga.bitstreams.byte_window import UnreadableBitstream

__all__ = [
    "MOST_FILE_BYTES",
    "MOST_IMAGE_BYTES",
    "Bitstream",
    "BitstreamForm",
    "normal_id",
    "normal_platform",
    "read_id",
]

MOST_FILE_BYTES = 512 * 1024 * 1024
"""The largest file: it is held in memory while a card is programmed with it. The largest xclbin
files in use are some 100 MiB; XRT's driver takes 1 GiB."""
MOST_IMAGE_BYTES = 256 * 1024 * 1024
"""What a compressed image may unpack to: several times what the largest
region of a DFL card takes."""

_ID = re.compile(r"[0-9a-f]{32}")


class BitstreamForm(StrEnum):
    """The format of a file."""

    GBS = "gbs"
    """Intel: a green bitstream."""
    AOCX = "aocx"
    """Intel: OpenCL's container with one inside."""
    XCLBIN = "xclbin"
    """Xilinx."""


class Bitstream(Struct, frozen=True, kw_only=True):
    """What the header of a bitstream file describes."""

    form: BitstreamForm
    function: str
    """AFU id, or the xclbin's uuid: 32 hexadecimal digits."""
    interface: str = ""
    """Which region it fits, by the interface's id; empty: the header does not name it."""
    platform: str = ""
    """Which shell it fits, by name (VBNV); Xilinx alone."""
    platform_timestamp: int = 0
    """When that shell was built, in seconds since 1970; 0: the header does not have it."""


def normal_id(text: str) -> str:
    """Write an id as sysfs does. Text that is no id stays recognisable as such.

    >>> normal_id("D8424DC4-A4A3-C413-F89E-433683F9040B")
    'd8424dc4a4a3c413f89e433683f9040b'
    """
    return text.strip().lower().replace("-", "")


def read_id(text: str, what: str) -> str:
    """Read an id of 128 bits.

    Errors: raises UnreadableBitstream for text that is no id, and for all zeros or all ones, which
    a dead function reads as.
    """
    plain = normal_id(text)
    if _ID.fullmatch(plain) is None or plain in ("0" * 32, "f" * 32):
        raise UnreadableBitstream(f"{what} is {text[:60]!r}, wanted 32 hexadecimal digits that are not all 0 or f")
    return plain


def normal_platform(text: str) -> str:
    """Write a shell's name with underscores, as the card does: headers of xclbin files also have
    colons and dots.

    >>> normal_platform("xilinx:u200:xdma:201830.2")
    'xilinx_u200_xdma_201830_2'
    """
    return re.sub(r"[:.]", "_", text.strip().lower())
