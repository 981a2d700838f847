"""Finds a section of an ELF file by its name, within fixed bounds: as much as OpenCL's .aocx
containers need.

Reads little-endian ELF of 32 and 64 bits, and ignores segments, symbols and everything else.
Source: elf(5); include/uapi/linux/elf.h (Elf32_Ehdr, Elf64_Ehdr, Elf32_Shdr, Elf64_Shdr).
"""

from __future__ import annotations

import struct

from topobus.fpga.bitstreams.byte_window import ByteWindow, UnreadableBitstream

__all__ = ["ELF_MAGIC", "find_section"]

ELF_MAGIC = b"\x7fELF"
_IDENTITY_BYTES = 16
_LITTLE_ENDIAN = 1
# By EI_CLASS: e_type to e_shstrndx, and one section header: sh_name, sh_type, sh_flags, sh_addr,
# sh_offset, sh_size and four that are not read.
_HEADERS = {1: struct.Struct("<HHIIIIIHHHHHH"), 2: struct.Struct("<HHIQQQIHHHHHH")}
_SECTIONS = {1: struct.Struct("<IIIIIIIIII"), 2: struct.Struct("<IIQQQQIIQQ")}
# An .aocx has some twenty sections with short names.
_MOST_SECTIONS = 1024
_MOST_NAME_BYTES = 64 * 1024


def find_section(file: ByteWindow, name: str) -> ByteWindow | None:
    """Find the first section of a name, or None when there is none.

    Errors: raises UnreadableBitstream for a file that is no ELF file of this kind.
    """
    identity = file.read(0, _IDENTITY_BYTES, "ELF identity")
    layout = _HEADERS.get(identity[4])
    if identity[:4] != ELF_MAGIC or layout is None or identity[5] != _LITTLE_ENDIAN:
        raise UnreadableBitstream("no little-endian ELF file of 32 or 64 bits")
    header = layout.unpack(file.read(_IDENTITY_BYTES, layout.size, "ELF header"))
    table_offset, entry_bytes, count, names_index = header[5], header[10], header[11], header[12]
    entry = _SECTIONS[identity[4]]
    if count > _MOST_SECTIONS or entry_bytes != entry.size or names_index >= count:
        raise UnreadableBitstream(f"ELF section table: {count} sections of {entry_bytes} bytes, names in {names_index}")
    table = file.read(table_offset, entry_bytes * count, "ELF section table")
    sections = [entry.unpack_from(table, index * entry_bytes) for index in range(count)]
    names = _content(file, sections[names_index], "ELF section names")
    if names.size > _MOST_NAME_BYTES:
        raise UnreadableBitstream(f"ELF section names: {names.size} bytes, wanted at most {_MOST_NAME_BYTES}")
    text = names.read(0, names.size, "ELF section names")
    wanted = name.encode("ascii")
    for section in sections:
        if text[section[0] :].partition(b"\0")[0] == wanted:
            return _content(file, section, f"ELF section {name}")
    return None


def _content(file: ByteWindow, section: tuple[int, ...], what: str) -> ByteWindow:
    return file.window(section[4], section[5], what)
