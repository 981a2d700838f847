"""Follows the bus and keeps the board up to date: nodes, what is free, sick devices, waiting
objects, health events, decisions.

Nothing is written to the bus.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec

from topobus.bus.bus import Bus, Change, ChangeKind, Received, Start
from topobus.console.config import ConsoleSettings
from topobus.console.rules.board import Board
from topobus.console.rules.free_devices import free_rows, free_view, sum_rows
from topobus.console.rules.node_drawing import View, node_view
from topobus.console.rules.silence import API_SERVER, silence_view, with_silence
from topobus.console.rules.views import (
    decision_view,
    event_view,
    for_counting,
    node_row,
    repair_views,
    sick_view,
)
from topobus.console.rules.waiting import WaitingList
from topobus.engine.drawing.letters import holders_of
from topobus.engine.health.silence import Announcements
from topobus.formats.messages.catalogue import ALIGNMENT, DECISION, HEALTH, INVENTORY, LEDGER, MACHINE, OBJECT, REPAIR
from topobus.formats.messages.messages import ApiObject, DecisionEvent, HealthEvent, RepairState
from topobus.process.clock import Clock, SystemClock, until_tick
from topobus.process.logging import get_logger
from topobus.values.cluster_answers import FreeRow
from topobus.values.device import Inventory
from topobus.values.errors import PeerUnavailable
from topobus.values.ledger import Holders
from topobus.values.timestamps import rfc3339
from topobus.values.view import NodeAlignment

__all__ = ["Followers"]

_LEDGER = LEDGER.read_as(Holders)
# How often silent services are looked for. Topology publishes each half minute.
_LISTEN_S = 5.0
# All decisions that are shown, together: the largest number that the settings allow must not take
# the memory.
_MOST_DECISION_BYTES = 16 * 1024 * 1024


class Followers:
    """The console's copies of the bus, and the board that shows them."""

    def __init__(self, bus: Bus, settings: ConsoleSettings, clock: Clock | None = None) -> None:
        self.board = Board()
        self.is_settled = asyncio.Event()
        """Set when everything that existed at the start has been read."""
        self._bus = bus
        self._settings = settings
        self.clock = clock or SystemClock()
        self._news = asyncio.Condition()
        self._inventories: dict[str, dict[str, Inventory]] = {}
        """By node and class, without the fields that only a drawing needs."""
        self._ledgers: dict[str, Holders] = {}
        self._free: dict[str, dict[str, FreeRow]] = {}
        """By class and node."""
        self._free_changed: set[str] = set()
        """Classes whose sum over all nodes is not shown yet."""
        self._letters: dict[str, dict[str, str]] = {}
        """Node to the letters of its owners in drawings, so that they keep them."""
        self._waiting = WaitingList(is_of_cluster=settings.cluster.mode != "off")
        self._trouble_since = ""
        self._announcements = Announcements()
        self._silent: dict[str, dict[str, str]] = {}
        """Node to its silent services, with the time of the first silence."""
        self._health: dict[tuple[str, str, str], HealthEvent] = {}
        self._decisions: dict[str, tuple[str, int]] = {}
        """Decision to its time and its size in bytes."""
        self._unsettled = {"inventories", "ledgers", "alignments", "objects", "repairs"}

    async def run(self) -> None:
        """Follow the bus until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                self._watch("inventories", self._bus.watch(INVENTORY), self._take_inventory, self._forget_inventories)
            )
            tasks.create_task(self._watch("ledgers", self._bus.watch(_LEDGER), self._take_ledger, self._forget_ledgers))
            tasks.create_task(self._watch("alignments", self._bus.watch(ALIGNMENT), self._take_alignment, self._excuse))
            tasks.create_task(self._listen())
            tasks.create_task(self._watch("objects", self._bus.watch(OBJECT), self._take_object, self._forget_objects))
            tasks.create_task(
                self._watch("repairs", self._bus.watch(REPAIR), self._take_repairs, lambda: self._forget("repairs"))
            )
            tasks.create_task(self._follow(self._bus.follow(HEALTH, start=Start.PRESENT), self._take_health))
            tasks.create_task(self._follow_decisions())

    async def wait_newer(self, version: int) -> None:
        """Wait until the board has an entry newer than a version."""
        async with self._news:
            await self._news.wait_for(lambda: self.board.version > version)

    async def node(self, node: str) -> View | None:
        """Return a node as it is drawn, with machine and devices as the bus has them now.

        None when no machine of that name reports.
        """
        entry = await self._bus.get(MACHINE, node=node)
        if entry is None:
            return None
        ledger = self._ledgers.get(node)
        letters = {
            holder.allocation.owner.key: holder.letter for holder in holders_of(ledger, self._letters.get(node)).all
        }
        self._letters[node] = letters
        inventories = with_silence(
            {listed.value.device_class: listed.value for listed in await self._bus.list(INVENTORY, node=node)},
            self._silent.get(node, {}),
        )
        return node_view(entry.value, inventories.values(), ledger, letters)

    async def _watch(
        self,
        name: str,
        changes: AsyncGenerator[Change[Any], None],
        take: Callable[[Change[Any]], None],
        forget: Callable[[], None],
    ) -> None:
        async for change in changes:
            match change.kind:
                case ChangeKind.RESET:
                    forget()
                case ChangeKind.SNAPSHOT_END:
                    self._unsettled.discard(name)
                    if not self._unsettled:
                        self.is_settled.set()
                case _:
                    take(change)
            await self._notify()

    async def _follow(self, events: AsyncGenerator[Received[Any], None], take: Callable[[Received[Any]], None]) -> None:
        async for received in events:
            take(received)
            await self._notify()

    async def _follow_decisions(self) -> None:
        """Follow decisions from the newest of each node on, and then read the older ones that are
        shown, so that none is missed in between.
        """
        has_older = False
        async for received in self._bus.follow(DECISION, start=Start.PRESENT):
            self._take_decision(received.value)
            if not has_older:
                has_older = True
                try:
                    for older in await self._bus.last(DECISION, limit=self._settings.decisions):
                        self._take_decision(older.value)
                except PeerUnavailable as err:
                    get_logger().info("console.decisions-unread", reason=err.message)
            await self._notify()

    async def _notify(self) -> None:
        if self.is_settled.is_set():
            # Once for all nodes that exist at the start.
            while self._free_changed:
                device_class = self._free_changed.pop()
                rows = tuple(self._free[device_class].values())
                self._show("free", device_class, free_view(sum_rows(device_class, rows)) if rows else None)
        async with self._news:
            self._news.notify_all()

    def _take_inventory(self, change: Change[Inventory]) -> None:
        node, device_class = change.parts["node"], change.parts["device_class"]
        if change.value is None:
            self._inventories.get(node, {}).pop(device_class, None)
        else:
            self._inventories.setdefault(node, {})[device_class] = for_counting(change.value)
        self._show_node(node)

    def _take_ledger(self, change: Change[Holders]) -> None:
        node = change.parts["node"]
        if change.value is None:
            self._ledgers.pop(node, None)
        else:
            self._ledgers[node] = change.value
        self._show_node(node)

    def _take_alignment(self, change: Change[NodeAlignment]) -> None:
        node = change.parts["node"]
        if change.value is None:
            self._announcements.drop(node)
        else:
            self._announcements.note(node, change.value, at=self.clock.monotonic(), said_at=change.origin.stored_at)
        self._note_silence(node)

    def _excuse(self) -> None:
        self._announcements.excuse(self.clock.monotonic())

    async def _listen(self) -> None:
        """Find the services that have become silent. While the bus is disconnected, no service
        counts as silent.
        """
        while True:
            await self.clock.sleep(until_tick(self.clock.monotonic(), _LISTEN_S))
            if not self._bus.is_connected:
                self._excuse()
            for node in self._announcements.nodes:
                self._note_silence(node)
            await self._notify()

    def _note_silence(self, node: str) -> None:
        before, silent = self._silent.get(node, {}), self._announcements.silent(node, self.clock.monotonic())
        if silent == before:
            return
        self._silent[node] = silent
        for what in before.keys() - silent.keys():
            self.board.drop("silent", f"{node}/{what}")
        for what, since in silent.items():
            self._show("silent", f"{node}/{what}", silence_view(node, what, since, self._inventories.get(node, ())))
        self._show_node(node)

    def take_object(self, kind: str, namespace: str, name: str, api_object: ApiObject | None) -> None:
        """Show a claim or pod while it waits. None: it is gone."""
        for key, view in self._waiting.take(kind, namespace, name, api_object).items():
            self._show("waiting", key, view)

    async def note_trouble(self, trouble: str) -> None:
        """Show that the API server cannot be read, or can be read again, and send the changes to
        all pages.
        """
        self._trouble_since = (self._trouble_since or rfc3339(self.clock.now())) if trouble else ""
        self._show(
            "silent", API_SERVER, silence_view("", API_SERVER, self._trouble_since, (), trouble) if trouble else None
        )
        await self._notify()

    def _take_object(self, change: Change[ApiObject]) -> None:
        # A stored value has its kind. A deletion has only the key, in which kinds are in lower
        # case.
        kind = (
            change.value.kind
            if change.value is not None
            else {"pod": "Pod", "resourceclaim": "ResourceClaim"}.get(change.parts["kind"], "")
        )
        self.take_object(kind, change.parts["namespace"], change.parts["name"], change.value)

    def _forget_objects(self) -> None:
        for key in self._waiting.clear():
            self.board.drop("waiting", key)

    def _take_repairs(self, change: Change[RepairState]) -> None:
        views = repair_views(change.value or RepairState())
        for key, view in views.items():
            self._show("repairs", key, view)
        for key in set(self.board.keys("repairs")) - views.keys():
            self.board.drop("repairs", key)

    def _take_health(self, received: Received[HealthEvent]) -> None:
        event = received.value
        place = (event.node, event.device_class, event.device)
        if event.health.worst is None:
            self._health.pop(place, None)
        else:
            self._health[place] = event
        # A healthy device is news only after it was unhealthy, not at our start and not in the
        # first events of a new node.
        if event.health.worst is not None or (event.previous is not None and not received.is_replay):
            self._show("health", str(received.sequence), event_view(event))
            self._trim("health", self._settings.events)
        self._show_node(event.node)

    def _take_decision(self, event: DecisionEvent) -> None:
        data = msgspec.json.encode(decision_view(event))
        self.board.post("decisions", event.id, data)
        self._decisions[event.id] = (event.time, len(data))
        while (
            len(self._decisions) > self._settings.decisions
            or sum(size for _, size in self._decisions.values()) > _MOST_DECISION_BYTES
        ):
            oldest = min(self._decisions, key=lambda key: self._decisions[key])
            del self._decisions[oldest]
            self.board.drop("decisions", oldest)

    def _show_node(self, node: str) -> None:
        silent, ledger = self._silent.get(node, {}), self._ledgers.get(node)
        inventories = with_silence(self._inventories.get(node, {}), silent)
        rows = free_rows(inventories.values(), ledger)
        self._note_free(node, rows)
        self._show("nodes", node, node_row(node, inventories.values(), rows, silent) if inventories else None)
        sick = {
            f"{node}/{device.device_class}/{device.name}": view
            for inventory in inventories.values()
            for device in inventory.devices
            if (view := sick_view(device, node, ledger, self._health.get((node, device.device_class, device.name))))
            is not None
        }
        for key, view in sick.items():
            self._show("sick", key, view)
        for key in self.board.keys("sick"):
            if key.startswith(f"{node}/") and key not in sick:
                self.board.drop("sick", key)

    def _note_free(self, node: str, rows: Mapping[str, FreeRow]) -> None:
        for device_class in self._free.keys() | rows.keys():
            of_class = self._free.setdefault(device_class, {})
            before, now = of_class.pop(node, None), rows.get(device_class)
            if now is not None:
                of_class[node] = now
            if now != before:
                self._free_changed.add(device_class)

    def _show(self, topic: str, key: str, view: View | None) -> None:
        if view is None:
            self.board.drop(topic, key)
        else:
            self.board.post(topic, key, msgspec.json.encode(view))

    def _trim(self, topic: str, most: int) -> None:
        for key in self.board.keys(topic)[:-most]:
            self.board.drop(topic, key)

    def _forget_inventories(self) -> None:
        self._inventories.clear()
        self._free.clear()
        self._free_changed.clear()
        self._forget("free")
        self._forget("nodes")
        self._forget("sick")

    def _forget_ledgers(self) -> None:
        nodes = tuple(self._ledgers)
        self._ledgers.clear()
        for node in nodes:
            self._show_node(node)

    def _forget(self, topic: str) -> None:
        for key in self.board.keys(topic):
            self.board.drop(topic, key)
