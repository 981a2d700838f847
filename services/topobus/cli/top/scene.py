"""The state of the node that `topobus top` draws: its machine, inventories, ledger and newest
events, from watches.

It holds values only: it draws nothing and reads nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rich.text import Text

from topobus.bus.bus import Change, ChangeKind
from topobus.engine.drawing.leaves import PciIds
from topobus.values.device import Inventory
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine
from topobus.values.pci import PciAddress

__all__ = ["Scene", "ShownEvent"]

_KEPT_EVENTS = 200


@dataclass(frozen=True, kw_only=True)
class ShownEvent:
    """One line of the events."""

    time: str
    line: Text


@dataclass(kw_only=True)
class Scene:
    """The present state of one node."""

    node: str
    machine: Machine | None = None
    is_read: bool = False
    """Whether a machine of that name has been looked for."""
    inventories: dict[str, Inventory] = field(default_factory=dict)
    """By class."""
    ledger: Ledger | None = None
    silent: tuple[Inventory, ...] = ()
    """The inventories as shown while services do not answer. Empty while all do."""
    letters: dict[str, str] = field(default_factory=dict)
    """Owner's key to its letter: an owner keeps it while the node is shown."""
    pci_names: dict[PciIds | PciAddress, str] = field(default_factory=dict)
    """By vendor and device, for functions whose model no service reports."""
    events: deque[ShownEvent] = field(default_factory=lambda: deque(maxlen=_KEPT_EVENTS))

    @property
    def shown_inventories(self) -> tuple[Inventory, ...]:
        """The inventories by class, with the devices of silent services as Unknown."""
        silent = {inventory.device_class: inventory for inventory in self.silent}
        return tuple(
            silent.get(device_class, inventory) for device_class, inventory in sorted(self.inventories.items())
        )

    def take_machine(self, change: Change[Machine]) -> None:
        """Apply a change of the machine."""
        self.machine = (
            change.value if change.kind is ChangeKind.PUT else None if _is_gone(change.kind) else self.machine
        )
        self.is_read = self.is_read or change.kind in (ChangeKind.PUT, ChangeKind.SNAPSHOT_END)

    def take_inventory(self, change: Change[Inventory]) -> None:
        """Apply a change of an inventory."""
        if change.kind is ChangeKind.RESET:
            self.inventories.clear()
        elif change.kind is ChangeKind.DELETE:
            self.inventories.pop(change.parts.get("device_class", ""), None)
        elif change.value is not None:
            self.inventories[change.value.device_class] = change.value

    def take_ledger(self, change: Change[Ledger]) -> None:
        """Apply a change of the ledger."""
        self.ledger = change.value if change.kind is ChangeKind.PUT else None if _is_gone(change.kind) else self.ledger

    def add_event(self, event: ShownEvent) -> None:
        """Keep an event in the order of time. A repeated event is kept once."""
        if event not in self.events:
            newest = sorted((*self.events, event), key=lambda other: other.time)
            self.events.clear()
            self.events.extend(newest)


def _is_gone(kind: ChangeKind) -> bool:
    return kind in (ChangeKind.RESET, ChangeKind.DELETE)
