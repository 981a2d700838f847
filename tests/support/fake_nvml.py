"""A libnvidia-ml of a profile, written in C and loaded by the real pynvml. A test sets the answers
of a driver's GPUs while the service under test runs. For a benchmark, `python
tests/support/fake_nvml.py FOLDER ADDRESS...` lays one down, of GPUs on an NVSwitch.

`FakeNvml` has a folder of its own with a copy of the library, so that each test loads one of its
own. The profile's lines are described in tests/data/fake_nvml/fake_nvml.c.
"""

from __future__ import annotations

import atexit
import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pynvml
import pytest

__all__ = ["FakeGpu", "FakeNvml", "fake_nvml", "needs_gcc"]

SOURCES = Path(__file__).parent.parent / "data" / "fake_nvml"

needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="gcc is not installed: the libnvidia-ml of a profile cannot be built"
)

GIB = 1 << 30
# What an idle data centre GPU without persistence shows as used: the driver's own.
IDLE_BYTES = 500 << 20
XID = 0x8


@dataclass(frozen=True, kw_only=True)
class FakeGpu:
    """One GPU of the profile."""

    address: str
    uuid: str = "GPU-11111111-2222-3333-4444-555555555555"
    name: str = "NVIDIA H100 80GB HBM3"
    minor: int = 0
    total_bytes: int = 80 * GIB
    used_bytes: int = IDLE_BYTES
    processes: tuple[tuple[int, ...], ...] = ()
    """Pid and used bytes, and of a MIG instance GI and CI, of compute processes."""
    graphics: tuple[tuple[int, int], ...] = ()
    ecc: tuple[int, int] | None = (0, 0)
    """Corrected and uncorrected errors since the driver was loaded; None: no ECC."""
    retired: int | None = None
    """Whether pages wait for their retirement; None: not supported, as on
    all GPUs that remap rows."""
    rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    clocks: int = 0
    recovery: int = 0
    mig: tuple[int, int] = (0, 0)
    mig_lines: tuple[str, ...] = ()
    """What it says of MIG (`support.fake_mig`); none: it cannot be cut."""
    links: tuple[str, ...] = ()
    """`<peer's address>`, `switch` or `down`, then up to five error counts: replay, recovery, flit
    CRC, data CRC, data ECC."""
    fabric: tuple[int, int, int] | None = None
    """State, status and health mask; None: no fabric."""
    use: tuple[int, int] | None = (0, 0)
    """Of the GPU and of its memory, in percent; these and what follows: None, not supported."""
    power: tuple[int, int] | None = (71_000, 1_000_000)
    """Milliwatts now, millijoules so far."""
    temperature: tuple[int, int] | None = (34, 40)
    frequency: tuple[int, int] | None = (345, 2619)
    """Of the multiprocessors and of the memory, in MHz."""
    pcie: tuple[int, int] | None = (0, 0)
    """Bytes sent and received."""
    nvlink: tuple[int, int] | None = None
    """KiB sent and received over all links."""
    instances: tuple[tuple[int, int, int], ...] = ()
    """What GPU instances count: GI, errors, use in percent; none: there is no performance
    monitoring."""
    error: int = 0
    refuses: tuple[tuple[str, int], ...] = ()
    """Functions by their names in the library, and what each answers."""
    events: tuple[tuple[int, ...], ...] = ()
    """Serial, type and data, and of a MIG instance GI and CI."""

    def lines(self) -> list[str]:
        """Write the GPU's part of the profile."""
        written = [
            f"gpu {self.address}",
            f"uuid {self.uuid}",
            f"name {self.name}",
            f"minor {self.minor}",
            f"memory {self.total_bytes} {self.used_bytes}",
            f"mig {int(self.mig[0])} {int(self.mig[1])}",
            "capability 9 0",
            f"architecture {pynvml.NVML_DEVICE_ARCH_HOPPER}",
            f"brand {pynvml.NVML_BRAND_NVIDIA}",
            f"rows {_words(self.rows)}",
            f"clocks {self.clocks:x}",
            f"recovery {self.recovery}",
            f"error {self.error}",
        ]
        written += self.mig_lines
        written += [f"process {_words(process)}" for process in self.processes]
        written += [f"graphics {_words(process)}" for process in self.graphics]
        written += [f"link {link}" for link in self.links]
        written += [f"refuse {function} {code}" for function, code in self.refuses]
        written += [f"event {serial} {kind:x} {_words(rest)}" for serial, kind, *rest in self.events]
        written += [f"instance {_words(instance)}" for instance in self.instances]
        written += [f"ecc {_words(self.ecc)}"] if self.ecc is not None else []
        written += [f"retired {self.retired}"] if self.retired is not None else []
        for line in ("use", "power", "temperature", "frequency", "pcie", "nvlink"):
            pair = getattr(self, line)
            written += [f"{line} {_words(pair)}"] if pair is not None else []
        written += [f"fabric {self.fabric[0]} {self.fabric[1]} {self.fabric[2]:x}"] if self.fabric is not None else []
        return written


@dataclass(eq=False)
class FakeNvml:
    """The library in a folder of its own, and its profile."""

    folder: Path
    gpus: dict[str, FakeGpu] = field(default_factory=dict)
    session: int = 0
    _serial: int = 0

    def write(self) -> None:
        """Put the profile in place, whole."""
        lines = [f"session {self.session}", "driver 580.95.05 13000"]
        lines += [line for gpu in self.gpus.values() for line in gpu.lines()]
        new = self.folder / "profile.new"
        new.write_text("\n".join(lines) + "\n", encoding="utf-8")
        new.replace(self.folder / "profile")

    def set(self, address: str, **changes: object) -> None:
        """Change a GPU; the names are those of its fields."""
        self.gpus[address] = replace(self.gpus[address], **changes)  # type: ignore[arg-type]  # names of the fields above
        self.write()

    def end_session(self, code: int) -> None:
        """Have every call answer this; 0: the session is good again."""
        self.session = code
        self.write()

    def raise_xid(self, address: str, xid: int, *instance: int) -> None:
        """Have the driver report an Xid, of a whole GPU or of an instance (GI and CI)."""
        self._serial += 1
        self.set(address, events=(*self.gpus[address].events, (self._serial, XID, xid, *instance)))


@contextmanager
def fake_nvml(folder: Path, *gpus: FakeGpu) -> Iterator[FakeNvml]:
    """Lay a library with these GPUs into a folder; pynvml forgets before and after which library it
    has loaded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(_built(), folder / "libnvidia-ml.so.1")
    library = FakeNvml(folder, {gpu.address: gpu for gpu in gpus})
    library.write()
    importlib.reload(pynvml)
    try:
        yield library
    finally:
        importlib.reload(pynvml)


@cache
def _built() -> Path:
    folder = Path(mkdtemp(prefix="fake-nvml-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "libnvidia-ml.so.1"
    options = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["gcc", *options, "-o", str(library), str(SOURCES / "fake_nvml.c"), "-ldl", "-lpthread"], check=True)
    return library


def _words(numbers: tuple[int, ...] | list[int]) -> str:
    return " ".join(map(str, numbers))


def _lay_down(folder: Path, addresses: Sequence[str]) -> None:
    folder.mkdir(parents=True)
    shutil.copy(_built(), folder / "libnvidia-ml.so.1")
    gpus = {
        address: FakeGpu(address=address, minor=minor, uuid=f"GPU-{minor}", links=("switch",) * 18, nvlink=(0, 0))
        for minor, address in enumerate(addresses)
    }
    FakeNvml(folder, gpus).write()


if __name__ == "__main__":
    _lay_down(Path(sys.argv[1]), sys.argv[2:])
