"""Tells a bitstream's format by its first bytes, and reads it: what it is, and what the kernel is
to be given.

Flows in: a window over a file of anybody's. Flows out: a Bitstream, or a Refusal
that says what is wrong. However long or broken the file is, at most some 200 KiB of
it are held while it is looked at.
"""

from __future__ import annotations

from topobus.fpga.bitstreams.byte_window import ByteWindow, UnreadableBitstream
from topobus.fpga.bitstreams.elf_sections import ELF_MAGIC
from topobus.fpga.bitstreams.intel_formats import GBS_MAGIC, image_of_aocx, image_of_gbs, read_aocx, read_gbs
from topobus.fpga.bitstreams.values import Bitstream, BitstreamForm
from topobus.fpga.bitstreams.xclbin import XCLBIN_MAGIC, read_xclbin
from topobus.values.outcome import Reason, Refusal

__all__ = ["image_of", "read_bitstream"]

_READERS = {GBS_MAGIC: read_gbs, ELF_MAGIC: read_aocx, XCLBIN_MAGIC: read_xclbin}


def read_bitstream(file: ByteWindow) -> Bitstream | Refusal:
    """Read what a file is.

    Errors: raises nothing for anything that a file can contain; OSError when it cannot be read.
    """
    try:
        beginning = file.read(0, min(file.size, len(GBS_MAGIC)), "file")
        for magic, read in _READERS.items():
            if beginning.startswith(magic):
                return read(file)
        raise UnreadableBitstream("no known format: wanted a GBS, an .aocx or an xclbin2 file")
    except UnreadableBitstream as err:
        return _refusal(err)


def image_of(file: ByteWindow, form: BitstreamForm) -> bytes | Refusal:
    """Give what the kernel's programming call takes: of an xclbin the whole file, else the raw
    image.

    Errors: raises nothing for anything that a file can contain; OSError when it cannot be read.
    """
    try:
        match form:
            case BitstreamForm.GBS:
                return image_of_gbs(file)
            case BitstreamForm.AOCX:
                return image_of_aocx(file)
            case BitstreamForm.XCLBIN:
                return file.read(0, file.size, "file")
    except UnreadableBitstream as err:
        return _refusal(err)


def _refusal(err: UnreadableBitstream) -> Refusal:
    return Refusal(reasons=(Reason(code="bitstream-unreadable", message=str(err)),))
