"""Reads what a loader must know of a shared library: its SONAME, its machine, and NVIDIA's note of
forward compatibility. Pure, and bounded.

Only 64-bit little-endian ELF files are read. A file may come out of a container's image, so no
number in it is trusted: every read has a limit, and an offset outside the file counts as absent.
Source: System V ABI, "Object Files" and "Dynamic Linking"; elf(5). The note is what `readelf -n`
shows of libcuda in CUDA's compat packages.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator

from msgspec import Struct

__all__ = ["AARCH64", "X86_64", "Elf", "read_elf"]

X86_64, AARCH64 = 62, 183
"""Machines (e_machine) for which NVIDIA has 64-bit drivers."""

Read = Callable[[int, int], bytes]
"""Offset and size; fewer bytes at the end of the file."""

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_DYNAMIC = struct.Struct("<qQ")
_NOTE = struct.Struct("<III")
_ELF64_LITTLE = b"\x7fELF\x02\x01"
_PT_LOAD, _PT_DYNAMIC, _PT_NOTE = 1, 2, 4
_DT_STRTAB, _DT_SONAME = 5, 14
# NVIDIA's libraries have about ten segments, 40 dynamic entries and notes of some hundred bytes.
_SEGMENTS_LIMIT, _DYNAMIC_BYTES, _NOTE_BYTES, _NAME_BYTES = 64, 1 << 16, 1 << 16, 256
_NOTE_OWNER = b"NVIDIA Corporation"


class Elf(Struct, frozen=True, kw_only=True):
    """Facts of one library."""

    machine: int
    soname: str = ""
    """Empty: it has none."""
    serves_drivers: tuple[int, ...] | None = None
    """Major versions of kernel drivers that a compatibility library serves, by its note; None: it
    has no such note."""


class _Segment(Struct, frozen=True):
    kind: int
    offset: int
    address: int
    size: int
    align: int


def read_elf(read: Read) -> Elf | None:
    """Read the facts of a library, or return None when a 64-bit loader would not take it.

    Errors: raises what `read` raises.
    """
    header = read(0, _HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_ELF64_LITTLE):
        return None
    _, _, machine, _, _, table, _, _, _, entry_size, count, _, _, _ = _HEADER.unpack(header)
    if entry_size != _SEGMENT.size or count > _SEGMENTS_LIMIT:
        return None
    rows = read(table, count * _SEGMENT.size)
    segments = [
        _Segment(kind, offset, address, size, align)
        for kind, _, offset, address, _, size, _, align in _SEGMENT.iter_unpack(
            rows[: len(rows) // _SEGMENT.size * _SEGMENT.size]
        )
    ]
    return Elf(machine=machine, soname=_soname(read, segments), serves_drivers=_served_drivers(read, segments))


def _soname(read: Read, segments: list[_Segment]) -> str:
    dynamic = next((segment for segment in segments if segment.kind == _PT_DYNAMIC), None)
    if dynamic is None:
        return ""
    rows = read(dynamic.offset, min(dynamic.size, _DYNAMIC_BYTES))
    values = dict(_DYNAMIC.iter_unpack(rows[: len(rows) // _DYNAMIC.size * _DYNAMIC.size]))
    if _DT_SONAME not in values or _DT_STRTAB not in values:
        return ""
    strings = _offset_of(values[_DT_STRTAB], segments)
    name = b"" if strings is None else read(strings + values[_DT_SONAME], _NAME_BYTES)
    text = name.partition(b"\0")[0].decode("ascii", "replace") if b"\0" in name else ""
    # The result becomes the name of a file.
    return text if text.isprintable() and "/" not in text and text not in (".", "..") and "�" not in text else ""


def _offset_of(address: int, segments: list[_Segment]) -> int | None:
    """Turn an address in memory into an offset in the file."""
    loads = (
        segment
        for segment in segments
        if segment.kind == _PT_LOAD and segment.address <= address < segment.address + segment.size
    )
    return next((address - segment.address + segment.offset for segment in loads), None)


def _served_drivers(read: Read, segments: list[_Segment]) -> tuple[int, ...] | None:
    for segment in segments:
        if segment.kind != _PT_NOTE:
            continue
        for text in _notes(read(segment.offset, min(segment.size, _NOTE_BYTES)), 8 if segment.align == 8 else 4):
            try:
                drivers = json.loads(text.rstrip(b"\0")).get("Driver")
            except (ValueError, AttributeError, RecursionError):
                continue
            if isinstance(drivers, list):
                return tuple(major for major in drivers if isinstance(major, int))
    return None


def _notes(data: bytes, align: int) -> Iterator[bytes]:
    """Iterate over the contents of NVIDIA's notes."""
    at = 0
    while at + _NOTE.size <= len(data):
        name_size, text_size, _ = _NOTE.unpack_from(data, at)
        name_at = at + _NOTE.size
        text_at = _aligned(name_at + name_size, align)
        if data[name_at : name_at + name_size].rstrip(b"\0") == _NOTE_OWNER:
            yield data[text_at : text_at + text_size]
        at = _aligned(text_at + text_size, align)


def _aligned(size: int, align: int) -> int:
    return (size + align - 1) // align * align
