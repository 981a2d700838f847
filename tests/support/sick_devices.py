"""A node whose devices get sick: device services on a recorded machine, with all outputs around
them: a stream, metrics, kubelet and an API server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from support.cluster_slices import shown
from support.gateway_rig import Rig, make_rig
from support.looks import next_look
from support.node_plane import NODE
from topobus.bus.bus import Bus
from topobus.devicekit.driver import DeviceDriver
from topobus.devicekit.host.host import serve_devices
from topobus.devicekit.registry import DriverRegistry
from topobus.devicekit.settings import CleaningSettings, DeviceServiceSettings, DriverSettings, JournalSettings
from topobus.engine.health.health_machine import HealthSettings
from topobus.formats.messages.catalogue import HEALTH, INVENTORY, MACHINE
from topobus.formats.messages.messages import HealthEvent
from topobus.gateway.config import ClusterSettings
from topobus.process.clock import SystemClock
from topobus.process.config import NatsSettings
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.apiserver import ApiServerSimulator
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import DRIVER, pool_of_class
from topobus.values.health import HealthState

__all__ = ["Outputs", "SickNode", "device_service", "sick_node"]

_LIMIT_S = 60.0


@dataclass(frozen=True)
class Outputs:
    """What was published of each device, by its name.

    Healthy devices of which nothing was published are missing.
    """

    events: dict[str, tuple[str, HealthState]]
    """Reason and state of what decided in a device's first event after all was well."""
    pod_status: dict[str, str]
    """Of those that kubelet does not call Healthy."""
    unlisted: frozenset[str]
    """Those that kubelet's device plugin door may not allocate."""
    tainted: frozenset[str]


@dataclass
class SickNode:
    """The node."""

    rig: Rig
    server: ApiServerSimulator
    device_class: str
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)
    _events: dict[str, list[HealthEvent]] = field(default_factory=dict)
    """What was told of each device, in order."""
    _first: dict[str, int] = field(default_factory=dict)
    """How many of them there were when all was well."""
    _has_heard: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def listen(self) -> None:
        """Note all events of the class, until cancelled.

        Begun before anything gets sick: a late listener hears the
        newest event of each device alone.
        """
        async for received in self.rig.bus.follow(HEALTH, node=NODE, device_class=self.device_class):
            async with self._has_heard:
                self._events.setdefault(received.value.device, []).append(received.value)
                self._has_heard.notify_all()

    async def inventory_of(self, count: int) -> Sequence[Device]:
        """Wait until all devices are there and well, here and at kubelet and in slices, and
        remember how many events they had.
        """
        async with asyncio.timeout(_LIMIT_S):
            async for change in self.rig.bus.watch(INVENTORY, node=NODE, device_class=self.device_class):
                if change.value is not None and _all_are_well(change.value, count):
                    break
        assert change.value is not None
        await self.rig.kubelet.wait_for_resource(f"topobus.dev/{self.device_class}", allocatable=count)
        await self.server.until(lambda: len(self._in_slices()) == count, what="all devices in slices")
        for device in change.value.devices:
            await self.rig.kubelet.wait_for_health(DRIVER, self._pool, device.name, "Healthy")
        names = {device.name for device in change.value.devices}
        await self._until_heard(lambda: names <= self._events.keys())
        self._first = {name: len(self._events[name]) for name in names}
        return change.value.devices

    @property
    def _pool(self) -> str:
        return pool_of_class(NODE, self.device_class)

    async def outputs(self, reasons: Mapping[str, str], kept_back: Mapping[str, str]) -> Outputs:
        """Wait until all outputs have these devices, and return what was published of all devices
        by then.

        Shapes: reasons — by device, what its events must name before the wait ends; kept_back — by
        device, the health that kubelet must have.
        """
        await self._until_heard(
            lambda: all(any(_names(event, reason) for event in self._new(name)) for name, reason in reasons.items())
        )
        resource = f"topobus.dev/{self.device_class}"
        for name, state in kept_back.items():
            await self.rig.kubelet.wait_for_health(DRIVER, self._pool, name, state)
        await self.rig.kubelet.wait_for_resource(resource, allocatable=len(self._first) - len(kept_back))
        await self.server.until(lambda: set(kept_back) <= self._tainted(), what="all taints")
        health = {name: self.rig.kubelet.device_health(DRIVER, self._pool, name).state for name in self._first}
        return Outputs(
            events=self._told(reasons),
            pod_status={name: state for name, state in health.items() if state != "Healthy"},
            unlisted=frozenset(
                name for name, device in self.rig.kubelet.devices(resource).items() if not device.is_healthy
            ),
            tainted=frozenset(self._tainted()),
        )

    async def until_told(self, device: str, wanted: Callable[[HealthEvent], bool]) -> HealthEvent:
        """Wait for an event of a device. Old ones count as well."""
        await self._until_heard(lambda: any(map(wanted, self._events.get(device, ()))))
        return next(filter(wanted, self._events[device]))

    async def counts(self, wanted: Mapping[tuple[str, HealthState], int]) -> dict[tuple[str, HealthState], int]:
        """Give how many events the service's metric has of these reasons and states, as soon as it
        has as many as wanted: it counts what was published a moment after.
        """
        name = "topobus_device_health_events_total"
        async with asyncio.timeout(_LIMIT_S):
            while True:
                samples = {
                    sign: await asyncio.to_thread(
                        self.metrics.get_sample_value,
                        name,
                        {"class": self.device_class, "reason": sign[0], "state": str(sign[1])},
                    )
                    or 0.0
                    for sign in wanted
                }
                if all(samples[sign] >= count for sign, count in wanted.items()):
                    return {sign: int(count) for sign, count in samples.items()}
                await next_look()

    def _told(self, reasons: Mapping[str, str]) -> dict[str, tuple[str, HealthState]]:
        first_signs: dict[str, tuple[str, HealthState]] = {}
        for name in self._first:
            events = self._new(name)
            # A card that leaves the bus is reported as gone before a look for devices reports what
            # is missing of it.
            naming = [event for event in events if name in reasons and _names(event, reasons[name])] or events
            if naming and naming[0].health.worst is not None:
                first_signs[name] = (naming[0].health.worst.reason, naming[0].health.worst.state)
            elif naming:
                first_signs[name] = ("", naming[0].health.state)
        return first_signs

    def _new(self, name: str) -> list[HealthEvent]:
        return self._events.get(name, [])[self._first.get(name, 0) :]

    async def _until_heard(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(_LIMIT_S), self._has_heard:
            await self._has_heard.wait_for(holds)

    def _in_slices(self) -> dict[str, list[str]]:
        devices = shown(self.server)[self.device_class]
        return {device["name"]: [taint["key"] for taint in device.get("taints", ())] for device in devices}

    def _tainted(self) -> set[str]:
        return {name for name, keys in self._in_slices().items() if "topobus.dev/health" in keys}


@asynccontextmanager
async def sick_node(
    url: str,
    server: ApiServerSimulator,
    root: Path,
    folder: Path,
    drivers: Iterable[DeviceDriver],
    *,
    library_path: str = "",
    hold_s: float = 3600.0,
    cleaning: CleaningSettings | None = None,
) -> AsyncIterator[SickNode]:
    """Run the service of one class, with its drivers, on the machine below `root`, and a gateway
    with kubelet and an API server beside it.

    With the default `hold_s` no device heals within a test.
    """
    hardware = HardwareSettings(root=str(root), rescan_s=0.2, library_path=library_path)
    drivers = tuple(drivers)
    device_class = drivers[0].device_class
    server.put({"kind": "Node", "metadata": {"name": NODE}})
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(make_rig(url, classes=()))
        machine = msgspec.structs.replace(read_machine(Tree(hardware), NODE), generation=2)
        await rig.bus.put(MACHINE, machine, node=NODE)
        cluster = ClusterSettings(
            mode="kubeconfig",
            kubeconfig=str(server.write_kubeconfig(folder / "kubeconfig")),
            retry_s=0.05,
            publish_delay_s=0.01,
        )
        # Kubelet's lists are one of the roads: CPUs are in them only where
        # the settings name their class.
        rig.settings = msgspec.structs.replace(rig.settings, cluster=cluster, exposure={"cpu": "both"})
        node = SickNode(rig=rig, server=server, device_class=device_class)
        await stack.enter_async_context(rig.kubelet)
        await stack.enter_async_context(rig.gateway())
        serving = device_service(
            url, hardware, drivers, HealthSettings(poll_s=0.05, hold_s=hold_s), folder / "journal", cleaning=cleaning
        )
        node.metrics = await stack.enter_async_context(serving)
        listening = asyncio.create_task(node.listen())
        try:
            yield node
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


@asynccontextmanager
async def device_service(
    url: str,
    hardware: HardwareSettings,
    drivers: Iterable[DeviceDriver],
    health: HealthSettings,
    journal: Path,
    *,
    cleaning: CleaningSettings | None = None,
) -> AsyncIterator[CollectorRegistry]:
    """Run the device service of these drivers' class, for the length of a block. Its metrics."""
    registry = DriverRegistry(drivers=tuple(drivers))
    device_class = registry.drivers[0].device_class
    settings = DeviceServiceSettings(
        node=NODE,
        hardware=hardware,
        journal=JournalSettings(dir=str(journal)),
        drivers=DriverSettings(timeout_s=_LIMIT_S, first_wait_s=_LIMIT_S),
        health=health,
        cleaning=cleaning or CleaningSettings(),
    )
    async with Bus.session(NatsSettings(url=url), name=device_class) as bus:
        metrics = CollectorRegistry()
        runtime = Runtime(
            name=device_class, node=NODE, bus=bus, clock=SystemClock(), readiness=Readiness(), registry=metrics
        )
        task = asyncio.create_task(serve_devices(settings, runtime, device_class, registry=registry))
        try:
            yield metrics
        finally:
            task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError), result


def _all_are_well(inventory: Inventory, count: int) -> bool:
    return len(inventory.devices) == count and all(
        device.health.state is HealthState.HEALTHY for device in inventory.devices
    )


def _names(event: HealthEvent, reason: str) -> bool:
    return any(condition.reason == reason for condition in event.health.conditions)
