"""Writers of bitstream formats, for tests: files of our own with the headers that Intel's and
Xilinx' tools write, and content that no card would take.
"""

from __future__ import annotations

import gzip
import json
import struct

from topobus.fpga.bitstreams.intel_formats import GBS_MAGIC

__all__ = ["FUNCTION", "INTERFACE", "OPENCL_FUNCTION", "PLATFORM", "XCLBIN_UUID", "aocx", "elf", "gbs", "xclbin"]

FUNCTION = "d8424dc4a4a3c413f89e433683f9040b"
INTERFACE = "69528db6eb31577a8c3668f9faa081f6"
OPENCL_FUNCTION = "18b79ffa2ee54aa096ef4230dafacb5f"
XCLBIN_UUID = "5f1c9d4e2b7a43d88c90aa17e2b35c11"
PLATFORM = "xilinx_u55c_gen3x16_xdma_base_3"


def gbs(function: str = FUNCTION, interface: str = INTERFACE, image: bytes | None = None) -> bytes:
    """Write a green bitstream.

    Its image names its function, for the file-backed programmer to read.
    """
    image = function.encode() + b" image" * 20 if image is None else image
    metadata = json.dumps(
        {
            "version": 640,
            "platform-name": "DCP",
            "afu-image": {
                "interface-uuid": interface,
                "magic-no": 488605312,
                "power": 0,
                "accelerator-clusters": [{"name": "sample", "total-contexts": 1, "accelerator-type-uuid": function}],
            },
        }
    ).encode()
    return GBS_MAGIC + struct.pack("<I", len(metadata)) + metadata + image


def elf(sections: dict[str, bytes], *, bits: int = 64) -> bytes:
    """Write an ELF file of nothing but sections."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".shstrtab"))
    contents = [b"", *sections.values(), names]
    titles = ["", *sections, ".shstrtab"]
    header_bytes, entry = (64, "<IIQQQQIIQQ") if bits == 64 else (52, "<IIIIIIIIII")
    body, table = b"", b""
    for title, content in zip(titles, contents, strict=True):
        name = names.index(b"\0" + title.encode() + b"\0") + 1 if title else 0
        table += struct.pack(entry, name, 1 if title else 0, 0, 0, header_bytes + len(body), len(content), 0, 0, 1, 0)
        body += content
    identity = b"\x7fELF" + bytes([2 if bits == 64 else 1, 1, 1]) + bytes(9)
    layout = "<HHIQQQIHHHHHH" if bits == 64 else "<HHIIIIIHHHHHH"
    rest = (
        1,
        0,
        1,
        0,
        0,
        header_bytes + len(body),
        0,
        header_bytes,
        0,
        0,
        struct.calcsize(entry),
        len(contents),
        len(contents) - 1,
    )
    return identity + struct.pack(layout, *rest) + body + table


def aocx(packed: bytes | None = None, *, bits: int = 64) -> bytes:
    """Write an OpenCL container with a compressed green bitstream inside."""
    packed = gzip.compress(gbs(OPENCL_FUNCTION), mtime=0) if packed is None else packed
    inner = elf({".acl.gbs.gz": packed}, bits=bits)
    return elf({".acl.board": b"pac_a10", ".acl.fpga.bin": inner, ".acl.version": b"1.2"}, bits=bits)


def xclbin(
    uuid: str = XCLBIN_UUID,
    interface: str = "00" * 16,
    *,
    platform: str = PLATFORM,
    timestamp: int = 0,
    mode: int = 1,
    length: int | None = None,
    kind: int = 0,
    image: bytes = b"bits" * 64,
) -> bytes:
    """Write an xclbin with one section.

    Offsets by XRT's xclbin.h: the header at 304, 152 bytes long, then sections of 40.
    """
    start = 304 + 152 + 40
    section = struct.pack("<I16s4xQQ", kind, b"ocl1", start, len(image))
    header = struct.pack(
        "<QQQHBBHH16s64s16s16sI4x",
        start + len(image) if length is None else length,
        1_700_000_000,
        timestamp,
        0,
        2,
        1,
        mode,
        0,
        bytes.fromhex(interface),
        platform.encode(),
        bytes.fromhex(uuid),
        b"",
        1,
    )
    return struct.pack("<8si28s256sQ", b"xclbin2\0", -1, b"\xff" * 28, b"", 0) + header + section + image
