"""Reads the header of an xclbin (axlf) file: which function it holds, and which shell it fits.

The kernel driver takes the whole file, so there is nothing to unpack. It copies as many bytes as
the header declares, so a header that declares more than the file has is refused here.
Source: XRT's xclbin.h (struct axlf, axlf_header, axlf_section_header; their sizes are asserted
there: 152 and 40 bytes), read for the facts.
"""

from __future__ import annotations

import struct

from topobus.fpga.bitstreams.byte_window import ByteWindow, UnreadableBitstream
from topobus.fpga.bitstreams.values import Bitstream, BitstreamForm, read_id

__all__ = ["XCLBIN_HEADER", "XCLBIN_MAGIC", "XCLBIN_PREFIX", "XCLBIN_SECTION", "read_xclbin"]

XCLBIN_MAGIC = b"xclbin2\0"
XCLBIN_PREFIX = struct.Struct("<8si28s256sQ")
"""Magic, length of the signature, reserved, key block, unique id."""
XCLBIN_HEADER = struct.Struct("<QQQHBBHH16s64s16s16sI4x")
"""Length, time stamp, time stamp of the shell, version (patch, major, minor), mode, actions,
interface uuid, platform, uuid, debug file, number of sections."""
XCLBIN_SECTION = struct.Struct("<I16s4xQQ")
"""Kind, name, offset, size."""
# Those for cards: flat, partial, tandem and tandem with partial; the rest is for emulation.
_CARD_MODES = range(4)
_BITSTREAM_KINDS = (0, 18, 19)
"""BITSTREAM, PDI, BITSTREAM_PARTIAL_PDI."""
# Files of today have some thirty; the format allows 65,536.
_MOST_SECTIONS = 1024


def read_xclbin(file: ByteWindow) -> Bitstream:
    """Read the header of an xclbin file.

    Errors: raises UnreadableBitstream when header or section table do not follow the format.
    """
    magic = XCLBIN_PREFIX.unpack(file.read(0, XCLBIN_PREFIX.size, "xclbin magic"))[0]
    if magic != XCLBIN_MAGIC:
        raise UnreadableBitstream(f"xclbin magic: begins with {magic!r}, wanted {XCLBIN_MAGIC!r}")
    header = XCLBIN_HEADER.unpack(file.read(XCLBIN_PREFIX.size, XCLBIN_HEADER.size, "xclbin header"))
    length, shell_timestamp, mode, interface, platform, uuid, count = (
        header[index] for index in (0, 2, 6, 8, 9, 10, 12)
    )
    table_offset = XCLBIN_PREFIX.size + XCLBIN_HEADER.size
    if not table_offset <= length <= file.size:
        raise UnreadableBitstream(f"xclbin header: got a length of {length} bytes in a file of {file.size}")
    if mode not in _CARD_MODES:
        raise UnreadableBitstream(f"xclbin header: mode {mode} is for emulation, not for a card")
    if count > _MOST_SECTIONS:
        raise UnreadableBitstream(f"xclbin header: {count} sections, wanted at most {_MOST_SECTIONS}")
    table = file.read(table_offset, count * XCLBIN_SECTION.size, "xclbin section table")
    kinds = set()
    for index in range(count):
        kind, _, offset, size = XCLBIN_SECTION.unpack_from(table, index * XCLBIN_SECTION.size)
        file.window(offset, size, f"xclbin section {index}")
        kinds.add(kind)
    if not kinds & set(_BITSTREAM_KINDS):
        raise UnreadableBitstream("xclbin section table: no section holds a bitstream")
    return Bitstream(
        form=BitstreamForm.XCLBIN,
        function=read_id(uuid.hex(), "uuid"),
        interface=interface.hex() if any(interface) else "",
        platform=platform.partition(b"\0")[0].decode("ascii", "replace"),
        platform_timestamp=shell_timestamp,
    )
