"""What `topobus top` knows: machines, inventories, ledgers and the newest events, as watches tell them; and what is looked at.

Flows in: changes of state, events, keys. Flows out: the view of one node. Holds values only; draws nothing and reads nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeVar

from rich.text import Text

from topobus.cli.top.keys import Key
from topobus.domain.device import Inventory
from topobus.domain.drawing.leaves import PciIds
from topobus.domain.ledger import Ledger
from topobus.domain.machine import Machine
from topobus.runtime.bus import Change, ChangeKind

__all__ = ["Scene", "ShownEvent"]

K = TypeVar("K")
V = TypeVar("V")

_KEPT_EVENTS = 200


@dataclass(frozen=True, kw_only=True)
class ShownEvent:
    """One line of the events."""

    time: str
    node: str
    line: Text


@dataclass(kw_only=True)
class Scene:
    """The present state and what of it is on the screen."""

    machines: dict[str, Machine] = field(default_factory=dict)
    inventories: dict[tuple[str, str], Inventory] = field(default_factory=dict)
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    silent: dict[str, tuple[Inventory, ...]] = field(default_factory=dict)
    """By node: its inventories as they are to be read while services do not answer; empty while all do."""
    letters: dict[str, str] = field(default_factory=dict)
    """Owner's key to its letter: an owner keeps it as long as this runs."""
    pci_names: dict[PciIds, str] = field(default_factory=dict)
    """Of vendor and device, for functions that no service says the model of."""
    events: deque[ShownEvent] = field(default_factory=lambda: deque(maxlen=_KEPT_EVENTS))
    wanted: str | None = None
    """The node that was named; the first one otherwise."""
    scroll: int = 0
    trouble: str = ""

    @property
    def nodes(self) -> list[str]:
        """All nodes that report a machine, by name."""
        return sorted(self.machines)

    @property
    def node(self) -> str:
        """The node that is shown; empty while none reports."""
        nodes = self.nodes
        if self.wanted in self.machines:
            return str(self.wanted)
        return nodes[0] if nodes else ""

    def inventories_of(self, node: str) -> tuple[Inventory, ...]:
        """The inventories of a node, by class."""
        of_node = tuple(inventory for (place, _), inventory in sorted(self.inventories.items()) if place == node)
        silent = {inventory.device_class: inventory for inventory in self.silent.get(node, ())}
        return tuple(silent.get(inventory.device_class, inventory) for inventory in of_node)

    def take_machine(self, change: Change[Machine]) -> None:
        """Take what a watch says of machines."""
        _take(self.machines, change, change.parts.get("node", ""))

    def take_inventory(self, change: Change[Inventory]) -> None:
        """Take what a watch says of inventories."""
        _take(self.inventories, change, (change.parts.get("node", ""), change.parts.get("device_class", "")))

    def take_ledger(self, change: Change[Ledger]) -> None:
        """Take what a watch says of ledgers."""
        _take(self.ledgers, change, change.parts.get("node", ""))

    def add_event(self, event: ShownEvent) -> None:
        """Keep an event in the order of time; what comes again at a new start is there once."""
        if event not in self.events:
            newest = sorted((*self.events, event), key=lambda other: other.time)
            self.events.clear()
            self.events.extend(newest)

    def press(self, key: Key) -> bool:
        """Do what a key says; False when it ends the command."""
        match key:
            case Key.QUIT:
                return False
            case Key.LEFT | Key.RIGHT if self.nodes:
                place = self.nodes.index(self.node) + (1 if key is Key.RIGHT else -1)
                self.wanted = self.nodes[place % len(self.nodes)]
                self.scroll = 0
            case Key.UP:
                self.scroll = max(self.scroll - 1, 0)
            case Key.DOWN:
                self.scroll += 1
            case Key.PAGE_UP:
                self.scroll = max(self.scroll - 10, 0)
            case Key.PAGE_DOWN:
                self.scroll += 10
            case Key.HOME:
                self.scroll = 0
            case _:
                pass
        return True


def _take(values: dict[K, V], change: Change[V], key: K) -> None:
    if change.kind is ChangeKind.RESET:
        values.clear()
    elif change.kind is ChangeKind.DELETE:
        values.pop(key, None)
    elif change.value is not None:
        values[key] = change.value
