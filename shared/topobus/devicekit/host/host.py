"""Runs a device service: isolated drivers, the inventory, health events, and answers to prepare,
unprepare, attach, detach and hints.

Each driver is polled by a task of its own (`driver_poller`), so a hung driver delays no other. A
single task publishes (`publishing`). `prepare` and `attach` make every change of a device, and the
journal records it (`device_hands`). The devices and the journal of the earlier run are loaded
before the first request is answered. Nothing here waits for the cluster plane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec

from topobus.bus.connection.reply_inbox import new_token
from topobus.devicekit.driver import DeviceDriver, HostServices
from topobus.devicekit.host.device_holders import DeviceHolders
from topobus.devicekit.host.device_readings import ClassReadings
from topobus.devicekit.host.driver_poller import DriverPoller
from topobus.devicekit.host.inventory_store import InventoryStore
from topobus.devicekit.host.isolation import DriverError, IsolatedDriver
from topobus.devicekit.host.metrics import DeviceMetrics, DeviceSeries
from topobus.devicekit.host.node_machine import NodeMachine
from topobus.devicekit.host.publishing import DevicePublisher, DriverViews
from topobus.devicekit.journal.journal import Journal, journal_folder
from topobus.devicekit.maintenance.device_operator import DeviceOperator
from topobus.devicekit.maintenance.maintenance_store import MaintenanceStore
from topobus.devicekit.maintenance.verdict_taker import VerdictTaker
from topobus.devicekit.registry import DriverRegistry, load_drivers
from topobus.devicekit.settings import DeviceServiceSettings
from topobus.devicekit.sharing.shared_devices import check_sharing_settings
from topobus.devicekit.verbs.attach import Adjuster, Attacher
from topobus.devicekit.verbs.device_hands import DeviceHands
from topobus.devicekit.verbs.prepare import Preparer
from topobus.engine.alignment.devices.device_hints import device_hints
from topobus.engine.alignment.planning.resource_hints import ResourceHints
from topobus.engine.health.inventory_merge import MergedInventory
from topobus.engine.health.pool_assignment import check_pools
from topobus.formats.messages.catalogue import (
    ADJUST,
    ATTACH,
    DETACH,
    HINT,
    HINTS,
    PERFORM,
    PREPARE,
    REPORT,
    UNPREPARE,
)
from topobus.formats.messages.device_classes import has_own_service
from topobus.formats.messages.messages import GivenHints, HintsEvent, HintsReply, HintsRequest
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.sysfs.boot import read_boot_id
from topobus.sysfs.tree import Tree
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import CPU_CLASS
from topobus.values.errors import ConfigError, PeerUnavailable
from topobus.values.hint import Hint
from topobus.values.machine import Machine
from topobus.values.pci import PciAddress
from topobus.values.timestamps import rfc3339

__all__ = ["check_devices", "hinting_driver", "hints_of", "serve_devices"]

# Seconds that an answer waits for a new look at a device that came back. Together with publishing
# it is less than half of the gateway's limit.
_SEEN_S = 2.0
# The time for hints of a driver's own: the asker gives up after 20 ms.
_HINTS_TIMEOUT_S = 0.015


def check_devices(
    device_class: str, settings: DeviceServiceSettings, registry: DriverRegistry | None = None
) -> DriverRegistry:
    """Refuse pools and shared devices that contradict each other, and plugins that are not
    installed, and return the class's plugins.

    Shapes: registry — replaces the installed plugins.
    Errors: raises ConfigError that names the key.
    """
    check_pools(device_class, settings.pools)
    check_sharing_settings(device_class, settings.sharing, settings.pools)
    if device_class == CPU_CLASS and settings.spares.count:
        raise ConfigError(
            "cpu: spares: got a count, wanted none: a CPU that gets sick is replaced by any other",
            next_step="remove spares from the settings of the cpu service",
            key="spares.count",
        )
    return registry or load_drivers(device_class, settings.drivers)


async def serve_devices(
    settings: DeviceServiceSettings,
    runtime: Runtime,
    device_class: str,
    *,
    registry: DriverRegistry | None = None,
    resource: str = "",
    series: DeviceSeries | None = None,
    host_services: HostServices = HostServices(),  # noqa: B008 - frozen
) -> None:
    """Run the device service of a class until cancelled.

    Shapes: registry — replaces the installed plugins; resource — names the class for pods when its
    name is not ours; series — given where this process serves several classes; host_services — what
    a class gives its own drivers in addition.
    Errors: raises ConfigError for plugins or settings that contradict each other.
    """
    registry = check_devices(device_class, settings, registry)
    metrics = (series or DeviceSeries(runtime.registry)).of(device_class)
    await _DeviceHost(settings, runtime, device_class, registry, metrics, host_services, resource).run()


class _DeviceHost:
    def __init__(
        self,
        settings: DeviceServiceSettings,
        runtime: Runtime,
        device_class: str,
        registry: DriverRegistry,
        metrics: DeviceMetrics,
        host_services: HostServices,
        resource: str,
    ) -> None:
        self._settings = settings
        self._runtime = runtime
        self._bus = runtime.bus
        self._node = runtime.node
        self._class = device_class
        self._resource = resource
        self._registry = registry
        self._metrics = metrics
        self._log = get_logger()
        self._tree = Tree(settings.hardware, is_revisited=True)
        self._boot_id = ""
        self._drivers = {
            driver.name: IsolatedDriver(
                driver, timeout_s=settings.drivers.timeout_s, clock=runtime.clock, note_call=metrics.note_call
            )
            for driver in registry.drivers
        }
        journal = Journal(journal_folder(settings.journal.dir, device_class, self._tree))
        self._hands = DeviceHands(
            self._drivers,
            self._tree,
            self._find,
            journal,
            clock=runtime.clock,
            cleaning=settings.cleaning,
            passthrough=settings.passthrough,
            wait_s=settings.drivers.timeout_s,
        )
        for driver in registry.drivers:
            driver.configure(
                msgspec.structs.replace(host_services, partitions=settings.partitions, recorded=journal.steps_of)
            )
        self._pollers = {
            name: DriverPoller(isolated, self._tree, settings, runtime.clock, metrics, journal)
            for name, isolated in self._drivers.items()
        }
        self._machine = NodeMachine(runtime)
        self._store = InventoryStore(runtime, device_class, metrics=metrics, root=str(self._tree.root))
        self._views = DriverViews(self._pollers, self._hands)
        self._maintenance = MaintenanceStore(runtime, device_class)
        self._publisher = DevicePublisher(
            settings,
            runtime,
            machine=self._machine,
            store=self._store,
            metrics=metrics,
            views=self._views,
            make_inventory=self._inventory,
            maintenance=self._maintenance,
        )
        self._hands.look_again, self._hands.looked_again = self._look_again, self._looked_again
        self._hands.on_change(self._publisher.note_poll, self._publisher.publish)
        if any(driver.capabilities.measures for driver in registry.drivers):
            metrics.export_readings(self._readings)

    async def run(self) -> None:
        """Serve until cancelled."""
        for skipped_plugin in self._registry.skipped:
            self._log.warning(
                "plugin.skipped", plugin=skipped_plugin.name, value=skipped_plugin.value, why=skipped_plugin.why
            )
            self._metrics.count_skipped(skipped_plugin.name)
        for driver in self._registry.ignored:
            # A driver that its own service runs needs no warning, but an operator who looks for it
            # here must find it.
            log = self._log.info if driver.is_served_elsewhere else self._log.warning
            log("drivers.ignored", driver=driver.name, device_class=driver.device_class, why=driver.why)
        self._log.info(
            "drivers.loaded", device_class=self._class, drivers=sorted(self._drivers), root=str(self._tree.root)
        )
        self._runtime.readiness.set("machine", is_ready=False, why="waiting for discovery to publish the machine")
        self._runtime.readiness.set("inventory", is_ready=False, why="no inventory published yet")
        # Of this machine, also where the devices are a recorded machine's, because a reader compares it
        # with its own.
        self._boot_id = await asyncio.to_thread(read_boot_id, Tree())
        if has_own_service(self._class):
            await self._maintenance.load()
        await self._load_inventory()
        try:
            await self._hands.load(self._runtime.readiness)
            await self._serve()
        finally:
            # Also when it ends while the journal is read: that thread would otherwise hold the
            # folder for as long as the process runs.
            self._hands.journal.close()

    async def _serve(self) -> None:
        bus, node, device_class = self._bus, self._node, self._class
        hands, clock, maintenance, publisher = self._hands, self._runtime.clock, self._maintenance, self._publisher
        preparer = Preparer(device_class, hands, self._find)
        operator = DeviceOperator(
            device_class,
            hands,
            maintenance,
            publisher,
            DeviceHolders(bus, node=node, device_class=device_class),
            burn_in=self._settings.burn_in,
            clock=clock,
        )
        await bus.answer(PREPARE, preparer.prepare, node=node, device_class=device_class)
        await bus.answer(UNPREPARE, preparer.unprepare, node=node, device_class=device_class)
        if has_own_service(device_class):
            attacher = Attacher(device_class, hands)
            verdicts = VerdictTaker(device_class, self._settings.health.sources, maintenance, publisher, clock)
            await bus.answer(ATTACH, attacher.attach, node=node, device_class=device_class)
            await bus.answer(DETACH, attacher.detach, node=node, device_class=device_class)
            await bus.answer(ADJUST, Adjuster(device_class, hands).adjust, node=node, device_class=device_class)
            await bus.answer(PERFORM, operator.perform, node=node, device_class=device_class)
            await bus.answer(REPORT, verdicts.take, node=node, device_class=device_class)
        await bus.answer(HINT, self._hints, node=node, device_class=device_class)
        async with asyncio.TaskGroup() as group:
            group.create_task(hands.run())
            group.create_task(operator.run())
            group.create_task(self._machine.follow(on_change=self._views.interrupt, on_reset=publisher.republish))
            for name in self._drivers:
                group.create_task(self._poll_driver(name))
            group.create_task(publisher.run())
            group.create_task(publisher.confirm())
            group.create_task(maintenance.run(self._settings.hardware.rescan_s))
            if self._settings.spares.count:
                group.create_task(publisher.follow_ledger())

    async def _load_inventory(self) -> None:
        """Load the inventory of the earlier run, so that its devices stay listed."""
        while True:
            try:
                inventory = await self._store.load()
            except PeerUnavailable as err:
                self._log.warning("inventory.unread", why=str(err))
                await self._runtime.clock.sleep(err.retry_after_s)
                continue
            if inventory is not None:
                self._publisher.inventory_before, self._publisher.counter_sets = inventory, inventory.counter_sets
                self._publisher.devices = inventory.devices
                await self._remind(inventory.devices)
            return

    async def _remind(self, devices: Sequence[Device]) -> None:
        """Pass to the drivers that need it what they found in the earlier run.

        A driver that fails at it starts without.
        """
        for name, isolated in self._drivers.items():
            driver = isolated.driver
            own = tuple(device for device in devices if device.driver == name)
            if own:
                try:
                    await isolated.call("remember", partial(driver.remember, own))
                except DriverError as err:
                    self._log.warning("devices.forgotten", driver=name, why=str(err))

    async def _poll_driver(self, name: str) -> None:
        """Poll one driver without end. A change of the machine ends the pause."""
        poller = self._pollers[name]
        with self._runtime.beats.working(f"driver-{name}") as beat:
            while True:
                beat.turn()
                machine = self._machine.newest
                if machine is not None:
                    await poller.poll(machine, self._functions_of(name))
                    self._publisher.note_poll()
                beat.rest()
                if machine is not None and machine is self._machine.newest and self._publisher.is_settled():
                    await poller.watch(machine, self._functions_of(name))
                    self._publisher.note_poll()
                await self._machine.wait_changed(poller.generation, None if machine is None else poller.pause_s())

    def _look_again(self, driver: str) -> None:
        self._pollers[driver].look_again()

    async def _looked_again(self, driver: str) -> None:
        """Return when a driver has looked for its devices again and the result is published, or
        when that takes too long.
        """
        try:
            async with self._runtime.clock.timeout(_SEEN_S):
                await self._pollers[driver].looked_again()
        except TimeoutError:
            self._log.warning("look.delayed", driver=driver, waited_s=_SEEN_S)
        await self._publisher.publish()

    def _functions_of(self, name: str) -> list[PciAddress]:
        return [device.pci for device in self._publisher.devices if device.pci is not None and device.driver == name]

    def _inventory(self, merged: MergedInventory, machine: Machine) -> Inventory:
        """Add the service's own fields to a merged inventory. The store sets the generation."""
        drivers = [driver.driver for driver in self._drivers.values()]
        before = self._publisher.inventory_before
        return Inventory(
            node=self._node,
            device_class=self._class,
            generation=0,
            machine_generation=machine.generation,
            boot_id=self._boot_id if merged.has_looked else before.boot_id if before is not None else "",
            devices=merged.devices,
            has_custom_hints=hinting_driver(drivers, merged.devices) is not None,
            drivers=tuple(sorted(self._drivers)),
            warnings=(
                *(
                    f"{skipped_plugin.name}: plugin is skipped: {skipped_plugin.why}"
                    for skipped_plugin in self._registry.skipped
                ),
                *merged.warnings,
            ),
            counter_sets=merged.counter_sets,
            kept=merged.kept,
            resource=self._resource,
            reading_drivers=tuple(
                sorted(name for name, isolated in self._drivers.items() if isolated.driver.capabilities.only_reads)
            ),
        )

    def _readings(self) -> ClassReadings:
        """Return what is exported of the devices. Called in the thread of a scrape."""
        readings = {name: seen for poller in self._pollers.values() for name, seen in poller.readings.items()}
        ledger = self._publisher.ledger_of_scrape()
        return ClassReadings(node=self._node, devices=self._publisher.devices, readings=readings, ledger=ledger)

    def _find(self, name: str) -> Device | None:
        return next((device for device in self._publisher.devices if device.name == name), None)

    async def _hints(self, request: HintsRequest) -> HintsReply:
        reply = HintsReply(hints=await self._opinion(request), inventory_generation=self._store.generation)
        record = ResourceHints(resource=self._resource or self._class, opinion=reply.hints).record()
        given = HintsEvent(
            node=self._node,
            device_class=self._class,
            op_id=request.op_id,
            by="device-service",
            lists=(GivenHints(resource=record.resource, hints=record.hints, omitted=record.omitted),),
            time=rfc3339(self._runtime.clock.now()),
        )
        await self._bus.notify(HINTS, {f"hints-{new_token()}": given})
        return reply

    async def _opinion(self, request: HintsRequest) -> tuple[Hint, ...] | None:
        machine, devices = self._machine.newest, self._publisher.devices
        if machine is None:
            return None
        driver = hinting_driver([isolated_driver.driver for isolated_driver in self._drivers.values()], devices)
        if driver is None:
            return hints_of(machine, devices, request.available, request.count)
        try:
            return await self._drivers[driver.name].call(
                "hints",
                lambda: driver.hints(machine, devices, request.count, request.available),
                timeout_s=_HINTS_TIMEOUT_S,
            )
        except DriverError as err:
            self._log.warning("hints.missing", driver=driver.name, why=str(err))
            return None


def hints_of(
    machine: Machine, devices: Sequence[Device], available: Sequence[str], count: int
) -> tuple[Hint, ...] | None:
    """Compute hints by kubelet's rules for `count` of `available`.

    Names that are not devices are ignored.
    """
    names = {device.name for device in devices}
    return device_hints(devices, [name for name in available if name in names], count, machine.node_set)


def hinting_driver(drivers: Sequence[DeviceDriver], devices: Sequence[Device]) -> DeviceDriver | None:
    """Find the driver whose own hints count for the class: the only one that has devices, when it
    has hints.

    Two drivers with devices of one class cannot both be asked for one resource. The common rules
    then apply.
    """
    owners = {device.driver for device in devices}
    if len(owners) != 1:
        return None
    driver = next((device_driver for device_driver in drivers if device_driver.name in owners), None)
    return driver if driver is not None and driver.capabilities.hints else None
