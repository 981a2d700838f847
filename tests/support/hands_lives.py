"""Consecutive device service processes over the same cards and the same journal, each killed where
a test wants (see `support.mortal_hands`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from support.lives import LIMIT_S, Lives
from topobus.bus.bus import Bus
from topobus.devicekit.settings import DeviceServiceSettings, JournalSettings
from topobus.engine.health.health_machine import HealthSettings
from topobus.formats.messages.catalogue import ATTACH, DETACH, HEALTH, INVENTORY, MACHINE, PREPARE, UNPREPARE
from topobus.formats.messages.messages import Prepared, PrepareRequest, UnprepareRequest
from topobus.formats.messages.sandbox_messages import Attached, AttachRequest, DetachRequest
from topobus.sysfs.tree import HardwareSettings
from topobus.testing.drivers.folder_driver import CARDS, make_card
from topobus.values.machine import Machine
from topobus.values.request import Owner, OwnerKind
from topobus.values.sandbox import Sandbox

NODE = "n1"
OWNER = Owner(kind=OwnerKind.CLAIM, name="claim", uid="u1")
NEIGHBOUR = Owner(kind=OwnerKind.CLAIM, name="neighbour", uid="u2")


class HandsLives(Lives):
    """One process after the other, and what the gateway would ask it."""

    def __init__(self, bus: Bus, url: str, root: Path) -> None:
        self.bus = bus
        self.root = root
        for number in range(2):
            make_card(root / "machine", f"nic-card-{number}", f"02:00:00:00:00:0{number}")
        self.journal = root / "journal"
        settings = DeviceServiceSettings(
            node=NODE,
            hardware=HardwareSettings(root=str(root / "machine"), rescan_s=0.2),
            health=HealthSettings(poll_s=0.05),
            journal=JournalSettings(dir=str(self.journal)),
        )
        super().__init__("mortal_hands", settings, url, root)
        self._asked = 0

    async def inventory(self) -> None:
        """Wait until both cards are offered."""
        async with asyncio.timeout(LIMIT_S):
            async for change in self.bus.watch(INVENTORY, node=NODE, device_class="nic"):
                if change.value is not None and len(change.value.devices) == 2:
                    return

    async def ask_once(self, verb: str, **config: Any) -> None:
        """Ask a process that may die of it."""
        await self.try_once(lambda: self._ask(verb, **config))

    async def ask(self, verb: str, **config: Any) -> Any:
        """Ask until it answers, and return the result."""
        return await self.answer_to(lambda: self._ask(verb, **config))

    async def _ask(
        self, verb: str, owner: Owner = OWNER, card: str = "nic-card-0", sandbox: str = "s1", **config: Any
    ) -> Any:
        at = {"node": NODE, "device_class": "nic"}
        configs = (config,) if config else ()
        self._asked += 1
        op_id = f"op-{self._asked}"
        if verb == "prepare":
            request = PrepareRequest(op_id=op_id, owner=owner, devices=(card,), config=configs)
            return (await self.bus.ask(PREPARE, request, **at)).result
        if verb == "unprepare":
            undo = UnprepareRequest(op_id=op_id, owner=owner, devices=(card,))
            return (await self.bus.ask(UNPREPARE, undo, **at)).refusal
        place = self.sandbox(sandbox)
        if verb == "attach":
            attach = AttachRequest(op_id=op_id, owner=owner, devices=(card,), sandbox=place, config=configs)
            return (await self.bus.ask(ATTACH, attach, **at)).result
        detach = DetachRequest(op_id=op_id, owner=owner, devices=(card,), sandbox=place)
        return (await self.bus.ask(DETACH, detach, **at)).refusal

    def sandbox(self, sandbox_id: str) -> Sandbox:
        """Make a sandbox; its namespace is a folder."""
        folder = self.root / "machine" / "sys" / "sandboxes" / sandbox_id
        folder.mkdir(parents=True, exist_ok=True)
        return Sandbox(id=sandbox_id, uid="p1", namespace="default", name="pod", network_namespace=str(folder))

    def card(self, name: str = "nic-card-0") -> dict[str, str]:
        """Read a card that is at home; empty when it is not."""
        return _files(self.root / "machine" / CARDS / name)

    def inside(self, sandbox: str, name: str = "net1") -> dict[str, str]:
        """Read a card that is in a sandbox; empty when it is not."""
        return _files(Path(self.sandbox(sandbox).network_namespace) / name)

    def soil(self) -> None:
        """Leave on the card what a user leaves."""
        (Path(self.sandbox("s1").network_namespace) / "net1" / "dirt").write_text("coffee", encoding="utf-8")

    def journals(self) -> list[str]:
        """Name the files in the journal, half-written ones too."""
        return (
            sorted(path.name for path in self.journal.iterdir() if path.name != "lock") if self.journal.is_dir() else []
        )

    async def health_states(self) -> set[tuple[str, str]]:
        """Return all health states that were published of the cards, with the deciding reason."""
        events = [event.value for name in ("nic-card-0", "nic-card-1") for event in await self._events(name)]
        return {(str(event.health.state), event.health.worst.reason if event.health.worst else "") for event in events}

    async def _events(self, name: str) -> list[Any]:
        return await self.bus.last(HEALTH, limit=64, node=NODE, device_class="nic", device=name)


async def publish_machine(bus: Bus) -> None:
    """Do discovery's work."""
    await bus.put(MACHINE, Machine(node=NODE, numa_nodes=(), cpus=(), generation=1), node=NODE)


def check_prepared(result: object, at: str) -> None:
    """Promise: the card is prepared."""
    assert isinstance(result, Prepared), (at, result)


def check_attached(result: object, at: str) -> None:
    """Promise: the card is attached."""
    assert isinstance(result, Attached), (at, result)


def _files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())} if folder.is_dir() else {}
