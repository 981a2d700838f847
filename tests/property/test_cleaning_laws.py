"""A law of clean devices, for what is programmed, given to virtual machines and brought back:
nobody is given or offered one between its release and the success of its cleaning.

Cleaning and bringing back fail so many times, and processes die in the middle of their writes; the
next one begins with the same journal. (GPUs' leftovers: `test_gpu_cleaning_laws`.)
"""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.bitstream_files import gbs
from support.cleaning_histories import ACTS, VISITS, CleaningHistory, Hardware
from support.dfl_bench import asking
from support.fpga_cards import BLANK, FileDflProgrammer, add, dfl_machine, port_file
from support.kernel_writes import KernelWrites
from support.laws import examples
from support.mortal_journal import Fate
from support.passthrough_bench import ALLOWED, ASKED, FIRST, PassthroughBench
from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.driver import DeviceDriver
from topobus.devicekit.passthrough.function_switch import FunctionSwitch
from topobus.devicekit.settings import PassthroughSettings
from topobus.fpga.config import FunctionSettings
from topobus.fpga.host_services import FpgaServices
from topobus.fpga.plugins.intel_dfl import IntelDflDriver
from topobus.gpu.plugins.intel import IntelDriver
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.errors import HardwareError
from topobus.values.outcome import Reason, Refusal


class _Faults:
    """What fails of a device's hardware."""

    failures = 0
    refusals = 0

    def take_failure(self) -> bool:
        """Take one of the failures of cleaning that are due."""
        is_due = self.failures > 0
        self.failures -= is_due
        return is_due

    def take_refusal(self) -> bool:
        """Take one of the failures of bringing it back that are due."""
        is_due = self.refusals > 0
        self.refusals -= is_due
        return is_due


class _Port(FileDflProgrammer):
    """A recorded card's programmer, by one process: its calls fail, or are that process's last."""

    def __init__(self, card: _Card, fate: Fate) -> None:
        super().__init__(card.root)
        self._card, self._fate = card, fate

    def program(self, engine: str, port_node: str, port: int, image: bytes) -> None:
        """Load an image, or leave the region unreadable."""

        def write() -> None:
            self.error = errno.EIO if self._card.take_refusal() else 0
            super(_Port, self).program(engine, port_node, port, image)
            self._card.note()

        self._fate.write(write)

    def reset(self, port_node: str) -> None:
        """Reset the port."""

        def write() -> None:
            if self._card.take_failure():
                raise OSError(errno.EIO, os.strerror(errno.EIO), port_node)
            super(_Port, self).reset(port_node)
            self._card.note(was_reset=True)

        self._fate.write(write)


class _Card(_Faults):
    """A DFL card: it is clean when its port was reset after its user and its region has the blank
    function.
    """

    def __init__(self, folder: Path) -> None:
        self.config = asking("matrix")[0]
        self.passthrough = PassthroughSettings()
        self.root = folder / "machine"
        self._store = folder / "store"
        dfl_machine(self.root)
        add(self._store, gbs(), "matrix")
        add(self._store, gbs(BLANK), "blank", is_blank=True)
        self.tree = Tree(HardwareSettings(root=str(self.root)))
        self.is_stained = self._was_reset = False
        self.device = self.begin(Fate(1)).discover(self.tree, read_machine(self.tree, "n1")).devices[0]

    def stain(self) -> None:
        """Let somebody use it."""
        self.is_stained, self._was_reset = True, False

    def note(self, *, was_reset: bool = False) -> None:
        """Look whether it is clean now."""
        self._was_reset = self._was_reset or was_reset
        if self._was_reset and port_file(self.root, "dfl-port.0", "afu_id").read_text(encoding="ascii") == BLANK:
            self.is_stained = False

    def begin(self, fate: Fate) -> DeviceDriver:
        """Start the driver anew."""
        driver = IntelDflDriver(_Port(self, fate))
        driver.configure(FpgaServices(functions=FunctionSettings(store=str(self._store)), can_program=True))
        return driver

    def settle(self) -> None:
        """Return at once: nothing is under way."""


class _WipingDriver(IntelDriver):
    """The GPU driver that cleans besides, when its kernel driver has the function again.

    The wipe alone is the test's.
    """

    def __init__(self, function: _Function, fate: Fate) -> None:
        super().__init__()
        self._function, self._fate = function, fate

    def clean(self, tree: Tree, device: Device, record: DeviceRecord) -> Refusal | None:
        """Wipe it, or say why not."""
        record.intend("wipe")
        faults: list[Reason] = []
        self._fate.write(lambda: faults.extend(self._function.wipe()))
        if faults:
            return Refusal(reasons=tuple(faults))
        record.undone("wipe")
        return None


class _Function(_Faults):
    """A PCI function that goes to VFIO and comes back: a GPU is clean when it was wiped after that,
    a NIC when its kernel driver has begun with it anew.
    """

    def __init__(self, folder: Path, kernel: KernelWrites, device_class: str) -> None:
        self._bench = PassthroughBench(folder / "machine", kernel, device_class)
        self._fates: dict[int, Fate] = {}
        self._settings: list[HardwareSettings] = []
        self._bind_file = f"sys/bus/pci/drivers/{self._bench.own_driver}/bind"
        self.config = ASKED
        self.passthrough = msgspec.structs.replace(ALLOWED, switch_s=1e9)
        self.tree = self._bench.tree
        self.device = self._bench.devices[self._bench.name(FIRST)]
        self.is_stained = False

    def stain(self) -> None:
        """Let a virtual machine use it."""
        self.is_stained = True

    def wipe(self) -> list[Reason]:
        """Wipe a GPU; why not."""
        assert self._bench.drivers.driver_of(FIRST) == self._bench.own_driver, (
            "a function was cleaned before it was back"
        )
        if self.take_failure():
            return [Reason(code="wipe-failed", message="the wipe did not end")]
        self.is_stained = False
        return []

    def begin(self, fate: Fate) -> DeviceDriver:
        """Start the driver anew; the settings of its tree tell whose writes are whose."""
        settings = HardwareSettings(root=str(self._bench.root))
        self._settings.append(settings)
        self._fates[id(settings)] = fate
        self.tree = Tree(settings)
        return _WipingDriver(self, fate) if self._bench.device_class == "gpu" else PciNetdevDriver()

    def settle(self) -> None:
        """Return when the kernel has done what it was told."""
        self._bench.kernel.settle()

    def write(self, switch: FunctionSwitch, file: str, write: Callable[[], None]) -> None:
        """Have a process write one of the kernel's files.

        Its own driver may refuse to take the function back.
        """

        def bind() -> None:
            if file == self._bind_file and self.take_refusal():
                raise HardwareError(f"{file}: cannot be written: {os.strerror(errno.ENODEV)}")
            write()
            if file == self._bind_file and self._bench.device_class == "nic":
                self.is_stained = False

        self._fates[id(switch.tree.settings)].write(bind)


@contextmanager
def _hardware(kind: str) -> Iterator[tuple[Hardware, Path]]:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        (folder / "machine").mkdir()
        if kind == "fpga-port":
            yield _Card(folder), folder / "journal"
            return
        with KernelWrites(folder / "machine") as kernel:
            function = _Function(folder, kernel, kind.partition("-")[0])
            write = FunctionSwitch._write
            patch.setattr(
                FunctionSwitch,
                "_write",
                lambda switch, file, text: function.write(switch, file, lambda: write(switch, file, text)),
            )
            yield function, folder / "journal"


def _play(kind: str, acts: Sequence[tuple[str, int]]) -> CleaningHistory:
    with _hardware(kind) as (hardware, journal_folder):
        history = CleaningHistory(hardware, journal_folder)
        asyncio.run(history.run(acts))
        return history


KINDS = ["fpga-port", "gpu-passthrough", "nic-passthrough"]


@pytest.mark.parametrize("kind", KINDS)
@example(parts=[[("doom", 1), ("come", 1), ("doom", 2), ("come", 0)]])
@example(parts=[[("come", 0), ("refuse", 3), ("go", 0), ("come", 1)]])
@settings(max_examples=examples(15), deadline=None)
@given(parts=st.lists(st.one_of(VISITS, st.lists(ACTS, max_size=4)), min_size=1, max_size=3))
def test_device_is_given_and_offered_to_nobody_whose_cleaning_has_not_succeeded(
    kind: str, parts: list[list[tuple[str, int]]]
) -> None:
    """Whatever fails, and whoever dies; and once nothing fails any more, somebody gets it."""
    _play(kind, [act for part in parts for act in part])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", range(1, 8, 2))
def test_history_with_a_death_at_a_known_step_of_a_release_has_one(kind: str, step: int) -> None:
    """The law's deaths are worth their name."""
    assert _play(kind, [("come", 0), ("doom", step), ("go", 0), ("come", 1)]).deaths == 1


@pytest.mark.parametrize("kind", ["fpga-port", "gpu-passthrough"])
def test_device_is_dirty_to_everybody_while_its_cleaning_fails(kind: str) -> None:
    """The law looks at released devices that are not clean: here it does, and the other owner is
    refused.
    """
    history = _play(kind, [("come", 0), ("fail", 2), ("go", 0), ("come", 1), ("wait", 0)])

    assert history.dirty_seen >= 2
