"""A driver that makes virtual functions on demand, on a card that obeys, with a journal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from support.journaled_bench import JournaledBench
from support.sriov_kernel import PHYSICAL, SriovKernel
from topobus.devicekit.driver import DeviceDriver, HostServices
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.pauses import Pauses
from topobus.devicekit.settings import FunctionRule, PartitionSettings
from topobus.devicekit.verbs.journaled_verbs import Edits
from topobus.sysfs.tree import Tree
from topobus.values.counters import CounterSet
from topobus.values.device import Device
from topobus.values.outcome import Refusal
from topobus.values.partitions import partitioned
from topobus.values.pools import Condition

__all__ = ["COUNT", "SriovBench"]

COUNT = 4
# By which each look at a card that does nothing more moves the clock.
_IDLE_LOOK_S = 1.0


class SriovBench(JournaledBench[DeviceDriver]):
    """One driver's life after the other on one machine."""

    def __init__(
        self,
        folder: Path,
        make_driver: Callable[[], DeviceDriver],
        *,
        when_idle: Literal["keep", "remove"] = "keep",
        **card: Any,
    ) -> None:
        self.kernel = SriovKernel(folder / "machine", **card)
        self.kernel.is_slow = True
        self.rule = FunctionRule(
            where=(Condition(field="pci", equals=str(PHYSICAL)),), count=COUNT, when_idle=when_idle
        )
        self._make_driver = make_driver
        self._pid = os.getpid()
        self._idle_s = 0.0
        self.counter_sets: tuple[CounterSet, ...] = ()
        super().__init__(folder, self.kernel.follow)
        self.look()

    def restart(self) -> None:
        """Begin a new life: a new driver that reads the journal of the one before, and looks."""
        super().restart()
        self.look()

    def look(self) -> dict[str, Device]:
        """Look, and have the devices counted, as a device service does."""
        self.discovery = self.driver.discover(Tree(self.tree.settings), self.kernel.machine)
        devices = tuple(self.discovery.devices)
        counted, self.counter_sets, faults = partitioned(devices, ())
        assert faults == {}
        self.devices = {device.name: device for device in counted}
        return self.devices

    def unprepare(self, owner: str, *names: str, journal: Journal | None = None) -> None:
        """Give devices back, and see what came of it."""
        super().unprepare(owner, *names, journal=journal)
        if journal is None:
            self.writes.settle()

    def undo_all(self) -> None:
        """Undo what is half done, and see what came of it."""
        super().undo_all()
        self.writes.settle()

    def variable(self, edits: Edits | Refusal, name: str) -> str:
        """Return a container's variable for one device."""
        assert isinstance(edits, Mapping), edits
        return edits[name].env[f"TOPOBUS_{name.upper().replace('-', '_')}"]

    def new_driver(self) -> DeviceDriver:
        """Make a driver that may make these functions."""
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
