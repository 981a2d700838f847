"""One device service on a recorded machine, with drivers that a test controls, and what the service
publishes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from support.looks import next_look
from topobus.bus.bus import Bus
from topobus.devicekit.driver import DeviceDriver
from topobus.devicekit.host.host import serve_devices
from topobus.devicekit.registry import DriverRegistry, SkippedPlugin
from topobus.devicekit.settings import (
    BurnInSettings,
    CleaningSettings,
    DeviceServiceSettings,
    DriverSettings,
    JournalSettings,
    PartitionSettings,
    PassthroughSettings,
)
from topobus.devicekit.sharing.shared_devices import SharedPool
from topobus.engine.alignment.devices.spare_choice import SpareSettings
from topobus.engine.health.health_machine import HealthSettings
from topobus.formats.messages.catalogue import HEALTH, HINT, INVENTORY, MACHINE
from topobus.formats.messages.messages import HealthEvent, HintsReply, HintsRequest
from topobus.process.clock import Clock, SystemClock
from topobus.process.config import NatsSettings
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.simulation.machines import RecordedMachine
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Inventory
from topobus.values.errors import PeerUnavailable
from topobus.values.health import HealthState
from topobus.values.request import Owner, OwnerKind

NODE = "n1"

PROFILES = Path(__file__).parent.parent / "data" / "profiles"

OWNER = Owner(kind=OwnerKind.DEVICE_PLUGIN, name="topobus.dev/gpu", uid="u1")

# Longer than anything here takes on a busy machine; a test that hangs fails with this.
LIMIT_S = 60.0

POLL_S = 0.05

TIMEOUT_S = 5.0


class DeviceBench:
    """One service under test, the machine it runs on, and what it publishes."""

    def __init__(self, bus: Bus, url: str, recorded: RecordedMachine) -> None:
        self.bus = bus
        self.url = url
        self.recorded = recorded
        self.hardware = HardwareSettings(root=str(recorded.root), rescan_s=0.2)
        self.journal = recorded.root.parent / "journal"
        self.metrics = CollectorRegistry()
        self._generation = 0

    async def publish_machine(self) -> None:
        """Do discovery's work."""
        self._generation += 1
        machine = read_machine(Tree(self.hardware), NODE)
        await self.bus.put(MACHINE, type(machine)(**{**fields_of(machine), "generation": self._generation}), node=NODE)

    @asynccontextmanager
    async def service(
        self,
        *drivers: DeviceDriver,
        skipped: tuple[SkippedPlugin, ...] = (),
        health: HealthSettings | None = None,
        timeout_s: float = TIMEOUT_S,
        readiness: Readiness | None = None,
        clock: Clock | None = None,
        partitions: PartitionSettings | None = None,
        cleaning: CleaningSettings | None = None,
        sharing: tuple[SharedPool, ...] = (),
        passthrough: PassthroughSettings | None = None,
        burn_in: BurnInSettings | None = None,
        spares: int = 0,
    ) -> AsyncIterator[None]:
        """Run the gpu service with these drivers on a connection of its own."""
        settings = DeviceServiceSettings(
            node=NODE,
            hardware=self.hardware,
            journal=JournalSettings(dir=str(self.journal)),
            drivers=DriverSettings(timeout_s=timeout_s, first_wait_s=2.0),
            partitions=partitions or PartitionSettings(),
            health=health or HealthSettings(poll_s=POLL_S, hold_s=0.2),
            cleaning=cleaning or CleaningSettings(),
            sharing=sharing,
            passthrough=passthrough or PassthroughSettings(),
            burn_in=burn_in or BurnInSettings(),
            spares=SpareSettings(count=spares),
        )
        # Each run of the service counts from zero.
        self.metrics = CollectorRegistry()
        async with Bus.session(NatsSettings(url=self.url), name="gpu") as bus:
            runtime = Runtime(
                name="gpu",
                node=NODE,
                bus=bus,
                clock=clock or SystemClock(),
                readiness=readiness or Readiness(),
                registry=self.metrics,
            )
            task = asyncio.create_task(
                serve_devices(settings, runtime, "gpu", registry=DriverRegistry(drivers=drivers, skipped=skipped))
            )
            try:
                yield
            finally:
                task.cancel()
                result = (await asyncio.gather(task, return_exceptions=True))[0]
                if not isinstance(result, asyncio.CancelledError):
                    raise AssertionError("the service ended by itself") from result

    async def inventory(self, wanted: Callable[[Inventory], bool]) -> Inventory:
        """Wait for an inventory as wanted."""
        seen: Inventory | None = None
        try:
            async with asyncio.timeout(LIMIT_S):
                async for change in self.bus.watch(INVENTORY, node=NODE, device_class="gpu"):
                    seen = change.value or seen
                    if change.value is not None and wanted(change.value):
                        return change.value
        except TimeoutError as err:
            raise AssertionError(f"no such inventory; the last was {seen}") from err
        raise AssertionError("the watch ended")

    async def event(self, wanted: Callable[[HealthEvent], bool]) -> HealthEvent:
        """Wait for a wanted health event. Old ones count as well."""
        async with asyncio.timeout(LIMIT_S):
            async for received in self.bus.follow(HEALTH, node=NODE, device_class="gpu"):
                if wanted(received.value):
                    return received.value
        raise AssertionError("the stream ended")

    async def hints_once_up(self, *available: str) -> HintsReply:
        """Ask for hints until the service answers: from then on it is up."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    request = HintsRequest(count=1, available=available)
                    return await self.bus.ask(HINT, request, timeout_s=60, node=NODE, device_class="gpu")
                except PeerUnavailable:
                    await next_look()

    async def events(self, device: str) -> list[HealthEvent]:
        """Give all events of a device so far."""
        return [
            received_event.value
            for received_event in await self.bus.last(HEALTH, limit=64, node=NODE, device_class="gpu", device=device)
        ]


def fields_of(value: object) -> dict[str, object]:
    """Give the fields of a value by name, to make another one of it."""
    return {name: getattr(value, name) for name in value.__struct_fields__}  # type: ignore[attr-defined]


def states(inventory: Inventory) -> dict[str, HealthState]:
    """Give each device with its state."""
    return {device.name: device.health.state for device in inventory.devices}


def has_state(state: HealthState, device: str) -> Callable[[Inventory], bool]:
    """Say whether a device of an inventory is in this state."""
    return lambda inventory: states(inventory).get(device) is state
