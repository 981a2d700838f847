"""What the steps of the demo share: the running system, the bus, the recorded machine, and waits
for a state of the bus.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import RenderableType

from topobus.bus.bus import Bus, ChangeKind
from topobus.cli.demo.stage import ExpectationError, Stage
from topobus.cli.render.machine_drawing import draw_machine
from topobus.formats.messages.catalogue import INVENTORY, LEDGER, MACHINE
from topobus.formats.messages.nouns import State
from topobus.local_system.system import System
from topobus.simulation.machines import RecordedMachine
from topobus.values.device import Device, Inventory
from topobus.values.ledger import Ledger

__all__ = ["Scene", "manifest"]

M = TypeVar("M")

# Generous, for a machine that is busy with other things. Each wait ends as soon as its state is
# there.
_WAIT_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What the demo's steps share."""

    stage: Stage
    system: System
    bus: Bus
    hardware: RecordedMachine

    @property
    def node(self) -> str:
        """The only node."""
        return self.system.node

    async def until(self, state: State[M], holds: Callable[[M], bool], what: str, parts: Mapping[str, str]) -> M:
        """Wait until the stored value of one key satisfies `holds`.

        Errors: raises ExpectationError that names what was awaited and the last value's gist.
        """
        last: M | None = None
        try:
            async with asyncio.timeout(_WAIT_S), aclosing(self.bus.watch(state, **parts)) as changes:
                async for change in changes:
                    if change.kind is ChangeKind.PUT and change.value is not None:
                        last = change.value
                        if holds(last):
                            return last
        except TimeoutError as err:
            raise ExpectationError(
                f"waited {_WAIT_S:.0f} s for: {what}",
                next_step=f"the newest value was {str(last)[:300] if last is not None else 'none at all'}",
            ) from err
        raise ExpectationError(f"the watch ended before: {what}")

    async def inventory(self, device_class: str, holds: Callable[[Inventory], bool], what: str) -> Inventory:
        """Wait for an inventory."""
        return await self.until(INVENTORY, holds, what, {"node": self.node, "device_class": device_class})

    async def ledger(self, holds: Callable[[Ledger], bool], what: str) -> Ledger:
        """Wait for the ledger."""
        return await self.until(LEDGER, holds, what, {"node": self.node})

    async def devices(self) -> dict[str, Device]:
        """Fetch all PCI devices by name."""
        return {
            device.name: device
            for entry in await self.bus.list(INVENTORY, node=self.node)
            for device in entry.value.devices
        }

    async def drawing(self) -> RenderableType:
        """Draw the machine as the bus has it now.

        Errors: raises ExpectationError when the bus has no machine.
        """
        machine = await self.bus.get(MACHINE, node=self.node)
        ledger = await self.bus.get(LEDGER, node=self.node)
        if machine is None:
            raise ExpectationError("the machine was there and is gone")
        inventories = [entry.value for entry in await self.bus.list(INVENTORY, node=self.node)]
        return draw_machine(machine.value, inventories, ledger.value if ledger else None)


def manifest(path: str) -> Path:
    """Find an example manifest: beside this module when installed, in the repository's `examples`
    when run from a checkout.
    """
    packed = Path(__file__).parent / "examples" / path
    return packed if packed.exists() else Path(__file__).parents[4] / "examples" / path
