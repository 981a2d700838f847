"""Bitstream headers: what each format says, and that no file, however broken, crashes the reader or
makes it allocate much.
"""

from __future__ import annotations

import gzip
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.bitstream_files import FUNCTION, INTERFACE, OPENCL_FUNCTION, PLATFORM, XCLBIN_UUID, aocx, elf, gbs, xclbin
from topobus.fpga.bitstreams.byte_window import ByteWindow
from topobus.fpga.bitstreams.formats import image_of, read_bitstream
from topobus.fpga.bitstreams.values import Bitstream, BitstreamForm
from topobus.fpga.bitstreams.xclbin import XCLBIN_HEADER, XCLBIN_PREFIX, XCLBIN_SECTION
from topobus.values.outcome import Refusal

# What looking at any file may allocate: tables and metadata have bounds of 64 KiB each, and a piece
# of a compressed file has 1 MiB.
MOST_ALLOCATED = 8 * 1024 * 1024


def read(content: bytes) -> Bitstream | Refusal:
    """Read a buffer."""
    return read_bitstream(ByteWindow.of_bytes(content))


def why(content: bytes) -> str:
    """Say why a buffer is refused."""
    answer = read(content)
    assert isinstance(answer, Refusal), answer
    assert [reason.code for reason in answer.reasons] == ["bitstream-unreadable"]
    return answer.reasons[0].message


def patched(content: bytes, offset: int, layout: str, value: int) -> bytes:
    """Overwrite a number."""
    number = struct.pack(layout, value)
    return content[:offset] + number + content[offset + len(number) :]


def test_gbs_says_function_and_interface_and_holds_its_image() -> None:
    """The kernel gets what follows the metadata, and nothing of the header."""
    content = gbs(image=b"\x01\x02\x03")

    assert read(content) == Bitstream(form=BitstreamForm.GBS, function=FUNCTION, interface=INTERFACE)
    assert image_of(ByteWindow.of_bytes(content), BitstreamForm.GBS) == b"\x01\x02\x03"


def test_gbs_ids_are_read_when_they_are_written_with_dashes_and_capitals() -> None:
    """Ids are compared with sysfs, which writes 32 small digits."""
    answer = read(gbs("D8424DC4-A4A3-C413-F89E-433683F9040B", "69528DB6-EB31-577A-8C36-68F9FAA081F6"))

    assert isinstance(answer, Bitstream)
    assert (answer.function, answer.interface) == (FUNCTION, INTERFACE)


@pytest.mark.parametrize("bits", [32, 64])
def test_aocx_is_read_through_both_containers_when_it_holds_a_gbs(bits: int) -> None:
    """An OpenCL container's image is the raw image of the compressed bitstream inside."""
    content = aocx(bits=bits)

    assert read(content) == Bitstream(form=BitstreamForm.AOCX, function=OPENCL_FUNCTION, interface=INTERFACE)
    assert image_of(ByteWindow.of_bytes(content), BitstreamForm.AOCX) == OPENCL_FUNCTION.encode() + b" image" * 20


def test_xclbin_says_uuid_interface_and_platform() -> None:
    """The driver gets the whole file."""
    content = xclbin(interface=INTERFACE, timestamp=1_600_000_000)

    assert read(content) == Bitstream(
        form=BitstreamForm.XCLBIN,
        function=XCLBIN_UUID,
        interface=INTERFACE,
        platform=PLATFORM,
        platform_timestamp=1_600_000_000,
    )
    assert image_of(ByteWindow.of_bytes(content), BitstreamForm.XCLBIN) == content


def test_xclbin_layout_is_the_one_that_xrt_asserts() -> None:
    """xclbin.h: axlf_header has 152 bytes behind 304, axlf_section_header has 40."""
    assert (XCLBIN_PREFIX.size, XCLBIN_HEADER.size, XCLBIN_SECTION.size) == (304, 152, 40)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no known format"),
        (b"MZ\x90\x00 a program", "no known format"),
        (gbs()[:40], "outside of its 40 bytes"),
        (patched(gbs(), 16, "<I", 0), "0 bytes of metadata"),
        (patched(gbs(), 16, "<I", 2**32 - 1), "4294967295 bytes of metadata"),
        (gbs("not-an-id"), "accelerator-type-uuid is 'not-an-id'"),
        (gbs("f" * 32), "wanted 32 hexadecimal digits that are not all 0 or f"),
        (gbs(interface=""), "interface-uuid is ''"),
        (elf({".acl.board": b"x"}), "no section .acl.fpga.bin"),
        (elf({".acl.fpga.bin": b"gibberish"}), "is no ELF file"),
        (elf({".acl.fpga.bin": elf({".other": b""})}), "has no section .acl.gbs.gz"),
        (aocx(b"not gzip at all"), "section .acl.gbs.gz"),
        (xclbin(length=10**9), "got a length of 1000000000 bytes in a file of"),
        (xclbin(length=0), "got a length of 0 bytes"),
        (xclbin(mode=4), "for emulation"),
        (xclbin(kind=4), "no section holds a bitstream"),
        (xclbin("00" * 16), "uuid is"),
        (patched(xclbin(), 304 + 144, "<I", 70_000), "70000 sections"),
        (patched(xclbin(), 456 + 32, "<Q", 2**63), "outside of its"),
    ],
)
def test_file_is_refused_with_its_fault_when_it_is_broken(content: bytes, message: str) -> None:
    """The message says where and what was wanted."""
    assert message in why(content)


def test_aocx_is_refused_when_its_image_is_cut_off() -> None:
    """The header alone is enough to be shown, and not enough to be programmed."""
    cut = aocx(gzip.compress(gbs(OPENCL_FUNCTION, image=bytes(range(256)) * 300))[:-200])

    assert isinstance(read(cut), Bitstream)
    answer = image_of(ByteWindow.of_bytes(cut), BitstreamForm.AOCX)
    assert isinstance(answer, Refusal)
    assert "cut off" in answer.reasons[0].message


def test_aocx_allocates_little_when_it_unpacks_to_very_much() -> None:
    """A compressed gigabyte of zeros is looked at as far as its header goes."""
    bomb = gzip.compress(gbs(OPENCL_FUNCTION) + bytes(64 * 1024 * 1024), compresslevel=9)
    content = aocx(bomb)

    tracemalloc.start()
    try:
        answer = read(content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert isinstance(answer, Bitstream)
    assert peak < MOST_ALLOCATED


WHOLE = st.sampled_from([gbs(), aocx(), aocx(bits=32), xclbin(), xclbin(interface=INTERFACE)])


@given(content=WHOLE, cut=st.floats(0, 1))
def test_reader_answers_when_a_file_is_cut_anywhere(content: bytes, cut: float) -> None:
    """A cut file is read or refused, and what is refused as a header has no image either."""
    answer = read(content[: int(len(content) * cut)])

    assert isinstance(answer, Bitstream | Refusal)


@given(content=WHOLE, changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=12))
def test_reader_answers_and_allocates_little_when_bytes_are_changed(
    content: bytes, changes: list[tuple[float, int]]
) -> None:
    """No number in a header makes the reader crash, read elsewhere or allocate what it says."""
    broken = bytearray(content)
    for place, value in changes:
        # Most changes where the headers are.
        broken[int(place * place * len(broken))] = value

    tracemalloc.start()
    try:
        answer = read(bytes(broken))
        form = answer.form if isinstance(answer, Bitstream) else BitstreamForm.GBS
        image = image_of(ByteWindow.of_bytes(bytes(broken)), form)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert isinstance(answer, Bitstream | Refusal)
    assert isinstance(image, bytes | Refusal)
    assert peak < MOST_ALLOCATED


@given(
    magic=st.sampled_from([b"", b"XeonFPGA\xb7GBSv001", b"\x7fELF\x02\x01\x01", b"\x7fELF\x01\x01\x01", b"xclbin2\0"]),
    rest=st.binary(max_size=600),
)
def test_reader_refuses_or_reads_when_a_file_is_noise(magic: bytes, rest: bytes) -> None:
    """What follows a right beginning may be anything."""
    assert isinstance(read(magic + rest), Bitstream | Refusal)
