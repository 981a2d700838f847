"""Merges the drivers' views into the list of devices, and publishes it: the inventory to its
bucket, health to its stream.

`devices` are the devices of this class whose inventory was published. Steps run one after the
other, so an event never overtakes the inventory that it refers to. A step that changed nothing is
not repeated while its inputs stay the same and do not depend on the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import datetime

from topobus.devicekit.host.announcer import HealthAnnouncer
from topobus.devicekit.host.device_holders import DeviceHolders
from topobus.devicekit.host.driver_poller import DriverPoller
from topobus.devicekit.host.inventory_store import InventoryStore
from topobus.devicekit.host.metrics import DeviceMetrics
from topobus.devicekit.host.node_machine import NodeMachine
from topobus.devicekit.maintenance.maintenance import forgiven, sticky_signs, with_forgiveness, with_maintenance
from topobus.devicekit.maintenance.maintenance_store import MaintenanceStore
from topobus.devicekit.maintenance.verdicts import observations
from topobus.devicekit.settings import DeviceServiceSettings
from topobus.devicekit.sharing.shared_devices import odd_sharing, with_sharing
from topobus.devicekit.verbs.device_hands import DeviceHands
from topobus.devicekit.verbs.leftovers import with_leftovers
from topobus.engine.alignment.devices.proximity import socket_of_nodes
from topobus.engine.alignment.devices.spare_choice import odd_spares, with_spares
from topobus.engine.alignment.planning.node_view import cores_of
from topobus.engine.health.inventory_merge import DriverView, MergedInventory, advance_inventory
from topobus.engine.health.pool_assignment import odd_pools, with_pools
from topobus.process.clock import until_tick
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.values.counters import CounterSet
from topobus.values.device import Device, Inventory
from topobus.values.errors import PeerUnavailable
from topobus.values.health import HealthState, Observation
from topobus.values.ledger import Holders
from topobus.values.machine import Machine
from topobus.values.timestamps import rfc3339

__all__ = ["DevicePublisher", "DriverViews"]
# So many health events are on their way at a time.
_PARALLEL_EVENTS = 64
# Seconds that a scrape waits for the ledger: a tenth of Prometheus' own limit for all of it. After them
# its lines have the holders of the scrape before.
_SCRAPE_S = 1.0
# Seconds that an answer waits until its effect is visible: a fifth of the time that the gateway
# gives it.
_PUBLISH_S = 2.0


class DriverViews:
    """The views of one class's drivers."""

    def __init__(self, pollers: Mapping[str, DriverPoller], hands: DeviceHands) -> None:
        self._pollers = pollers
        self._hands = hands
        self.moving = frozenset(
            name for name, isolated in hands.drivers.items() if isolated.driver.capabilities.attaches
        )
        """Drivers whose devices move into a sandbox, and cannot be shared."""

    def newest(self) -> dict[str, DriverView]:
        """Return the newest view of each driver, with the observations of devices that work is
        being done on.
        """
        return with_leftovers(
            {name: poller.shown() for name, poller in self._pollers.items()}, self._hands.observations()
        )

    def note_published(self, views: Mapping[str, DriverView]) -> None:
        """Inform each driver's poller that its view has been published."""
        for name, view in views.items():
            self._pollers[name].note_published(view)

    def interrupt(self) -> None:
        """End the drivers' own watches, so that the next poll is followed by a step."""
        for poller in self._pollers.values():
            poller.interrupt()


class DevicePublisher:
    """Publishes the devices of one class."""

    def __init__(
        self,
        settings: DeviceServiceSettings,
        runtime: Runtime,
        *,
        machine: NodeMachine,
        store: InventoryStore,
        metrics: DeviceMetrics,
        views: DriverViews,
        make_inventory: Callable[[MergedInventory, Machine], Inventory],
        maintenance: MaintenanceStore,
    ) -> None:
        """Keep the collaborators.

        `make_inventory` adds the service's own fields to a merged inventory. `maintenance` has the
        devices that an operator withholds, and the verdicts of others.
        """
        self._settings = settings
        self._runtime = runtime
        self._class = store.device_class
        self._log = get_logger()
        self._machine = machine
        self._store = store
        self._views = views
        self._make_inventory = make_inventory
        self._maintenance = maintenance
        self._to_forgive: set[str] = set()
        """Devices whose sticky faults the next step lifts."""
        self._forgiven: dict[str, tuple[Observation, ...]] = {}
        """By device: evidence that was forgiven, as long as it is seen."""
        self._holders = DeviceHolders(runtime.bus, node=runtime.node, device_class=self._class)
        self._announcer = HealthAnnouncer(runtime.bus, node=runtime.node, device_class=self._class)
        self.devices: tuple[Device, ...] = ()
        """What this class has: first from the earlier run, then from each step."""
        self.inventory_before: Inventory | None = None
        """What the earlier run published last. Its warnings and kept functions count until their
        driver has looked."""
        self.counter_sets: tuple[CounterSet, ...] = ()
        """What these devices take from."""
        self._metrics = metrics
        self._published: tuple[Device, ...] | None = None
        """The devices that are published, or are being published; None when that is not known."""
        self._has_news = asyncio.Event()
        self._waiting: list[asyncio.Future[bool]] = []
        """Callers that wait for the end of the next step."""
        self._settled: tuple[Machine, Mapping[str, DriverView]] | None = None
        """Inputs of the last step, if it changed nothing and time alone would change nothing. None
        while a step runs."""

    async def run(self) -> None:
        """Publish changes after polls."""
        await self._wait_for_first_polls()
        # Named by its class: a gateway runs one for each plugin of others.
        with self._runtime.beats.working(f"publish-{self._class}") as beat:
            while True:
                beat.turn()
                self._has_news.clear()
                waiting, self._waiting = self._waiting, []
                is_done = True
                try:
                    await self._step()
                except* PeerUnavailable as errors:
                    is_done = False
                    # What was not published still counts as changed at the next look.
                    self._published = None
                    self._log.warning(
                        "publishing.delayed", why="; ".join(str(exception) for exception in errors.exceptions)
                    )
                for waiter in waiting:
                    if not waiter.done():
                        waiter.set_result(is_done)
                if not self.is_settled():
                    # Then each look is followed by a step, so the looks must come back here.
                    self._views.interrupt()
                beat.rest()
                await self._has_news.wait()

    def note_poll(self) -> None:
        """Schedule a step after a poll, unless it would change nothing."""
        if not self.is_settled():
            self._has_news.set()

    async def follow_ledger(self) -> None:
        """Follow the ledger until cancelled, with a step after each change: a spare that an owner has
        is replaced.
        """
        await self._holders.follow(self._note_ledger)

    def ledger_of_scrape(self) -> Holders | None:
        """Return the ledger of this moment. Called in the thread of a scrape."""
        if not self._settings.spares.count:
            self._holders.read_from_thread(_SCRAPE_S)
        return self._holders.ledger

    def _note_ledger(self) -> None:
        self._settled = None
        self._has_news.set()

    def forgive(self, device: str) -> None:
        """Make the next step lift a device's sticky faults."""
        self._to_forgive.add(device)

    async def publish(self) -> bool:
        """Request a step, and return at its end, or when it takes too long, because the caller must
        answer.

        True when its result is published.
        """
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._has_news.set()
        try:
            async with self._runtime.clock.timeout(_PUBLISH_S):
                return await waiter
        except TimeoutError:
            self._log.warning("publishing.delayed", why=f"a step takes longer than {_PUBLISH_S:g} s")
            return False

    def republish(self) -> None:
        """Publish everything again: the store lost its history, possibly with what was published.

        What is still stored is not repeated.
        """
        self._store.clear_cache()
        self._published = None
        self._announcer.clear_cache()
        self._has_news.set()

    def is_settled(self) -> bool:
        """Return whether one more step would change nothing: the drivers' views are the same, and
        the published state is confirmed.
        """
        return (
            self._published is not None
            and self._settled is not None
            and self._settled == (self._machine.newest, self._views.newest())
        )

    async def confirm(self) -> None:
        """Check at each rescan that the published state is still stored, and publish again if not.

        No other process writes it, so any difference is garbage, a deletion or an older copy.
        """
        while True:
            await self._runtime.clock.sleep(
                until_tick(self._runtime.clock.monotonic(), self._settings.hardware.rescan_s)
            )
            # At the same time, so that both answers wake this process up once.
            is_standing, has_lost_events = await asyncio.gather(
                self._store.is_standing(), self._announcer.check(), return_exceptions=True
            )
            if is_standing is False or has_lost_events is True:
                self._published = None
                self._has_news.set()
            for answer in (is_standing, has_lost_events):
                if isinstance(answer, PeerUnavailable):
                    self._log.debug("inventory.unseen", why=answer.message)
                elif isinstance(answer, BaseException):
                    raise answer

    async def _wait_for_first_polls(self) -> None:
        """Wait until every driver was polled once, but for a slow one no longer than `first_wait_s`
        after the machine is known.
        """
        await self._machine.wait_known()
        try:
            async with self._runtime.clock.timeout(self._settings.drivers.first_wait_s):
                while any(view.devices is None and view.silence is None for view in self._views.newest().values()):
                    self._has_news.clear()
                    await self._has_news.wait()
        except TimeoutError:
            slow = sorted(name for name, view in self._views.newest().items() if view.devices is None)
            self._log.warning("driver.slow", drivers=slow, waited_s=self._settings.drivers.first_wait_s)

    async def _step(self) -> None:
        machine = self._machine.newest
        if machine is None:
            return
        views, before, self._settled = self._views.newest(), (self.devices, self.counter_sets), None
        signs = {name: sticky_signs(views, name) for name in self._to_forgive}
        seen = {
            name: tuple(sign for sign in kept if sign in sticky_signs(views, name))
            for name, kept in self._forgiven.items()
        }
        self._forgiven = {name: kept for name, kept in {**seen, **signs}.items() if kept}
        if self._to_forgive:
            # Here and not at once: a step in progress would overwrite it.
            self.devices, self._to_forgive = forgiven(self.devices, self._to_forgive), set()
        now = self._runtime.clock.now()
        # A held device is not removed and is no spare: with spares the ledger is followed.
        is_followed = bool(self._settings.spares.count)
        merged = await self._advance(machine, views, now, held=self._holders.held if is_followed else None)
        if not is_followed and (
            merged.devices != self._published
            or any(device.health.state is not HealthState.HEALTHY for device in merged.devices)
        ):
            # The holders of a device are notified of its health.
            await self._holders.read()
            merged = await self._advance(machine, views, now, held=self._holders.held)
        # Set before it is true, because the store may lose its history meanwhile.
        self._published = merged.devices
        await self._announcer.load([device.name for device in (*merged.devices, *merged.removed)])
        # A removal is announced first: after a crash in between, the device is still listed and is
        # removed (silently) at the next start.
        for device in merged.removed:
            await self._announce(device, self._store.generation + 1, rfc3339(now), is_removed=True)
        offered = {device.name for device in self.devices}
        # Before the write: whoever reads the new inventory may ask for its devices before the write is
        # confirmed, and one that timed out may have been done.
        self.devices, self.counter_sets = merged.devices, merged.counter_sets
        self._metrics.set_affected(self.devices, self._holders.owners, self._holders.pods)
        await self._store.put(self._make_inventory(merged, machine))
        if self._store.is_refused:
            # A device of an inventory that was refused is forgotten with the next look. Otherwise one
            # bad device would stay as a lost one, and the list could not be published after it has
            # become good again.
            self.devices = tuple(device for device in merged.devices if device.name in offered)
        news = [device for device in self.devices if self._announcer.is_news(device)]
        # Each device has a subject of its own, so nothing of one device is overtaken; one after the
        # other, thousands would take a minute.
        for start in range(0, len(news), _PARALLEL_EVENTS):
            async with asyncio.TaskGroup() as group:
                for device in news[start : start + _PARALLEL_EVENTS]:
                    group.create_task(self._announce(device, self._store.generation, rfc3339(now)))
        self._views.note_published(views)
        # A device with a condition moves by time: it recovers, or is forgotten.
        if (
            not merged.removed
            and not self._store.is_refused
            and (merged.devices, merged.counter_sets) == before
            and not any(device.health.conditions for device in merged.devices)
        ):
            self._settled = (machine, views)

    async def _advance(
        self, machine: Machine, views: Mapping[str, DriverView], now: datetime, *, held: Collection[str] | None
    ) -> MergedInventory:
        # In a thread: thousands of devices take a tenth of a second, in which this process answers
        # others.
        stored = self._maintenance.value
        merged = await asyncio.to_thread(
            advance_inventory,
            MergedInventory(devices=self.devices, counter_sets=self.counter_sets),
            with_forgiveness(views, self._forgiven),
            inventory_before=self.inventory_before,
            device_class=self._class,
            machine=machine,
            held=held,
            now=now,
            settings=self._settings.health,
            reported=lambda device: observations(device, stored.verdicts, self._settings.health.sources),
        )
        sharing = self._settings.sharing
        pools = (*sharing, *self._settings.pools)
        shared = with_sharing(with_pools(merged.devices, pools), sharing, self._views.moving)
        spares = self._settings.spares
        devices = with_spares(
            with_maintenance(shared, stored.devices),
            self.devices,
            held=held,
            settings=spares,
            sockets=socket_of_nodes(cores_of(machine)) if spares.count else {},
        )
        warnings = (
            *merged.warnings,
            *odd_pools(devices, pools),
            *odd_sharing(devices, sharing, self._views.moving),
            *odd_spares(devices, spares),
        )
        return replace(merged, devices=devices, warnings=warnings)

    async def _announce(self, device: Device, generation: int, time: str, *, is_removed: bool = False) -> None:
        affected, pods = self._holders.owners(device.name), self._holders.pods(device.name)
        is_announced = await self._announcer.announce(
            device, affected=affected, pods=pods, inventory_generation=generation, time=time, is_removed=is_removed
        )
        if is_announced and not is_removed:
            self._metrics.count_event(device)
