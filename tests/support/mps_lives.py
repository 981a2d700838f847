"""Consecutive processes of the gpu service over the same GPUs, journal and MPS daemons, each killed
where a test wants (see `support.mortal_gpu`).
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from support.device_bench import NODE, PROFILES
from support.fake_mps import FakeMps
from support.lives import LIMIT_S, Lives
from topobus.bus.bus import Bus
from topobus.devicekit.settings import DriverSettings, JournalSettings
from topobus.engine.health.health_machine import HealthSettings
from topobus.formats.messages.catalogue import HEALTH, INVENTORY, MACHINE, PREPARE, UNPREPARE
from topobus.formats.messages.messages import HealthEvent, Prepared, PrepareRequest, UnprepareRequest
from topobus.gpu.config import GpuSettings, LeftoverSettings, MpsSettings
from topobus.simulation.machines import build
from topobus.sysfs.driver_files import DriverFilesSettings
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Inventory
from topobus.values.request import Owner, OwnerKind

__all__ = ["OTHER", "OWNER", "MpsLives", "check_prepared"]

OWNER = Owner(kind=OwnerKind.CLAIM, name="claim", uid="u1")
OTHER = Owner(kind=OwnerKind.CLAIM, name="other", uid="u2")


class MpsLives(Lives):
    """One process after the other, and what the gateway would ask it."""

    def __init__(self, bus: Bus, url: str, root: Path, **settings: Any) -> None:
        self.bus = bus
        self.recorded = build(PROFILES / "h100-pair.toml", root / "machine")
        self.first, self.second = (
            f"gpu-{address.replace(':', '-').replace('.', '-')}" for address in self.recorded.pci("h100")
        )
        self.mps = FakeMps(root / "driver", root / "mps")
        self.journal = root / "journal"
        hardware = HardwareSettings(
            root=str(self.recorded.root),
            rescan_s=0.2,
            driver_files=DriverFilesSettings(root=str(root / "driver"), bring="never"),
        )
        self._tree = Tree(hardware)
        shipped = GpuSettings(
            node=NODE,
            hardware=hardware,
            drivers=DriverSettings(allow=("nvidia",), timeout_s=LIMIT_S),
            health=HealthSettings(poll_s=0.05, hold_s=0.2),
            journal=JournalSettings(dir=str(self.journal)),
            leftovers=LeftoverSettings(check=False),
            mps=MpsSettings(owned=True, state_dir=str(self.mps.state_dir), start_s=LIMIT_S),
        )
        super().__init__("mortal_gpu", msgspec.structs.replace(shipped, **settings), url, root)
        self._asked = 0

    async def publish_machine(self, bus: Bus) -> None:
        """Do discovery's work."""
        machine = read_machine(self._tree, NODE)
        await bus.put(MACHINE, msgspec.structs.replace(machine, generation=1), node=NODE)

    async def inventory(self, wanted: Callable[[Inventory], bool]) -> Inventory:
        """Wait for an inventory as wanted."""
        async with asyncio.timeout(LIMIT_S):
            async for change in self.bus.watch(INVENTORY, node=NODE, device_class="gpu"):
                if change.value is not None and wanted(change.value):
                    return change.value
        raise AssertionError("the watch ended")

    async def event(self, wanted: Callable[[HealthEvent], bool]) -> HealthEvent:
        """Wait for a wanted health event. Old ones count as well."""
        async with asyncio.timeout(LIMIT_S):
            async for received in self.bus.follow(HEALTH, node=NODE, device_class="gpu"):
                if wanted(received.value):
                    return received.value
        raise AssertionError("the stream ended")

    async def prepare_once(
        self, owner: Owner = OWNER, *devices: str, shares: dict[str, dict[str, int]] | None = None
    ) -> None:
        """Ask a process that may die of it."""
        await self.try_once(lambda: self._prepare(owner, devices, shares or {}))

    async def prepare(
        self,
        owner: Owner = OWNER,
        *devices: str,
        strategy: str = "MPS",
        shares: dict[str, dict[str, int]] | None = None,
    ) -> Any:
        """Ask until it answers, and return the result."""
        return await self.answer_to(lambda: self._prepare(owner, devices, shares or {}, strategy))

    async def unprepare_once(self, owner: Owner = OWNER, *devices: str) -> None:
        """Ask a process that may die of it."""
        await self.try_once(lambda: self._unprepare(owner, devices))

    async def unprepare(self, owner: Owner = OWNER, *devices: str) -> Any:
        """Ask until it answers, and return the refusal."""
        return await self.answer_to(lambda: self._unprepare(owner, devices))

    def reboot(self) -> None:
        """Do to a node whose service has ended what a reboot does: no process is left, /run is
        empty, GPUs are in their usual mode.
        """
        self.mps.end_all()
        shutil.rmtree(self.mps.state_dir)
        self.mps.reset_modes()

    def journals(self) -> list[str]:
        """Name the files in the journal, half-written ones too."""
        return (
            sorted(path.name for path in self.journal.iterdir() if path.name != "lock") if self.journal.is_dir() else []
        )

    def check_nothing_left(self, at: str = "") -> None:
        """Promise: no process, no folder, no compute mode, no line in the journal."""
        assert (self.mps.pids(), self.mps.folders(), self.mps.modes(), self.journals()) == ([], [], {"Default"}, []), at

    async def _prepare(
        self, owner: Owner, devices: tuple[str, ...], shares: dict[str, dict[str, int]], strategy: str = "MPS"
    ) -> Any:
        config = (
            ({"apiVersion": "topobus.dev/v1", "kind": "SharingParameters", "strategy": strategy},) if strategy else ()
        )
        self._asked += 1
        request = PrepareRequest(
            op_id=f"op-{self._asked}",
            owner=owner,
            devices=devices or (self.first, self.second),
            config=config,
            shares=shares,
        )
        return (await self.bus.ask(PREPARE, request, timeout_s=LIMIT_S, node=NODE, device_class="gpu")).result

    async def _unprepare(self, owner: Owner, devices: tuple[str, ...]) -> Any:
        self._asked += 1
        request = UnprepareRequest(op_id=f"op-{self._asked}", owner=owner, devices=devices or (self.first, self.second))
        return (await self.bus.ask(UNPREPARE, request, timeout_s=LIMIT_S, node=NODE, device_class="gpu")).refusal


def check_prepared(result: object, at: str = "") -> Prepared:
    """Promise: it is prepared."""
    assert isinstance(result, Prepared), (at, result)
    return result
