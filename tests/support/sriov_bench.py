"""A driver that makes virtual functions on demand, on a card that obeys, with a journal: what a
device service does with it, without one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from support.kernel_writes import KernelWrites
from support.sriov_kernel import PHYSICAL, SriovKernel
from topobus.devicekit.driver import DeviceDriver, HostServices, PrepareContext
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.pauses import Pauses
from topobus.devicekit.settings import FunctionRule, PartitionSettings
from topobus.devicekit.verbs.journaled_verbs import Edits, JournaledVerbs, JournaledWork
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.counters import CounterSet
from topobus.values.device import Device
from topobus.values.outcome import Refusal
from topobus.values.partitions import partitioned
from topobus.values.pools import Condition
from topobus.values.request import Owner, OwnerKind

__all__ = ["COUNT", "SriovBench"]

COUNT = 4
# By which each look at a card that does nothing more moves the clock.
_IDLE_LOOK_S = 1.0


class SriovBench:
    """One driver's life after the other on one machine."""

    def __init__(
        self,
        folder: Path,
        make_driver: Callable[[], DeviceDriver],
        *,
        when_idle: Literal["keep", "remove"] = "keep",
        **card: Any,
    ) -> None:
        self.root = folder / "machine"
        self.kernel = SriovKernel(self.root, **card)
        self.kernel.is_slow = True
        self.tree = Tree(HardwareSettings(root=str(self.root)))
        self.writes = KernelWrites(self.root)
        self.journal = Journal(folder / "journal")
        self.rule = FunctionRule(
            where=(Condition(field="pci", equals=str(PHYSICAL)),), count=COUNT, when_idle=when_idle
        )
        self._make_driver = make_driver
        self._pid = os.getpid()
        self._idle_s = 0.0
        self.driver = self._new_driver()
        self.devices: dict[str, Device] = {}
        self.counter_sets: tuple[CounterSet, ...] = ()
        self.look()

    def __enter__(self) -> Self:
        """Begin to obey."""
        self.writes.__enter__()
        self.kernel.follow(self.writes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End."""
        self.journal.close()
        self.writes.__exit__(kind, error, traceback)

    def restart(self) -> None:
        """Begin a new life: a new driver that reads the journal of the one before, and looks."""
        self.journal.close()
        self.journal = Journal(self.journal.folder)
        self.journal.load()
        self.driver = self._new_driver()
        self.look()

    def look(self) -> dict[str, Device]:
        """Look, and have the devices counted, as a device service does."""
        self.discovery = self.driver.discover(Tree(self.tree.settings), self.kernel.machine)
        devices = tuple(self.discovery.devices)
        counted, self.counter_sets, faults = partitioned(devices, ())
        assert faults == {}
        self.devices = {device.name: device for device in counted}
        return self.devices

    def prepare(
        self, owner: str, *names: str, journal: Journal | None = None, config: Sequence[dict[str, Any]] = ()
    ) -> Edits | Refusal | JournaledWork:
        """Ask for devices."""
        devices = [self.devices[name] for name in names]
        context = PrepareContext(owner=_owner(owner), config=tuple(config))
        return JournaledVerbs(journal or self.journal, self.driver, self.tree).prepare(devices, context, ())

    def get(
        self, owner: str, *names: str, journal: Journal | None = None, config: Sequence[dict[str, Any]] = ()
    ) -> Edits | Refusal:
        """Ask for devices, and wait for long work."""
        answer = self.prepare(owner, *names, journal=journal, config=config)
        return answer.run(lambda: True) if isinstance(answer, JournaledWork) else answer

    def unprepare(self, owner: str, *names: str, journal: Journal | None = None) -> None:
        """Give devices back, and see what came of it."""
        devices = [self.devices[name] for name in names]
        JournaledVerbs(journal or self.journal, self.driver, self.tree).unprepare(
            devices, PrepareContext(owner=_owner(owner))
        )
        if journal is None:
            self.writes.settle()

    def undo_all(self) -> None:
        """Undo what is half done, as a start does, and release what is whole."""
        for entry in list(self.journal.entries.values()):
            for owner in entry.owners:
                JournaledVerbs(self.journal, self.driver, self.tree).undo_prepare(entry.device, owner.owner)
        self.writes.settle()

    def variable(self, edits: Edits | Refusal, name: str) -> str:
        """Return a container's variable for one device."""
        assert isinstance(edits, Mapping), edits
        return edits[name].env[f"TOPOBUS_{name.upper().replace('-', '_')}"]

    def _new_driver(self) -> DeviceDriver:
        driver = self._make_driver()
        driver.configure(HostServices(partitions=PartitionSettings(virtual_functions=(self.rule,))))
        assert driver.on_demand_functions is not None
        driver.on_demand_functions.cuts.pauses = Pauses(now=lambda: time.monotonic() + self._idle_s, sleep=self._sleep)
        return driver

    def _sleep(self, _: float) -> None:
        """Wait until what was written is obeyed, and the next step after it is done.

        In a process that is to die, whose kernel is its parent's, for a moment.
        """
        if os.getpid() != self._pid:
            time.sleep(0.002)
            self.kernel.go_on()
            return
        self.writes.settle()
        if not self.kernel.go_on():
            self._idle_s += _IDLE_LOOK_S


def _owner(name: str) -> Owner:
    return Owner(kind=OwnerKind.CLAIM, name=name, uid=f"uid-{name}")
