"""The hands of a device service over folder cards, without a bus: prepare, attach, detach,
unprepare, and what is on the disk.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from topobus.devicekit.driver import DeviceDriver
from topobus.devicekit.host.isolation import IsolatedDriver
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.settings import CleaningSettings
from topobus.devicekit.verbs.attach import Attacher
from topobus.devicekit.verbs.device_hands import DeviceHands
from topobus.devicekit.verbs.prepare import Preparer
from topobus.formats.messages.messages import PrepareReply, PrepareRequest, UnprepareReply, UnprepareRequest
from topobus.formats.messages.sandbox_messages import AttachReply, AttachRequest, DetachReply, DetachRequest
from topobus.process.readiness import Readiness
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.clock import ManualClock
from topobus.testing.drivers.folder_driver import CARDS, FolderDriver, make_card
from topobus.values.device import Device
from topobus.values.machine import Machine
from topobus.values.request import Owner, OwnerKind
from topobus.values.sandbox import Sandbox

OWNER = Owner(kind=OwnerKind.CLAIM, name="claim", uid="u1")
OTHER = Owner(kind=OwnerKind.CLAIM, name="other", uid="u2")
TIMEOUT_S = 5.0
CLEANING = CleaningSettings()


class HandsBench:
    """One life of a service after the other, on the same cards and the same journal."""

    def __init__(self, root: Path, *, cards: int = 2, driver: DeviceDriver | None = None) -> None:
        self.root = root
        self.driver = driver or FolderDriver()
        for number in range(cards):
            if not (root / CARDS / f"nic-card-{number}").exists():
                make_card(root, f"nic-card-{number}", f"02:00:00:00:00:0{number}")
        self.tree = Tree(HardwareSettings(root=str(root)))
        self.devices: dict[str, Device] = {
            device.name: device
            for device in FolderDriver().discover(self.tree, Machine(node="n1", numa_nodes=(), cpus=())).devices
        }
        self.clock = ManualClock()
        self.hands: DeviceHands
        self.preparer: Preparer
        self.attacher: Attacher
        self.readiness = Readiness()
        self.calls: list[str] = []
        """What was called of the driver, as far as it came back."""

    @asynccontextmanager
    async def life(self) -> AsyncIterator[None]:
        """Start a service that knows these devices, and end it."""
        isolated = {
            self.driver.name: IsolatedDriver(
                self.driver, timeout_s=TIMEOUT_S, clock=self.clock, note_call=self._note_call
            )
        }
        journal = Journal(self.root / "journal")
        self.hands = DeviceHands(
            isolated, self.tree, self.devices.get, journal, clock=self.clock, cleaning=CLEANING, wait_s=TIMEOUT_S
        )
        self.preparer = Preparer("nic", self.hands, self.devices.get)
        self.attacher = Attacher("nic", self.hands)
        await self.hands.load(self.readiness)
        running = asyncio.create_task(self.hands.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            journal.close()

    def _note_call(self, driver: str, verb: str, elapsed_s: float) -> None:
        self.calls.append(verb)

    async def prepare(self, *names: str, owner: Owner = OWNER, op_id: str = "", **config: Any) -> PrepareReply:
        """Prepare cards."""
        request = PrepareRequest(op_id=op_id, owner=owner, devices=names, config=(config,) if config else ())
        return await self.preparer.prepare(request)

    async def unprepare(self, *names: str, owner: Owner = OWNER) -> UnprepareReply:
        """Undo that."""
        return await self.preparer.unprepare(UnprepareRequest(op_id="", owner=owner, devices=names))

    async def attach(self, *names: str, sandbox: Sandbox, owner: Owner = OWNER, **config: Any) -> AttachReply:
        """Attach cards."""
        request = AttachRequest(
            op_id="", owner=owner, devices=names, sandbox=sandbox, config=(config,) if config else ()
        )
        return await self.attacher.attach(request)

    async def detach(self, *names: str, sandbox: Sandbox, owner: Owner = OWNER) -> DetachReply:
        """Undo that."""
        return await self.attacher.detach(DetachRequest(op_id="", owner=owner, devices=names, sandbox=sandbox))

    def sandbox(self, sandbox_id: str) -> Sandbox:
        """Make a sandbox; its namespace is a folder."""
        folder = self.root / "sandboxes" / sandbox_id
        folder.mkdir(parents=True, exist_ok=True)
        return Sandbox(id=sandbox_id, uid="p1", namespace="default", name="pod", network_namespace=str(folder))

    def card(self, name: str) -> dict[str, str]:
        """Read a card that is at home; empty when it is not."""
        folder = self.root / CARDS / name
        return (
            {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())}
            if folder.is_dir()
            else {}
        )

    def inside(self, sandbox: Sandbox) -> list[str]:
        """Name what a sandbox has."""
        return sorted(path.name for path in Path(sandbox.network_namespace).iterdir())

    def journal_of(self, name: str) -> Mapping[str, Any] | None:
        """Read a device's journal as it is on the disk."""
        path = self.root / "journal" / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def new_card(number: int) -> dict[str, str]:
    """Give a card as its maker delivers it."""
    return {"image": "factory", "mac": f"02:00:00:00:00:0{number}", "mtu": "1500"}
