"""Consecutive processes of the gpu service over the same GPUs, journal and MPS daemons, each killed
where a test wants (see `support.mortal_gpu`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from support.device_bench import LIMIT_S, NODE, PROFILES
from support.fake_mps import FakeMps
from support.mortal_hands import READY
from support.whole_files import write_whole
from topobus.bus.bus import Bus
from topobus.devicekit.settings import DriverSettings, JournalSettings
from topobus.engine.health.health_machine import HealthSettings
from topobus.formats.messages.catalogue import HEALTH, INVENTORY, MACHINE, PREPARE, UNPREPARE
from topobus.formats.messages.messages import HealthEvent, Prepared, PrepareRequest, UnprepareRequest
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.gpu.config import GpuSettings, LeftoverSettings, MpsSettings
from topobus.simulation.machines import build
from topobus.sysfs.driver_files import DriverFilesSettings
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Inventory
from topobus.values.errors import PeerUnavailable
from topobus.values.request import Owner, OwnerKind

__all__ = ["OTHER", "OWNER", "MpsLives", "check_prepared"]

OWNER = Owner(kind=OwnerKind.CLAIM, name="claim", uid="u1")
OTHER = Owner(kind=OwnerKind.CLAIM, name="other", uid="u2")
_TESTS = Path(__file__).resolve().parent.parent


class MpsLives:
    """One process after the other, and what the gateway would ask it."""

    def __init__(self, bus: Bus, url: str, root: Path, **settings: Any) -> None:
        self.bus, self.url = bus, url
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
        self._settings = root / "settings.json"
        self._settings.write_bytes(msgspec.json.encode(msgspec.structs.replace(shipped, **settings)))
        self._order, self._steps = root / "order", root / "steps"
        self._steps.touch()
        self._process: asyncio.subprocess.Process | None = None
        self._doomed_step = 0
        self._asked = 0

    async def publish_machine(self, bus: Bus) -> None:
        """Do discovery's work."""
        machine = read_machine(self._tree, NODE)
        await bus.put(MACHINE, msgspec.structs.replace(machine, generation=1), node=NODE)

    async def start(self, order: str = "nothing 0") -> bool:
        """Start one, and wait until it answers. False when it died before, as ordered."""
        write_whole(self._order, order)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "support.mortal_gpu", str(self._settings), self.url, str(self._order), str(self._steps),  # noqa: E501
            env={**os.environ, "PYTHONPATH": str(_TESTS)}, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
        )  # fmt: skip
        assert self._process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            async for line in self._process.stdout:
                if line.decode().strip() == READY:
                    return True
            assert await self._process.wait() == -signal.SIGKILL
        return False

    def doom(self, verb: str, step: int) -> None:
        """Let the process die at a step of the next such verb."""
        self._doomed_step = step
        self._steps.write_text("", encoding="utf-8")
        write_whole(self._order, f"{verb} {step}")

    async def start_doomed(self, step: int) -> bool:
        """Start one that dies at a step of its start; False when it died."""
        self.doom("start", step)
        return await self.start(f"start {step}")

    async def died(self) -> bool:
        """Say whether it died, now that the verb is over.

        False means that the verb had fewer steps.
        """
        assert self._process is not None
        if len(self._log()) < self._doomed_step:
            write_whole(self._order, "nothing 0")
            return False
        async with asyncio.timeout(LIMIT_S):
            assert await self._process.wait() == -signal.SIGKILL
        return True

    def where(self) -> str:
        """Name the step at which it died."""
        return (self._log() or ["before any step"])[-1]

    async def stop(self) -> None:
        """Kill the present one."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

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
        """Ask a process that may die of it; long work is asked for again until it answers."""
        try:
            while isinstance(await self._prepare(owner, devices, shares or {}), Accepted):
                continue
        except PeerUnavailable:
            return

    async def prepare(
        self,
        owner: Owner = OWNER,
        *devices: str,
        strategy: str = "MPS",
        shares: dict[str, dict[str, int]] | None = None,
    ) -> Any:
        """Ask as the gateway does, again while there is no answer or work continues, and return the
        result.
        """
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    result = await self._prepare(owner, devices, shares or {}, strategy)
                except PeerUnavailable:
                    continue
                if not isinstance(result, Accepted):
                    return result
        raise AssertionError("prepare")

    async def unprepare_once(self, owner: Owner = OWNER, *devices: str) -> None:
        """Ask a process that may die of it."""
        try:
            await self._unprepare(owner, devices)
        except PeerUnavailable:
            return

    async def unprepare(self, owner: Owner = OWNER, *devices: str) -> Any:
        """Ask as the gateway does, again while there is no answer, and return the refusal."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    return await self._unprepare(owner, devices)
                except PeerUnavailable:
                    continue
        raise AssertionError("unprepare")

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

    def _log(self) -> list[str]:
        return self._steps.read_text(encoding="utf-8").splitlines()

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
        return (
            await self._until_dead(self.bus.ask(PREPARE, request, timeout_s=LIMIT_S, node=NODE, device_class="gpu"))
        ).result

    async def _unprepare(self, owner: Owner, devices: tuple[str, ...]) -> Any:
        self._asked += 1
        request = UnprepareRequest(op_id=f"op-{self._asked}", owner=owner, devices=devices or (self.first, self.second))
        return (
            await self._until_dead(self.bus.ask(UNPREPARE, request, timeout_s=LIMIT_S, node=NODE, device_class="gpu"))
        ).refusal

    async def _until_dead(self, asking: Any) -> Any:
        """Wait for the answer, or for the end of who would give it."""
        assert self._process is not None
        answer, end = asyncio.ensure_future(asking), asyncio.ensure_future(self._process.wait())
        done, pending = await asyncio.wait({answer, end}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if answer in done:
            return answer.result()
        raise PeerUnavailable("it died")


def check_prepared(result: object, at: str = "") -> Prepared:
    """Promise: it is prepared."""
    assert isinstance(result, Prepared), (at, result)
    return result
