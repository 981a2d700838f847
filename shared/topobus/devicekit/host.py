"""Runs a device service: isolated drivers, the inventory, health events, and answers to prepare, unprepare and hints.

Flows in: the machine of this node, its ledger while a device is unhealthy, and what drivers read below the root. Flows out: the class's inventory and health events.
Each driver is polled by a task of its own, so a hung driver delays no other; a single task publishes. Nothing here waits for the cluster plane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Protocol, runtime_checkable

import msgspec
from prometheus_client import Counter, Gauge

from topobus.contracts.catalogue import HINTS, INVENTORY, LEDGER, MACHINE, PREPARE, UNPREPARE
from topobus.contracts.codec import encode
from topobus.contracts.messages import HintsReply, HintsRequest
from topobus.contracts.stored import objection
from topobus.devicekit.announcer import HealthAnnouncer
from topobus.devicekit.health import HealthSettings, clear_sticky_faults, silence
from topobus.devicekit.hints import hinting_driver, hints_of
from topobus.devicekit.inventory_merge import DriverView, Roster, advance_roster
from topobus.devicekit.isolation import DriverFailed, DriverHung, IsolatedDriver
from topobus.devicekit.pci import pci_folder
from topobus.devicekit.pool_assignment import check_pools, odd_pools, with_pools
from topobus.devicekit.prepare import Preparer
from topobus.devicekit.registry import DriverRegistry, load_drivers, unserved
from topobus.devicekit.settings import DeviceServiceSettings, DriverSettings
from topobus.domain.device import Device, Inventory
from topobus.domain.errors import ContractError, HardwareError, PeerUnavailable
from topobus.domain.health import HealthState, Observation
from topobus.domain.ledger import Holders
from topobus.domain.machine import Machine
from topobus.domain.names import next_generation
from topobus.domain.request import Owner
from topobus.domain.timestamps import rfc3339
from topobus.runtime.bus import ChangeKind, Entry
from topobus.runtime.clock import until_tick
from topobus.runtime.logging import get_logger
from topobus.runtime.proof import read_keys
from topobus.runtime.service import Runtime
from topobus.sysfs.tree import Tree

__all__ = ["DeviceServiceSettings", "DriverSettings", "HealthSettings", "serve_devices"]


# So many health events are on their way at a time.
_PARALLEL_EVENTS = 64


async def serve_devices(
    settings: DeviceServiceSettings, runtime: Runtime, device_class: str, *, registry: DriverRegistry | None = None, resource: str = ""
) -> None:
    """Run the device service of a class until cancelled. `registry` replaces the installed plugins; `resource` names the class for pods when its name is not ours.

    Errors: raises ConfigError for plugins or settings that contradict each other.
    """
    check_pools(device_class, settings.pools)
    runtime.bus.use_answer_keys(proving=read_keys(settings.answers.key_dir, (device_class,)))
    await _DeviceHost(settings, runtime, device_class, registry or load_drivers(device_class, settings.drivers), resource).run()


@runtime_checkable
class _WarningDriver(Protocol):
    """A driver that tells what it had to do without (a library that does not load), as sentences; read after each discover."""

    warnings: Sequence[str]


class _DeviceHost:
    def __init__(
        self, settings: DeviceServiceSettings, runtime: Runtime, device_class: str, registry: DriverRegistry, resource: str = ""
    ) -> None:
        self._resource = resource
        self._settings = settings
        self._runtime = runtime
        self._bus = runtime.bus
        self._node = runtime.node
        self._class = device_class
        self._log = get_logger()
        self._tree = Tree(settings.hardware, is_revisited=True)
        self._skipped = registry.skipped
        self._ignored = registry.ignored
        self._drivers = {
            driver.name: IsolatedDriver(driver, timeout_s=settings.drivers.timeout_s, clock=runtime.clock) for driver in registry.drivers
        }
        self._views: dict[str, DriverView] = {name: DriverView() for name in self._drivers}
        self._machine: Machine | None = None
        self._machine_changes = asyncio.Condition()
        self._owners: dict[str, tuple[Owner, ...]] | None = None
        self._stored: Inventory | None = None
        self._confirmed = ("", 0)
        """Fingerprint of the inventory that stood in the bucket when it was last read and was ours, and its generation."""
        self._generation = 0
        self._devices: tuple[Device, ...] = ()
        self._published: tuple[Device, ...] | None = None
        """What everybody has been told, or is being told; None when that may not be so."""
        self._has_news = asyncio.Event()
        self._settled: tuple[Machine, Mapping[str, DriverView]] | None = None
        """What the last step was made of, when it changed nothing and time alone changes nothing either; None while a step runs."""
        self._has_published = False
        self._refused: Inventory | None = None
        """The inventory that could not be published, without its generations; None when the newest stands in the bucket."""
        self._announcer = HealthAnnouncer(self._bus, node=self._node, device_class=device_class)
        self._preparer = Preparer(device_class, self._drivers, self._tree, self._find)
        prefix = f"topobus_{device_class.replace('-', '_')}"
        self._failures = Counter(
            f"{prefix}_driver_failures", "Calls of a driver that failed or hung.", ("driver", "verb", "outcome"), registry=runtime.registry
        )
        self._skips = Counter(f"{prefix}_plugins_skipped", "Plugins that could not be loaded.", ("plugin",), registry=runtime.registry)
        self._unpublished = Gauge(
            f"{prefix}_inventory_unpublished",
            "1 while the newest inventory cannot be published and an older one stands.",
            registry=runtime.registry,
        )
        self._gauge = Gauge(f"{prefix}_devices", "Devices in the inventory.", ("state",), registry=runtime.registry)

    async def run(self) -> None:
        """Serve until cancelled."""
        for skipped_plugin in self._skipped:
            self._log.warning("plugin.skipped", plugin=skipped_plugin.name, value=skipped_plugin.value, why=skipped_plugin.why)
            self._skips.labels(skipped_plugin.name).inc()
        for driver in self._ignored:
            self._log.warning("drivers.ignored", driver=driver.name, device_class=driver.device_class, why=unserved(driver.device_class))
        self._log.info("drivers.loaded", device_class=self._class, drivers=sorted(self._drivers), root=str(self._tree.root))
        self._runtime.readiness.set("machine", is_ready=False, why="waiting for discovery to publish the machine")
        self._runtime.readiness.set("inventory", is_ready=False, why="no inventory published yet")
        await self._recall()
        await self._bus.answer(PREPARE, self._preparer.prepare, node=self._node, device_class=self._class)
        await self._bus.answer(UNPREPARE, self._preparer.unprepare, node=self._node, device_class=self._class)
        await self._bus.answer(HINTS, self._hints, node=self._node, device_class=self._class)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_machine())
            for name in self._drivers:
                group.create_task(self._look_after(name))
            group.create_task(self._publish())
            group.create_task(self._confirm())

    async def _recall(self) -> None:
        """Read the inventory of the life before: devices that were known stay known."""
        while True:
            try:
                entry = await self._last_inventory()
            except PeerUnavailable as err:
                self._log.warning("inventory.unread", why=str(err))
                await self._runtime.clock.sleep(err.retry_after_s)
                continue
            if entry is not None:
                # A number that nobody can have counted to is not gone on from.
                self._generation = next_generation(entry.value.generation) - 1
                self._devices = tuple(self._forgive(device) for device in entry.value.devices)
                self._log.info("inventory.recalled", generation=entry.value.generation, devices=len(entry.value.devices))
            for name in sorted(set(self._settings.health.forgive) - {device.name for device in self._devices}):
                self._log.warning("forgiveness.unused", device=name, next_step="health.forgive names a device that this node does not know")
            return

    async def _last_inventory(self) -> Entry[Inventory] | None:
        """Read what stands in the bucket; when that is garbage, the newest older revision that is none."""
        try:
            entry = await self._bus.get(INVENTORY, node=self._node, device_class=self._class)
            # What is compared with before the next publishing: garbage is always written over.
            self._stored = entry.value if entry is not None else None
            return entry
        except ContractError as err:
            older = await self._bus.history(INVENTORY, node=self._node, device_class=self._class)
            found_entry = older[-1] if older else None
            fields = {**err.facts, "error": err.message, "recalled_revision": found_entry.revision if found_entry else 0}
            self._log.warning("inventory.misread", **fields)
            return found_entry

    def _forgive(self, device: Device) -> Device:
        """Lift the sticky faults of a device that the operator says is repaired."""
        if device.name not in self._settings.health.forgive:
            return device
        return msgspec.structs.replace(device, health=clear_sticky_faults(device.health))

    async def _watch_machine(self) -> None:
        self._log.info("machine.awaited", node=self._node)
        async for change in self._bus.watch(MACHINE, node=self._node):
            if change.kind is ChangeKind.PUT and change.value is not None:
                if self._machine is None:
                    self._log.info("machine.received", generation=change.value.generation)
                    self._runtime.readiness.set("machine", is_ready=True)
                async with self._machine_changes:
                    self._machine = change.value
                    self._machine_changes.notify_all()
            elif change.kind is ChangeKind.RESET:
                # The store lost its history: what we said may be lost with it, so all is said again (what is not lost is not repeated).
                self._stored = None
                self._published = None
                self._announcer.forget()
                self._has_news.set()
            elif change.kind is ChangeKind.SNAPSHOT_END and self._machine is None:
                self._log.info("machine.missing", node=self._node, next_step="start topobus-discovery on this node")

    async def _confirm(self) -> None:
        """Look for ever whether what we said last still stands there: nobody else writes it, so what differs is garbage, gone or an older copy."""
        while True:
            await self._runtime.clock.sleep(until_tick(self._runtime.clock.monotonic(), self._settings.hardware.rescan_s))
            try:
                if not await self._is_standing() or await self._announcer.check():
                    self._published = None
                    self._has_news.set()
            except PeerUnavailable as err:
                self._log.debug("inventory.unseen", why=err.message)

    async def _is_standing(self) -> bool:
        """Say whether our inventory stands in the bucket; True while we write it."""
        inventory = self._stored
        if inventory is None:
            return True
        why = "it is gone"
        fingerprint = await self._bus.fingerprint(INVENTORY, node=self._node, device_class=self._class)
        if fingerprint and self._confirmed == (fingerprint, inventory.generation):
            # Read once already; to read thousands of devices at each look would keep this process from its answers.
            return True
        try:
            entry = await self._bus.get(INVENTORY, node=self._node, device_class=self._class)
            if entry is not None:
                if await asyncio.to_thread(_is_same_but_counts, entry.value, inventory):
                    # The fingerprint was taken first: if what was read is newer, the old one is never the newest again and confirms nothing.
                    self._confirmed = (fingerprint, inventory.generation)
                    return True
                why = f"somebody else wrote generation {entry.value.generation} over it"
        except ContractError as err:
            why = err.message
        if self._stored is not inventory:
            # Written while we looked: what we saw may have been the one before.
            return True
        self._stored = None
        self._log.warning(
            "inventory.overwritten", why=why, next_step="it is written again; see who writes this bucket besides the device services"
        )
        return False

    async def _read_owners(self) -> None:
        """Read who holds what. Asked for when it matters and not followed: the ledger is written for each pod and claim, a device's health seldom changes.

        When it cannot be read, what was known stands; at first nobody is known to hold nothing.
        """
        try:
            entry = await self._bus.get(LEDGER.read_as(Holders), node=self._node)
        except (PeerUnavailable, ContractError) as err:
            self._log.warning("ledger.unread", why=err.message)
            return
        self._owners = _owners(entry.value if entry is not None else None, self._class)

    async def _look_after(self, name: str) -> None:
        """Look at one driver's devices for ever: discover when it is time or the machine changed, observe at each look."""
        due_at = 0.0
        generation = 0
        beat = self._runtime.beats.loop(f"driver-{name}")
        while True:
            beat.turn()
            machine = self._machine
            if machine is not None:
                # Looks come at ticks: half a pause early is due, else a rescan that ended a little after its tick would wait for one tick more.
                is_due = machine.generation != generation or self._runtime.clock.monotonic() >= due_at - self._settings.health.poll_s / 2
                if is_due:
                    generation = machine.generation
                    due_at = self._runtime.clock.monotonic() + self._settings.hardware.rescan_s
                self._views[name] = await self._look(name, machine, is_due=is_due or self._views[name].devices is None)
                if not self._is_settled():
                    self._has_news.set()
            beat.rest()
            await self._wait_for_machine(generation, None if machine is None else self._pause_s(name, due_at))

    def _pause_s(self, name: str, due_at: float) -> float:
        """Say how long it is until the next look at a driver's devices: where it found none there is nothing to observe, until it may find some."""
        now_s, poll_s, view = self._runtime.clock.monotonic(), self._settings.health.poll_s, self._views[name]
        has_devices = view.devices != () or view.silence is not None
        return until_tick(now_s, poll_s) if has_devices else max(until_tick(now_s, poll_s), due_at - now_s)

    async def _wait_for_machine(self, generation: int, limit_s: float | None) -> None:
        """Wait until the next look is due; a changed machine ends the wait at once."""
        async with self._machine_changes:
            try:
                async with self._runtime.clock.timeout(limit_s):
                    await self._machine_changes.wait_for(lambda: self._machine is not None and self._machine.generation != generation)
            except TimeoutError:
                return

    async def _look(self, name: str, machine: Machine, *, is_due: bool) -> DriverView:
        isolated = self._drivers[name]
        driver, tree, before = isolated.driver, self._tree, self._views[name]
        verb = "discover"
        devices, warnings, off_bus = before.devices, before.warnings, before.off_bus
        pcis = [device.pci for device in self._devices if device.pci is not None and device.driver == name]
        try:
            if is_due:
                devices, off_bus = await isolated.call(
                    verb,
                    lambda: (
                        tuple(driver.discover(tree, machine)),
                        frozenset(pci_address for pci_address in pcis if not tree.exists(pci_folder(pci_address))),
                    ),
                )
                warnings = tuple(driver.warnings) if isinstance(driver, _WarningDriver) else ()
            verb = "observe"
            present = devices or ()
            observations: Mapping[str, Sequence[Observation]] = {}
            if present:
                observations = await isolated.call(verb, lambda: dict(driver.observe(tree, present)))
        except (DriverHung, DriverFailed) as err:
            self._tell_silence(name, verb, err, before)
            reason = "driver-hung" if isinstance(err, DriverHung) else "driver-failed"
            # The first word stands as long as the driver is silent: the inventory must not change with each new attempt.
            observation = before.silence if before.silence is not None and before.silence.reason == reason else silence(reason, err.message)
            return DriverView(
                devices=devices, observations=before.observations, silence=observation, warnings=before.warnings, off_bus=off_bus
            )
        if before.silence is not None:
            self._log.info("driver.recovered", driver=name)
        return DriverView(devices=devices, observations=observations, warnings=warnings, off_bus=off_bus)

    def _tell_silence(self, name: str, verb: str, err: HardwareError, before: DriverView) -> None:
        outcome = "hung" if isinstance(err, DriverHung) else "failed"
        self._failures.labels(name, verb, outcome).inc()
        if before.silence is None:
            self._log.warning("driver.silent", driver=name, verb=verb, outcome=outcome, why=str(err))

    async def _publish(self) -> None:
        """Publish what changed, whenever a driver has looked."""
        await self._wait_for_first_looks()
        beat = self._runtime.beats.loop("publish")
        while True:
            beat.turn()
            self._has_news.clear()
            try:
                await self._step()
            except* PeerUnavailable as errors:
                # What was not published is still news at the next look.
                self._published = None
                self._log.warning("publishing.delayed", why="; ".join(str(exception) for exception in errors.exceptions))
            beat.rest()
            await self._has_news.wait()

    async def _wait_for_first_looks(self) -> None:
        """Wait until every driver has looked once, but for a slow one no longer than `first_wait_s` after the machine is known."""
        async with self._machine_changes:
            await self._machine_changes.wait_for(lambda: self._machine is not None)
        try:
            async with self._runtime.clock.timeout(self._settings.drivers.first_wait_s):
                while any(view.devices is None and view.silence is None for view in self._views.values()):
                    self._has_news.clear()
                    await self._has_news.wait()
        except TimeoutError:
            slow = sorted(name for name, view in self._views.items() if view.devices is None)
            self._log.warning("driver.slow", drivers=slow, waited_s=self._settings.drivers.first_wait_s)

    async def _step(self) -> None:
        machine = self._machine
        if machine is None:
            return
        views, before, self._settled = dict(self._views), self._devices, None
        now = self._runtime.clock.now()
        roster = await self._advance(machine, views, now, held=None)
        if roster.devices != self._published or any(device.health.state is not HealthState.HEALTHY for device in roster.devices):
            # Whoever holds a device is told of its health, and what is held does not leave.
            await self._read_owners()
            roster = await self._advance(machine, views, now, held=None if self._owners is None else self._owners.keys())
        # Before it is so, for the store may lose its history meanwhile.
        self._published = roster.devices
        await self._announcer.recall([device.name for device in (*roster.devices, *roster.removed)])
        # A removal is told first: after a crash in between, the device is still listed and leaves (silently) at the next start.
        for device in roster.removed:
            await self._announce(device, self._generation + 1, rfc3339(now), is_removed=True)
        await self._put(roster, machine)
        # What nobody has read of is forgotten with the next look: one bad device must not stay as a lost one, and keep out the list that is good again.
        published = None if self._refused is None else {device.name for device in self._devices}
        self._devices = tuple(device for device in roster.devices if published is None or device.name in published)
        news = [device for device in self._devices if self._announcer.is_news(device)]
        # Each device has a subject of its own, so nothing of one device is overtaken; one after the other, thousands would take a minute.
        for start in range(0, len(news), _PARALLEL_EVENTS):
            async with asyncio.TaskGroup() as group:
                for device in news[start : start + _PARALLEL_EVENTS]:
                    group.create_task(self._announce(device, self._generation, rfc3339(now)))
        # A device with a condition moves by time: it recovers, or is forgotten.
        if (
            not roster.removed
            and self._refused is None
            and roster.devices == before
            and not any(device.health.conditions for device in before)
        ):
            self._settled = (machine, views)

    def _is_settled(self) -> bool:
        """Say whether one more step on what the drivers see now would do nothing: they see what they saw, and what we said stands."""
        return self._published is not None and self._settled is not None and self._settled == (self._machine, self._views)

    async def _advance(self, machine: Machine, views: Mapping[str, DriverView], now: datetime, *, held: Collection[str] | None) -> Roster:
        # In a thread, as the look at the readers below, and for the same reason.
        roster = await asyncio.to_thread(
            advance_roster,
            self._devices,
            views,
            device_class=self._class,
            machine=machine,
            held=held,
            now=now,
            settings=self._settings.health,
        )
        pools = self._settings.pools
        devices = with_pools(roster.devices, pools)
        return replace(roster, devices=devices, warnings=(*roster.warnings, *odd_pools(devices, pools)))

    async def _announce(self, device: Device, generation: int, time: str, *, is_removed: bool = False) -> None:
        affected = (self._owners or {}).get(device.name, ())
        await self._announcer.announce(device, affected=affected, inventory_generation=generation, time=time, is_removed=is_removed)

    async def _put(self, roster: Roster, machine: Machine) -> None:
        """Publish the inventory when it differs from the one that stands in the bucket."""
        drivers = [driver.driver for driver in self._drivers.values()]
        inventory = Inventory(
            node=self._node,
            device_class=self._class,
            generation=self._generation,
            machine_generation=machine.generation,
            devices=roster.devices,
            has_custom_hints=hinting_driver(drivers, roster.devices) is not None,
            drivers=tuple(sorted(self._drivers)),
            warnings=(
                *(f"{skipped_plugin.name}: plugin is skipped: {skipped_plugin.why}" for skipped_plugin in self._skipped),
                *roster.warnings,
            ),
            resource=self._resource,
        )
        # A machine that changed without changing a device is no news to the readers of this class.
        is_news = self._stored is None or msgspec.structs.replace(self._stored, machine_generation=machine.generation) != inventory
        if is_news and not await self._is_readable(inventory):
            return
        if is_news:
            # Spent even when the write fails: a write that timed out may have been done, and no generation may stand for two values.
            self._generation = next_generation(self._generation)
            self._stored = None
            inventory = msgspec.structs.replace(inventory, generation=self._generation)
            await self._bus.put(INVENTORY, inventory, node=self._node, device_class=self._class)
            self._stored = inventory
            self._tell_inventory(inventory)
        if not self._has_published or self._refused is not None:
            self._has_published = True
            self._refused = None
            self._unpublished.set(0)
            self._runtime.readiness.set("inventory", is_ready=True)
            if not inventory.devices:
                self._log.info("inventory.empty", device_class=self._class, drivers=list(inventory.drivers), root=str(self._tree.root))

    async def _is_readable(self, inventory: Inventory) -> bool:
        """Say whether the bucket and its readers take an inventory. One that they do not take is told once, and the last good one stays: nobody ends for it."""
        plain = msgspec.structs.replace(inventory, generation=0, machine_generation=0)
        if plain == self._refused:
            return False
        # In a thread: thousands of devices take a tenth of a second, in which this process may have others to answer.
        why = await asyncio.to_thread(objection, INVENTORY, inventory)
        if not why:
            return True
        is_told = self._refused is not None and len(self._refused.devices) == len(inventory.devices)
        self._refused = plain
        self._unpublished.set(1)
        text = f"{len(inventory.devices)} devices cannot be published: {why}"
        self._runtime.readiness.set("inventory", is_ready=self._has_published, why=text)
        if is_told:
            return False
        self._log.error(
            "inventory.unpublished",
            device_class=self._class,
            devices=len(inventory.devices),
            why=why,
            published_generation=self._stored.generation if self._stored is not None else 0,
            next_step="offer fewer devices of this class on the node, or give them shorter names",
        )
        return False

    def _tell_inventory(self, inventory: Inventory) -> None:
        counts = {state: sum(device.health.state is state for device in inventory.devices) for state in HealthState}
        for state, count in counts.items():
            self._gauge.labels(str(state)).set(count)
        self._log.info(
            "inventory.published",
            generation=inventory.generation,
            devices=len(inventory.devices),
            states={str(state): count for state, count in counts.items() if count},
            warnings=list(inventory.warnings),
        )

    def _find(self, name: str) -> Device | None:
        return next((device for device in self._devices if device.name == name), None)

    async def _hints(self, request: HintsRequest) -> HintsReply:
        generation, machine, devices = self._generation, self._machine, self._devices
        if machine is None:
            return HintsReply(hints=None, inventory_generation=generation)
        driver = hinting_driver([isolated_driver.driver for isolated_driver in self._drivers.values()], devices)
        if driver is not None:
            try:
                own = await self._drivers[driver.name].call(
                    "hints",
                    lambda: driver.hints(machine, devices, request.count, request.available),
                    timeout_s=self._settings.drivers.hints_timeout_s,
                )
            except (DriverHung, DriverFailed) as err:
                self._log.warning("hints.missing", driver=driver.name, why=str(err))
                own = None
            return HintsReply(hints=own, inventory_generation=generation)
        return HintsReply(hints=hints_of(machine, devices, request.available, request.count), inventory_generation=generation)


def _is_same_but_counts(left: Inventory, right: Inventory) -> bool:
    """Compare two inventories as they stand in the bucket; another instance of ours counts its generations for itself."""
    first, second = (msgspec.structs.replace(inventory, generation=0, machine_generation=0) for inventory in (left, right))
    return encode(first) == encode(second)


def _owners(ledger: Holders | None, device_class: str) -> dict[str, tuple[Owner, ...]]:
    """Turn a ledger into device name -> who holds it. CPUs stand as ids in the ledger and are devices named `cpu-<id>`."""
    held: dict[str, tuple[Owner, ...]] = {}
    for _, allocation in sorted((ledger.allocations if ledger else {}).items()):
        for holding in allocation.holdings:
            names = holding.devices.get(device_class, ())
            if device_class == "cpu":
                names = (*names, *(f"cpu-{cpu}" for cpu in holding.cpus))
            for name in names:
                owners = held.get(name, ())
                held[name] = owners if allocation.shown in owners else (*owners, allocation.shown)
    return held
