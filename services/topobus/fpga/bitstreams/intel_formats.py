"""Reads Intel's bitstreams: a green bitstream (GBS: header, JSON, raw image), and OpenCL's .aocx,
an ELF file that has a compressed one inside.

Of ELF it finds a section by its name, within fixed bounds: little-endian, of 32 and 64 bits.
Source: OPAE's packager and Intel's FPGA plugin for Kubernetes (pkg/fpga/bitstream: gbs.go,
aocx.go), read for the facts: header `XeonFPGA·GBSv001` and a length of 32 bits, then JSON with
`afu-image.interface-uuid` and one accelerator cluster; .aocx: section .acl.fpga.bin, an ELF file
itself, with section .acl.gbs.gz; elf(5); include/uapi/linux/elf.h (Elf32_Ehdr, Elf64_Ehdr,
Elf32_Shdr, Elf64_Shdr).
"""

from __future__ import annotations

import struct
import zlib

import msgspec
from msgspec import Struct, field

from topobus.formats.first_read import ready
from topobus.fpga.bitstreams.byte_window import ByteWindow, UnreadableBitstream
from topobus.fpga.bitstreams.values import MOST_IMAGE_BYTES, Bitstream, BitstreamForm, read_id

__all__ = ["ELF_MAGIC", "GBS_MAGIC", "image_of_aocx", "image_of_gbs", "read_aocx", "read_gbs"]

GBS_MAGIC = b"XeonFPGA\xb7GBSv001"
_HEADER = struct.Struct("<16sI")
# Intel's own tools stop at 4 KiB.
_MOST_METADATA_BYTES = 64 * 1024
_CHUNK_BYTES = 1024 * 1024
# gzip's own header and trailer around deflate (zlib.decompressobj: 16 + MAX_WBITS).
_GZIP_BITS = 31
ELF_MAGIC = b"\x7fELF"
_IDENTITY_BYTES = 16
_LITTLE_ENDIAN = 1
# By EI_CLASS: e_type to e_shstrndx, and one section header: sh_name, sh_type, sh_flags, sh_addr,
# sh_offset, sh_size and four that are not read.
_ELF_HEADERS = {1: struct.Struct("<HHIIIIIHHHHHH"), 2: struct.Struct("<HHIQQQIHHHHHH")}
_ELF_SECTIONS = {1: struct.Struct("<IIIIIIIIII"), 2: struct.Struct("<IIQQQQIIQQ")}
# An .aocx has some twenty sections with short names.
_MOST_SECTIONS = 1024
_MOST_NAME_BYTES = 64 * 1024


class _Cluster(Struct, frozen=True, kw_only=True):
    accelerator_type_uuid: str = field(name="accelerator-type-uuid")


class _AfuImage(Struct, frozen=True, kw_only=True):
    interface_uuid: str = field(default="", name="interface-uuid")
    accelerator_clusters: list[_Cluster] = field(name="accelerator-clusters")


class _Metadata(Struct, frozen=True, kw_only=True):
    afu_image: _AfuImage = field(name="afu-image")


def read_gbs(file: ByteWindow) -> Bitstream:
    """Read the header of a green bitstream.

    Errors: raises UnreadableBitstream when header or metadata do not follow the format.
    """
    metadata = file.read(_HEADER.size, _metadata_bytes(file), "GBS metadata")
    try:
        image = msgspec.json.decode(metadata.rstrip(b"\0"), type=ready(_Metadata)).afu_image
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as err:
        raise UnreadableBitstream(f"GBS metadata: {str(err)[:200]}") from err
    if len(image.accelerator_clusters) != 1:
        raise UnreadableBitstream(f"GBS metadata: {len(image.accelerator_clusters)} accelerator clusters, wanted one")
    function = read_id(image.accelerator_clusters[0].accelerator_type_uuid, "accelerator-type-uuid")
    return Bitstream(
        form=BitstreamForm.GBS, function=function, interface=read_id(image.interface_uuid, "interface-uuid")
    )


def image_of_gbs(file: ByteWindow) -> bytes:
    """Return the raw image of a green bitstream.

    Errors: raises UnreadableBitstream when header or image have a wrong size.
    """
    start = _HEADER.size + _metadata_bytes(file)
    size = file.size - start
    if not 0 < size <= MOST_IMAGE_BYTES:
        raise UnreadableBitstream(f"GBS image: {size} bytes, wanted 1 to {MOST_IMAGE_BYTES}")
    return file.read(start, size, "GBS image")


def read_aocx(file: ByteWindow) -> Bitstream:
    """Read the header of the bitstream inside an OpenCL container.

    All containers of one board package have the same function id, so the id does not show which
    kernels are loaded.

    Errors: raises UnreadableBitstream when the container or the header inside does not follow the
    format.
    """
    beginning = b"".join(_unpacked(_packed(file), _HEADER.size + _MOST_METADATA_BYTES))
    return msgspec.structs.replace(read_gbs(ByteWindow.of_bytes(beginning)), form=BitstreamForm.AOCX)


def image_of_aocx(file: ByteWindow) -> bytes:
    """Return the raw image inside an OpenCL container.

    Errors: raises UnreadableBitstream, also when it unpacks to more than `MOST_IMAGE_BYTES`.
    """
    limit = MOST_IMAGE_BYTES + _HEADER.size + _MOST_METADATA_BYTES
    return image_of_gbs(ByteWindow.of_bytes(b"".join(_unpacked(_packed(file), limit, is_whole=True))))


def _metadata_bytes(file: ByteWindow) -> int:
    magic, size = _HEADER.unpack(file.read(0, _HEADER.size, "GBS header"))
    if magic != GBS_MAGIC:
        raise UnreadableBitstream(f"GBS header: begins with {magic[:16]!r}, wanted {GBS_MAGIC!r}")
    if not 0 < size <= _MOST_METADATA_BYTES:
        raise UnreadableBitstream(f"GBS header: {size} bytes of metadata, wanted 1 to {_MOST_METADATA_BYTES}")
    return int(size)


def _packed(file: ByteWindow) -> ByteWindow:
    inner = _find_section(file, ".acl.fpga.bin")
    if inner is None:
        raise UnreadableBitstream("no section .acl.fpga.bin: an OpenCL container without an image")
    if inner.read(0, min(4, inner.size), "section .acl.fpga.bin") != ELF_MAGIC:
        raise UnreadableBitstream("section .acl.fpga.bin is no ELF file")
    packed = _find_section(inner, ".acl.gbs.gz")
    if packed is None:
        raise UnreadableBitstream("section .acl.fpga.bin has no section .acl.gbs.gz")
    return packed


def _unpacked(packed: ByteWindow, limit: int, *, is_whole: bool = False) -> list[bytes]:
    """Unpack up to `limit` bytes, in pieces.

    With `is_whole`, content that is longer or ends early is an error.
    """
    unpacker = zlib.decompressobj(_GZIP_BITS)
    pieces: list[bytes] = []
    left, offset = limit, 0
    try:
        while left > 0 and not unpacker.eof:
            piece = unpacker.unconsumed_tail
            if not piece:
                size = min(_CHUNK_BYTES, packed.size - offset)
                if size == 0:
                    break
                piece = packed.read(offset, size, "section .acl.gbs.gz")
                offset += size
            out = unpacker.decompress(piece, min(left, _CHUNK_BYTES))
            left -= len(out)
            pieces.append(out)
    except zlib.error as err:
        raise UnreadableBitstream(f"section .acl.gbs.gz: {err}") from err
    if is_whole and not unpacker.eof:
        raise UnreadableBitstream(f"section .acl.gbs.gz: cut off, or unpacks to more than {limit} bytes")
    return pieces


def _find_section(file: ByteWindow, name: str) -> ByteWindow | None:
    """Find the first section of a name, or None when there is none.

    Errors: raises UnreadableBitstream for a file that is no ELF file of this kind.
    """
    identity = file.read(0, _IDENTITY_BYTES, "ELF identity")
    layout = _ELF_HEADERS.get(identity[4])
    if identity[:4] != ELF_MAGIC or layout is None or identity[5] != _LITTLE_ENDIAN:
        raise UnreadableBitstream("no little-endian ELF file of 32 or 64 bits")
    header = layout.unpack(file.read(_IDENTITY_BYTES, layout.size, "ELF header"))
    table_offset, entry_bytes, count, names_index = header[5], header[10], header[11], header[12]
    entry = _ELF_SECTIONS[identity[4]]
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
