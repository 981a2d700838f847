"""Recognises a bitstream's format by its first bytes, and reads its header and the image for the
kernel.

The file may come from anybody. However long or broken it is, reading its header holds at most some
200 KiB of it in memory.
"""

from __future__ import annotations

from topobus.fpga.bitstreams.byte_window import ByteWindow, UnreadableBitstream
from topobus.fpga.bitstreams.intel_formats import ELF_MAGIC, GBS_MAGIC, image_of_aocx, image_of_gbs, read_aocx, read_gbs
from topobus.fpga.bitstreams.values import Bitstream, BitstreamForm
from topobus.fpga.bitstreams.xclbin import XCLBIN_MAGIC, read_xclbin
from topobus.values.outcome import Refusal, refuse

__all__ = ["image_of", "read_bitstream"]

_READERS = {GBS_MAGIC: read_gbs, ELF_MAGIC: read_aocx, XCLBIN_MAGIC: read_xclbin}


def read_bitstream(file: ByteWindow) -> Bitstream | Refusal:
    """Read which function a file holds, and which region it fits.

    Errors: raises nothing for anything that a file can contain, and returns a Refusal with what is
    wrong; raises OSError when the file cannot be read.
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
    """Return what the kernel's programming call takes: the whole file for an xclbin, else the raw
    image.

    Errors: raises nothing for anything that a file can contain, and returns a Refusal with what is
    wrong; raises OSError when the file cannot be read.
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
    return refuse("bitstream-unreadable", str(err))
