"""Recorded FPGA cards that can be programmed: file-backed programmers replace only the kernel's
ioctl, and change what the recorded tree shows.

A programmer finds the region of a device node in the recorded tree, notes each call in a file
(which forks and later processes read as well), and leaves the region unreadable while it writes, as
hardware does.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

from support.bitstream_files import INTERFACE
from topobus.fpga.bitstreams.byte_window import ByteWindow
from topobus.fpga.bitstreams.formats import read_bitstream
from topobus.fpga.bitstreams.store import StoreEntry, add_bitstream
from topobus.fpga.programmer import RegionUntouched
from topobus.simulation.machines import RecordedMachine, build
from topobus.values.outcome import Refusal

__all__ = [
    "BLANK",
    "FileDflProgrammer",
    "FileProgrammer",
    "FileXrtProgrammer",
    "add",
    "dfl_machine",
    "files_of",
    "port_file",
    "xilinx_machine",
]

BLANK = "b1a4c0de" * 4
_PROFILE = Path(__file__).resolve().parents[1] / "data" / "profiles" / "fpga-cards.toml"
_CRASHED = "f" * 32


class FileProgrammer:
    """What both programmers share: the list of calls, and the failures that a test sets."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._log = root.parent / "programmer.log"
        self.dies_midway = False
        """Kill this process (SIGKILL) when half of the image is written."""
        self.error = 0
        """Fail with this number when half of the image is written."""
        self.halfway: Callable[[], object] = lambda: None
        """Called when half of the image is written."""
        self.is_open = False
        """Somebody has the port open: nothing is touched."""

    @property
    def calls(self) -> list[str]:
        """List what was called since the test began, in all processes."""
        return self._log.read_text(encoding="ascii").split() if self._log.exists() else []

    def _note(self, call: str) -> None:
        with self._log.open("a", encoding="ascii") as log:
            log.write(f"{call}\n")

    def _begin(self, path: str, shown: Path, halfway: str) -> None:
        if self.is_open:
            raise RegionUntouched(errno.EBUSY, "Device or resource busy", path)
        shown.write_text(halfway, encoding="ascii")
        self.halfway()
        if self.dies_midway:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.error:
            raise OSError(self.error, os.strerror(self.error), path)


class FileDflProgrammer(FileProgrammer):
    """Writes the port's afu_id, where the kernel would load an image of that function."""

    def program(self, engine: str, port_node: str, port: int, image: bytes) -> None:
        """Load an image."""
        assert Path(engine).exists(), engine
        shown = port_file(self.root, Path(port_node).name, "afu_id")
        assert int(port_file(self.root, Path(port_node).name, "id").read_text(encoding="ascii")) == port
        self._begin(port_node, shown, _CRASHED)
        shown.write_bytes(image[:32])
        self._note("program")

    def reset(self, port_node: str) -> None:
        """Reset a port: its errors go."""
        if self.is_open:
            raise RegionUntouched(errno.EBUSY, "Device or resource busy", port_node)
        port_file(self.root, Path(port_node).name, "errors/errors").write_text("0x0\n", encoding="ascii")
        self._note("reset")


class FileXrtProgrammer(FileProgrammer):
    """Notes the uuid in the management function's folder.

    The user function shows another one only as XRT does, once a user has opened the card.
    """

    def program(self, management: str, image: bytes) -> None:
        """Load an xclbin."""
        bitstream = read_bitstream(ByteWindow.of_bytes(image))
        assert not isinstance(bitstream, Refusal), bitstream
        shown = self.loaded_file(management)
        self._begin(management, shown, "")
        shown.write_text(bitstream.function, encoding="ascii")
        self._note("program")

    def loaded_file(self, management: str) -> Path:
        """Return the file with what the hardware has loaded."""
        assert Path(management).exists(), management
        instance = Path(management).name.removeprefix("xclmgmt")
        (folder,) = [
            path.parent
            for path in self.root.glob("sys/bus/pci/devices/*/instance")
            if path.read_text(encoding="ascii").strip() == instance
        ]
        return folder / "test_loaded_uuid"


def dfl_machine(into: Path, afu_id: str = BLANK) -> RecordedMachine:
    """Build a machine with a DFL card whose region has an interface id and a function."""
    machine = build(_PROFILE, into)
    port_file(into, "dfl-port.0", "afu_id").write_text(afu_id, encoding="ascii")
    (engine,) = into.glob("sys/class/fpga_region/*/dfl-fme.0")
    region = engine / "dfl-fme-region.3/fpga_region/region1"
    region.mkdir(parents=True)
    (region / "compat_id").write_text(INTERFACE, encoding="ascii")
    return machine


def xilinx_machine(into: Path) -> RecordedMachine:
    """Build a machine with an Alveo card."""
    return build(_PROFILE, into)


def port_file(root: Path, port: str, name: str) -> Path:
    """Find a file of a port."""
    (folder,) = root.glob(f"sys/class/fpga_region/*/{port}")
    return folder / name


def files_of(folders: Iterable[Path]) -> dict[str, bytes]:
    """Give all files below some folders."""
    return {
        str(path): path.read_bytes()
        for folder in folders
        for path in sorted(folder.resolve().rglob("*"))
        if path.is_file()
    }


def add(
    store: Path, content: bytes, name: str, namespaces: tuple[str, ...] = ("*",), *, is_blank: bool = False
) -> StoreEntry:
    """Add a bitstream of this content to a store."""
    store.mkdir(parents=True, exist_ok=True)
    source = store.parent / f"{name}.bin"
    source.write_bytes(content)
    added = add_bitstream(store, source, name=name, namespaces=namespaces, is_blank=is_blank)
    assert isinstance(added, StoreEntry), added
    return added
