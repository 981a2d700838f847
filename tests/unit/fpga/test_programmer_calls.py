"""The kernel calls: numbers and layouts are those of the kernel's and XRT's headers, and a node
that cannot be opened leaves the region untouched.
"""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path

import pytest

from topobus.fpga.programmer import (
    DFL_FPGA_FME_PORT_PR,
    DFL_FPGA_PORT_RESET,
    FME_PORT_PR,
    ICAP_DOWNLOAD,
    XCLMGMT_IOCICAPDOWNLOAD_AXLF,
    KernelDflProgrammer,
    KernelXrtProgrammer,
    RegionUntouched,
)


class _FmePortPr(ctypes.Structure):
    """struct dfl_fpga_fme_port_pr of include/uapi/linux/fpga-dfl.h, as a C compiler lays it out."""

    _fields_ = (
        ("argsz", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("port_id", ctypes.c_uint32),
        ("buffer_size", ctypes.c_uint32),
        ("buffer_address", ctypes.c_uint64),
    )


def test_request_numbers_are_those_of_the_headers() -> None:
    """As a C compiler prints them of linux-libc-dev 6.1's linux/fpga-dfl.h, and of _IOW('X', 6, a
    struct of one pointer) of XRT's xmgmt-ioctl.h.
    """
    assert (DFL_FPGA_PORT_RESET, DFL_FPGA_FME_PORT_PR, XCLMGMT_IOCICAPDOWNLOAD_AXLF) == (0xB640, 0xB680, 0x40085806)


def test_layouts_are_those_of_a_c_compiler() -> None:
    """Each field is where the kernel reads it."""
    packed = FME_PORT_PR.pack(24, 0, 7, 4096, 0x1122334455667788)
    read = _FmePortPr.from_buffer_copy(packed)

    assert (FME_PORT_PR.size, ctypes.sizeof(_FmePortPr), ICAP_DOWNLOAD.size) == (24, 24, ctypes.sizeof(ctypes.c_void_p))
    assert (read.argsz, read.flags, read.port_id, read.buffer_size, read.buffer_address) == (
        24,
        0,
        7,
        4096,
        0x1122334455667788,
    )


def test_programmer_touches_nothing_when_a_node_is_not_there(tmp_path: Path) -> None:
    """The error says which node."""
    node = str(tmp_path / "dfl-port.0")

    with pytest.raises(RegionUntouched) as program:
        KernelDflProgrammer().program(str(tmp_path / "dfl-fme.0"), node, 0, b"image")
    with pytest.raises(RegionUntouched) as reset:
        KernelDflProgrammer().reset(node)
    with pytest.raises(RegionUntouched):
        KernelXrtProgrammer().program(str(tmp_path / "xclmgmt1"), b"image")

    assert {(err.value.errno, err.value.filename) for err in (program, reset)} == {(errno.ENOENT, node)}


def test_programmer_fails_when_a_node_is_no_card(tmp_path: Path) -> None:
    """A kernel that does not know the call says so (ENOTTY), and the call is really made."""
    nodes = [tmp_path / "dfl-fme.0", tmp_path / "dfl-port.0"]
    for node in nodes:
        node.touch()

    with pytest.raises(OSError, match=r"dfl-fme\.0") as program:
        KernelDflProgrammer().program(str(nodes[0]), str(nodes[1]), 0, b"image")
    with pytest.raises(OSError, match=r"dfl-port\.0") as reset:
        KernelDflProgrammer().reset(str(nodes[1]))

    assert {program.value.errno, reset.value.errno} == {errno.ENOTTY}
