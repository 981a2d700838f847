"""What the gateway knows of its node, kept from the bus and never lost with it: inventories, the ledger, and what it has just handed out.

Flows in: KV changes. Flows out: the present lists and a wake-up for whoever streams them. When NATS goes away, or its store is lost, the last known
state stays: silence is not death.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from topobus.contracts.catalogue import INVENTORY, LEDGER
from topobus.domain.device import Inventory
from topobus.domain.ledger import Ledger
from topobus.domain.request import Owner
from topobus.domain.silence import unheard
from topobus.gateway.core.lists import HealthEntry, ListEntry, health_list, holders_of, plugin_list
from topobus.runtime.bus import Bus, ChangeKind
from topobus.runtime.logging import get_logger

__all__ = ["Broadcast", "NodeState"]


class Broadcast:
    """Wakes every waiter at once; a waiter takes the ticket first, then looks, then waits, so it misses nothing."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        """Take what will be set by the next announcement."""
        return self._event

    def announce(self) -> None:
        """Wake all ticket holders."""
        event, self._event = self._event, asyncio.Event()
        event.set()


class NodeState:
    """The node's devices by class, as last known."""

    def __init__(self, bus: Bus, node: str) -> None:
        self.node = node
        self.changed = Broadcast()
        self._bus = bus
        self._inventories: dict[str, Inventory] = {}
        self._ledger: Ledger | None = None
        self._handed_out: dict[str, dict[str, tuple[Owner, int]]] = {}
        self._hand_outs: dict[str, int] = {}
        self._lists: dict[str, tuple[ListEntry, ...]] = {}
        self._silent: Mapping[str, str] = {}
        self._seen = {"inventories": asyncio.Event(), "ledger": asyncio.Event()}

    @property
    def is_connected(self) -> bool:
        """Say whether what is known here is also the newest."""
        return self._bus.is_connected

    @property
    def ledger(self) -> Ledger | None:
        """The ledger as last seen."""
        return self._ledger

    async def wait_until_seen(self) -> None:
        """Wait for the first complete look at inventories and ledger."""
        for seen in self._seen.values():
            await seen.wait()

    def classes(self) -> tuple[str, ...]:
        """Classes with something to list: devices, or held ones that are gone."""
        return tuple(sorted(name for name, entries in self._lists.items() if entries))

    def inventories(self) -> dict[str, Inventory]:
        """Inventories by class, as last seen."""
        return dict(self._inventories)

    def holders(self, device_class: str) -> dict[str, Owner]:
        """Who holds which device of a class, what was handed out a moment ago included."""
        return self._holders(device_class)

    def entries(self, device_class: str) -> tuple[ListEntry, ...]:
        """The device plugin's complete list.

        A silent service changes nothing here: this API knows only healthy and unhealthy, kubelet takes unhealthy devices out of the node's allocatable and
        tells the pods that hold them, and silence is no evidence for that. A device of a silent class is refused later, when it cannot be prepared.
        """
        return self._lists.get(device_class, ())

    def entry(self, device_class: str, name: str) -> ListEntry | None:
        """One device of the list."""
        return next((one for one in self.entries(device_class) if one.id == name), None)

    def health(self, device_class: str) -> tuple[HealthEntry, ...]:
        """The DRA health stream's complete list; that API knows Unknown, so the devices of a silent service are that."""
        inventory = self._inventories.get(device_class)
        if inventory is not None and device_class in self._silent:
            inventory = unheard(inventory, since=self._silent[device_class])
        return health_list(inventory, self._holders(device_class))

    def note_silence(self, silent: Mapping[str, str]) -> None:
        """Take over which classes' services are silent, with since when."""
        self._silent = silent
        self.changed.announce()

    def hand_out(self, device_class: str, names: Iterable[str], owner: Owner, ledger_sequence: int) -> None:
        """Remember what was just adopted until the ledger that says so arrives: an allocated device must not leave the list between the two."""
        mine = self._handed_out.setdefault(device_class, {})
        mine.update(dict.fromkeys(names, (owner, ledger_sequence)))
        self._hand_outs[owner.key] = self._hand_outs.get(owner.key, 0) + 1
        self._refresh()

    def times_handed_out(self, owner: Owner) -> int:
        """Count how often this process gave an owner its devices: a new allocation of the same devices looks like the old one otherwise."""
        return self._hand_outs.get(owner.key, 0)

    async def follow_inventories(self) -> None:
        """Keep the inventories, for ever."""
        async for change in self._bus.watch(INVENTORY, node=self.node):
            if change.kind is ChangeKind.SNAPSHOT_END:
                self._seen["inventories"].set()
                continue
            if change.kind is ChangeKind.RESET:
                get_logger().warning("inventories.reset", kept=sorted(self._inventories))
                continue
            device_class = change.parts["device_class"]
            if change.kind is ChangeKind.DELETE or change.value is None:
                self._inventories.pop(device_class, None)
            else:
                self._inventories[device_class] = change.value
            self._refresh()

    async def follow_ledger(self) -> None:
        """Keep the ledger, for ever."""
        async for change in self._bus.watch(LEDGER, node=self.node):
            if change.kind is ChangeKind.SNAPSHOT_END:
                self._seen["ledger"].set()
            elif change.kind is ChangeKind.PUT and change.value is not None:
                self._ledger = change.value
                self._forget_confirmed(change.value)
                self._refresh()

    def _forget_confirmed(self, ledger: Ledger) -> None:
        for device_class, mine in self._handed_out.items():
            self._handed_out[device_class] = {name: one for name, one in mine.items() if one[1] > ledger.sequence}

    def _holders(self, device_class: str) -> dict[str, Owner]:
        just_now = {name: owner for name, (owner, _) in self._handed_out.get(device_class, {}).items()}
        return {**holders_of(self._ledger, device_class), **just_now}

    def _refresh(self) -> None:
        """Build all lists again and wake the streams when something that kubelet sees has changed."""
        held_classes = {
            name for one in (self._ledger.allocations.values() if self._ledger else ()) for two in one.holdings for name in two.devices
        }
        for device_class in sorted({*self._inventories, *held_classes, *self._lists}):
            previous = self._lists.get(device_class, ())
            self._lists[device_class] = plugin_list(self._inventories.get(device_class), self._holders(device_class), previous)
        # Health messages are no part of the lists, so everybody looks again: each stream sends only what is new to it.
        self.changed.announce()
