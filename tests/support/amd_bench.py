"""An AMD driver that cuts on demand, on a machine that obeys, with a journal."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from support.amd_kernel import AmdKernel
from support.journaled_bench import JournaledBench
from topobus.devicekit.pauses import Pauses
from topobus.devicekit.settings import PartitionSettings
from topobus.devicekit.verbs.journaled_verbs import Edits, JournaledWork
from topobus.gpu.amd.amd_cards import read_amd_cards
from topobus.gpu.amd.amd_on_demand import settle_mode
from topobus.gpu.config import LeftoverSettings
from topobus.gpu.host_services import GpuServices
from topobus.gpu.plugins.amd import AmdDriver
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.outcome import Refusal

__all__ = ["AmdBench"]

_REAL = Pauses()
# A switch of the machine under test takes a millisecond; a loaded builder may need a second.
_LIMIT_S = 30.0


# By which each look at a card that is stuck moves the clock: nothing more comes.
_STUCK_LOOK_S = 1.0


class AmdBench(JournaledBench[AmdDriver]):
    """One driver's life after the other on one machine."""

    def __init__(self, folder: Path, *, cards: int = 1, mode: str = "SPX") -> None:
        self.kernel = AmdKernel(folder / "machine", cards=cards, mode=mode)
        self.address = self.kernel.machine.addresses[0]
        self._pid = os.getpid()
        self._stuck_s = 0.0
        super().__init__(folder, self.kernel.follow)
        self.devices = self.discover()

    def discover(self) -> dict[str, Device]:
        """Look, as a device service does."""
        self.discovery = self.driver.discover(Tree(self.tree.settings), self.kernel.machine.machine)
        return {device.name: device for device in self.discovery.devices}

    def is_unsettled(self) -> bool:
        """Say whether amdgpu and KFD do not agree."""
        mode = self.kernel.mode(self.address)
        counts = {"SPX": 1, "DPX": 2, "QPX": 4, "CPX": 8}
        return isinstance(settle_mode(self.tree, self.address, mode, counts[mode], _REAL, _LIMIT_S), Refusal)

    def nodes(self, edits: Edits | Refusal | JournaledWork, name: str) -> list[str]:
        """Give the device nodes of one device."""
        assert isinstance(edits, Mapping), edits
        edit: ContainerEdits = edits[name]
        return [node.path for node in edit.device_nodes]

    def mode_of(self, device: Device) -> str:
        """Say in which mode a card has a device."""
        return str(device.attributes.get("partitionMode", "SPX"))

    def now(self) -> str:
        """Say in which mode the driver sees the card."""
        return read_amd_cards(Tree(self.tree.settings), [self.address])[self.address].mode

    def new_driver(self) -> AmdDriver:
        """Make a driver that cuts on demand."""
        driver = AmdDriver()
        driver.configure(
            GpuServices(partitions=PartitionSettings(on_demand=True), leftovers=LeftoverSettings(check=False))
        )
        driver.on_demand.pauses = Pauses(now=lambda: time.monotonic() + self._stuck_s, sleep=self._sleep)
        return driver

    def _sleep(self, _: float) -> None:
        """Wait until what was written is obeyed.

        In a process that is to die, whose kernel is its parent's, for a moment.
        """
        if self.kernel.is_stuck:
            self._stuck_s += _STUCK_LOOK_S
        if os.getpid() == self._pid:
            self.writes.settle()
        else:
            time.sleep(0.002)
