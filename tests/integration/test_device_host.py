"""The device host against a real NATS server: inventories, health events, restarts, and drivers that hang."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from topobus.contracts.catalogue import HEALTH, HINTS, INVENTORY, LEDGER, MACHINE, PREPARE, UNPREPARE
from topobus.contracts.codec import encode
from topobus.contracts.messages import HealthEvent, HintsReply, HintsRequest, Prepared, PrepareRequest, UnprepareRequest
from topobus.devicekit import host
from topobus.devicekit.health import HealthSettings
from topobus.devicekit.host import serve_devices
from topobus.devicekit.inventory_merge import Roster
from topobus.devicekit.registry import DriverRegistry, SkippedPlugin
from topobus.devicekit.settings import DeviceServiceSettings, DriverSettings
from topobus.domain.device import Device, Inventory
from topobus.domain.errors import PeerUnavailable
from topobus.domain.health import Dimension, HealthState, Observation
from topobus.domain.hint import Hint
from topobus.domain.idset import NodeSet
from topobus.domain.ledger import Allocation, Holding, Ledger
from topobus.domain.outcome import Refusal
from topobus.domain.pci import PciAddress
from topobus.domain.request import Owner, OwnerKind
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.runtime.bus import Bus
from topobus.runtime.clock import Clock, SystemClock
from topobus.runtime.config import NatsSettings
from topobus.runtime.readiness import Readiness
from topobus.runtime.service import Runtime
from topobus.simulation.machines import RecordedMachine, build
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.clock import ManualClock
from topobus.testing.drivers.toy_driver import ToyDriver
from topobus.testing.reading import Reader

pytestmark = pytest.mark.integration

_NODE = "n1"
_PROFILES = Path(__file__).parent.parent / "data" / "profiles"
_OWNER = Owner(kind=OwnerKind.DEVICE_PLUGIN, name="topobus.dev/gpu", uid="u1")
# Longer than anything here takes on a busy machine; a test that hangs fails with this.
_LIMIT_S = 20.0
_POLL_S = 0.05
_TIMEOUT_S = 5.0


class _Bench:
    """One service under test, the machine it runs on, and what it says."""

    def __init__(self, bus: Bus, url: str, recorded: RecordedMachine) -> None:
        self.bus = bus
        self.url = url
        self.recorded = recorded
        self.hardware = HardwareSettings(root=str(recorded.root), rescan_s=0.2)
        self._generation = 0

    async def publish_machine(self) -> None:
        """Do discovery's work."""
        self._generation += 1
        machine = read_machine(Tree(self.hardware), _NODE)
        await self.bus.put(MACHINE, type(machine)(**{**_fields(machine), "generation": self._generation}), node=_NODE)

    @asynccontextmanager
    async def service(
        self,
        *drivers: ToyDriver | NvidiaDriver,
        skipped: tuple[SkippedPlugin, ...] = (),
        health: HealthSettings | None = None,
        timeout_s: float = _TIMEOUT_S,
        readiness: Readiness | None = None,
        clock: Clock | None = None,
    ) -> AsyncIterator[None]:
        """Run the gpu service with these drivers on a connection of its own."""
        settings = DeviceServiceSettings(
            node=_NODE,
            hardware=self.hardware,
            drivers=DriverSettings(timeout_s=timeout_s, first_wait_s=2.0),
            health=health or HealthSettings(poll_s=_POLL_S, hold_s=0.2),
        )
        async with Bus.session(NatsSettings(url=self.url), name="gpu") as bus:
            runtime = Runtime(
                name="gpu",
                node=_NODE,
                bus=bus,
                clock=clock or SystemClock(),
                readiness=readiness or Readiness(),
                registry=CollectorRegistry(),
            )
            task = asyncio.create_task(serve_devices(settings, runtime, "gpu", registry=DriverRegistry(drivers=drivers, skipped=skipped)))
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
            async with asyncio.timeout(_LIMIT_S):
                async for change in self.bus.watch(INVENTORY, node=_NODE, device_class="gpu"):
                    seen = change.value or seen
                    if change.value is not None and wanted(change.value):
                        return change.value
        except TimeoutError as err:
            raise AssertionError(f"no such inventory; the last was {seen}") from err
        raise AssertionError("the watch ended")

    async def event(self, wanted: Callable[[HealthEvent], bool]) -> HealthEvent:
        """Wait for a health event as wanted; old ones count, too."""
        async with asyncio.timeout(_LIMIT_S):
            async for received in self.bus.follow(HEALTH, node=_NODE, device_class="gpu"):
                if wanted(received.value):
                    return received.value
        raise AssertionError("the stream ended")

    async def hints_once_up(self, *available: str) -> HintsReply:
        """Ask for hints until the service answers: from then on it is up."""
        async with asyncio.timeout(_LIMIT_S):
            while True:
                try:
                    request = HintsRequest(count=1, available=available)
                    return await self.bus.ask(HINTS, request, timeout_s=5, node=_NODE, device_class="gpu")
                except PeerUnavailable:
                    # Each round is a round trip to the server, so this loop does not spin.
                    continue

    async def events(self, device: str) -> list[HealthEvent]:
        """Give all events of a device so far."""
        return [
            received_event.value for received_event in await self.bus.last(HEALTH, limit=64, node=_NODE, device_class="gpu", device=device)
        ]


class _CountingDriver(ToyDriver):
    """Counts the looks at its devices."""

    def __init__(self, name: str, *, count: int) -> None:
        super().__init__(name, count=count)
        self.looks = 0
        self.loop = asyncio.get_running_loop()
        self.has_looked = asyncio.Event()

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Look, and count."""
        self.looks += 1
        self.loop.call_soon_threadsafe(self.has_looked.set)
        return super().observe(tree, devices)

    async def after(self, *, looks: int) -> None:
        """Wait until so many looks more have begun."""
        wanted = self.looks + looks
        while self.looks < wanted:
            self.has_looked.clear()
            await self.has_looked.wait()


def _fields(value: object) -> dict[str, object]:
    return {name: getattr(value, name) for name in value.__struct_fields__}  # type: ignore[attr-defined]


def _states(inventory: Inventory) -> dict[str, HealthState]:
    return {device.name: device.health.state for device in inventory.devices}


def _is(state: HealthState, device: str) -> Callable[[Inventory], bool]:
    return lambda inventory: _states(inventory).get(device) is state


@pytest.fixture
def bench(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> _Bench:
    """Give a bench with two GPUs and a NIC under one switch."""
    return _Bench(bus, nats_server.url, build(_PROFILES / "h100-pair.toml", tmp_path / "machine"))


@pytest.fixture
def own_bench(own_bus: Bus, own_nats_server: NatsServer, tmp_path: Path) -> _Bench:
    """The same on a server whose store can be lost."""
    return _Bench(own_bus, own_nats_server.url, build(_PROFILES / "h100-pair.toml", tmp_path / "machine"))


@pytest.fixture
def gpus(bench: _Bench) -> tuple[str, str]:
    """Give the names of the bench's GPUs."""
    first, second = (f"gpu-{one.replace(':', '-').replace('.', '-')}" for one in bench.recorded.pci("h100"))
    return first, second


async def test_inventory_lists_eight_gpus_in_place_when_the_machine_is_a_dgx(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> None:
    """The demo machine's GPUs come in one inventory: four a NUMA node, two a switch, each under its root complex, healthy."""
    bench = _Bench(bus, nats_server.url, build("dgx", tmp_path / "machine"))
    await bench.publish_machine()

    async with bench.service(NvidiaDriver()):
        inventory = await bench.inventory(lambda each_inventory: bool(each_inventory.devices))

    assert inventory.generation == 1
    assert [(str(device.pci), device.numa_nodes, device.pcie_root, str(device.pcie_switch)) for device in inventory.devices] == [
        ("0000:18:00.0", NodeSet(0), "pci0000:15", "0000:16:00.0"),
        ("0000:1a:00.0", NodeSet(0), "pci0000:15", "0000:16:00.0"),
        ("0000:4b:00.0", NodeSet(0), "pci0000:48", "0000:49:00.0"),
        ("0000:4d:00.0", NodeSet(0), "pci0000:48", "0000:49:00.0"),
        ("0000:9a:00.0", NodeSet(1), "pci0000:97", "0000:98:00.0"),
        ("0000:9c:00.0", NodeSet(1), "pci0000:97", "0000:98:00.0"),
        ("0000:ca:00.0", NodeSet(1), "pci0000:c7", "0000:c8:00.0"),
        ("0000:cc:00.0", NodeSet(1), "pci0000:c7", "0000:c8:00.0"),
    ]
    assert set(_states(inventory).values()) == {HealthState.HEALTHY}


class _TellingReadiness(Readiness):
    """Readiness that can be waited for: a service calls itself ready a moment after its inventory is out."""

    def __init__(self) -> None:
        super().__init__()
        self.has_come = asyncio.Event()

    def set(self, part: str, is_ready: bool, why: str = "") -> None:
        """Note the word, and tell when all is ready."""
        super().set(part, is_ready, why)
        if self.is_ready:
            self.has_come.set()


async def test_service_is_not_ready_when_the_machine_is_missing(bench: _Bench, gpus: tuple[str, str]) -> None:
    """Without discovery's word the service publishes nothing, says what it waits for, and goes on as soon as the word comes."""
    readiness = _TellingReadiness()

    async with bench.service(NvidiaDriver(), readiness=readiness):
        answer = await bench.hints_once_up(*gpus)
        early = readiness.report()
        published_early = await bench.bus.get(INVENTORY, node=_NODE, device_class="gpu")
        await bench.publish_machine()
        await bench.inventory(lambda inventory: len(inventory.devices) == 2)
        async with asyncio.timeout(_LIMIT_S):
            await readiness.has_come.wait()

    assert early["machine"] == "waiting for discovery to publish the machine"
    assert answer.hints is None
    assert published_early is None
    assert readiness.report() == {"inventory": "ready", "machine": "ready"}


async def test_inventory_is_empty_and_says_who_looked_when_there_is_no_hardware(bench: _Bench) -> None:
    """No hardware is an ordinary state: an empty inventory with the names of the drivers that looked."""
    await bench.publish_machine()

    async with bench.service(ToyDriver("acme"), ToyDriver("other")):
        inventory = await bench.inventory(lambda _: True)

    assert (inventory.devices, inventory.drivers, inventory.generation) == ((), ("acme", "other"), 1)


async def test_health_tells_the_whole_story_when_a_gpu_vanishes_and_returns(bench: _Bench, gpus: tuple[str, str]) -> None:
    """Gone: Unhealthy, with the owner who is hit; back: Recovering, then Healthy. Events are numbered; the inventory agrees; the neighbour is left alone."""
    gpu, neighbour = gpus
    address = bench.recorded.pci("h100")[0]
    allocation = Allocation(owner=_OWNER, holdings=(Holding(devices={"gpu": (gpu,)}),))
    await bench.bus.put(LEDGER, Ledger(node=_NODE, allocations={_OWNER.key: allocation}), node=_NODE)
    await bench.publish_machine()

    async with bench.service(NvidiaDriver()):
        await bench.inventory(_is(HealthState.HEALTHY, gpu))
        bench.recorded.remove_pci(address)
        await bench.publish_machine()
        sick = await bench.inventory(_is(HealthState.UNHEALTHY, gpu))
        bench.recorded.restore_pci(address)
        await bench.publish_machine()
        await bench.inventory(_is(HealthState.HEALTHY, gpu))
        await bench.event(lambda health_event: health_event.device == gpu and health_event.generation == 4)

    events = await bench.events(gpu)
    device = sick.device(gpu)
    assert device is not None
    assert device.pci == PciAddress.parse(address), "a vanished device keeps its facts"
    assert _states(sick)[neighbour] is HealthState.HEALTHY
    assert [(event.generation, event.previous, event.health.state) for event in events] == [
        (1, None, HealthState.HEALTHY),
        (2, HealthState.HEALTHY, HealthState.UNHEALTHY),
        (3, HealthState.UNHEALTHY, HealthState.RECOVERING),
        (4, HealthState.RECOVERING, HealthState.HEALTHY),
    ]
    assert [condition.reason for condition in events[1].health.conditions] == ["fell-off-bus"]
    assert events[1].affected == (_OWNER,)
    assert len(await bench.events(neighbour)) == 1


async def test_health_names_the_present_holder_when_the_ledger_changed_since_the_last_event(bench: _Bench, gpus: tuple[str, str]) -> None:
    """An event names who holds the device when it is told, not who held it when the service started or at the event before."""
    gpu, _ = gpus
    address = bench.recorded.pci("h100")[0]
    allocation = Allocation(owner=_OWNER, holdings=(Holding(devices={"gpu": (gpu,)}),))
    await bench.publish_machine()

    async with bench.service(NvidiaDriver()):
        await bench.inventory(_is(HealthState.HEALTHY, gpu))
        await bench.bus.put(LEDGER, Ledger(node=_NODE, allocations={_OWNER.key: allocation}), node=_NODE)
        bench.recorded.remove_pci(address)
        await bench.publish_machine()
        gone = await bench.event(lambda health_event: health_event.device == gpu and health_event.generation == 2)
        await bench.bus.put(LEDGER, Ledger(node=_NODE, sequence=1), node=_NODE)
        bench.recorded.restore_pci(address)
        await bench.publish_machine()
        back = await bench.event(lambda health_event: health_event.device == gpu and health_event.generation == 3)

    assert gone.affected == (_OWNER,)
    assert back.affected == ()


async def test_restart_repeats_nothing_when_nothing_changed(bench: _Bench, gpus: tuple[str, str]) -> None:
    """A second life publishes no inventory and no event that says the same again, and numbers on from the first."""
    gpu, _ = gpus
    await bench.publish_machine()
    async with bench.service(NvidiaDriver()):
        await bench.event(lambda health_event: health_event.device == gpu)
        first = await bench.inventory(lambda inventory: len(inventory.devices) == 2)

    readiness = Readiness()
    async with bench.service(NvidiaDriver(), readiness=readiness):
        async with asyncio.timeout(_LIMIT_S):
            while not readiness.is_ready:
                await bench.hints_once_up(gpu)
        bench.recorded.remove_pci(bench.recorded.pci("h100")[0])
        await bench.publish_machine()
        second = await bench.inventory(_is(HealthState.UNHEALTHY, gpu))
        await bench.event(lambda health_event: health_event.device == gpu and health_event.generation == 2)

    assert (first.generation, second.generation) == (1, 2)
    assert [event.generation for event in await bench.events(gpu)] == [1, 2]


async def test_host_takes_no_step_when_the_drivers_see_what_they_saw(bench: _Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """At last ten looks in a row bring no step, and the first fault after them is told."""
    driver, steps = _CountingDriver("calm", count=1), 0
    advance = host.advance_roster

    def counted(*given: Any, **named: Any) -> Roster:
        nonlocal steps
        steps += 1
        return advance(*given, **named)

    monkeypatch.setattr(host, "advance_roster", counted)
    await bench.publish_machine()
    async with bench.service(driver):
        await bench.inventory(_is(HealthState.HEALTHY, "calm-0"))
        before = -1
        async with asyncio.timeout(_LIMIT_S):
            while steps != before:
                before = steps
                await driver.after(looks=10)
        driver.faults = {"calm-0": (Observation(dimension=Dimension.MEMORY, state=HealthState.UNHEALTHY, reason="ecc"),)}
        await bench.inventory(_is(HealthState.UNHEALTHY, "calm-0"))

    assert before > 0


async def test_hung_driver_hurts_nobody_else_when_it_hangs(bench: _Bench) -> None:
    """A hung driver's devices become Unknown and stay listed; another driver's faults are told as ever; when it returns, its devices are back."""
    hung, well = ToyDriver("hung", count=1), ToyDriver("well", count=1)
    await bench.publish_machine()

    clock = ManualClock()
    async with bench.service(hung, well, clock=clock):
        await bench.inventory(lambda inventory: set(_states(inventory).values()) == {HealthState.HEALTHY} and len(inventory.devices) == 2)
        hung.go.clear()
        async with clock.ticking(_POLL_S):
            await asyncio.to_thread(hung.held.wait)
        await clock.asleep(_POLL_S)  # the other driver has looked: the limit of no call of its own comes now
        clock.advance(_TIMEOUT_S)
        unknown = await bench.inventory(_is(HealthState.UNKNOWN, "hung-0"))
        well.faults = {"well-0": (Observation(dimension=Dimension.MEMORY, state=HealthState.UNHEALTHY, reason="ecc"),)}
        async with clock.ticking(_POLL_S):
            both = await bench.inventory(_is(HealthState.UNHEALTHY, "well-0"))
            hung.go.set()
            back = await bench.inventory(_is(HealthState.HEALTHY, "hung-0"))

    assert _states(unknown) == {"hung-0": HealthState.UNKNOWN, "well-0": HealthState.HEALTHY}
    assert _states(both) == {"hung-0": HealthState.UNKNOWN, "well-0": HealthState.UNHEALTHY}
    assert back.warnings == ()


async def test_first_inventory_comes_when_one_driver_hangs_from_the_start(bench: _Bench) -> None:
    """The first inventory waits for a slow driver only as long as first_wait_s: registration never hangs on one vendor."""
    hung, well = ToyDriver("hung", count=1), ToyDriver("well", count=1)
    hung.go.clear()
    await bench.publish_machine()

    async with bench.service(hung, well):
        early = await bench.inventory(lambda _: True)
        hung.go.set()
        late = await bench.inventory(lambda inventory: len(inventory.devices) == 2)

    assert list(_states(early)) == ["well-0"]
    assert list(_states(late)) == ["hung-0", "well-0"]


async def test_failing_driver_is_named_in_warnings_when_it_raises(bench: _Bench) -> None:
    """A driver that raises makes its own devices Unknown, and the inventory says why."""
    toy = ToyDriver("acme", count=1)
    await bench.publish_machine()

    async with bench.service(toy):
        await bench.inventory(_is(HealthState.HEALTHY, "acme-0"))
        toy.error = RuntimeError("firmware said no")
        inventory = await bench.inventory(_is(HealthState.UNKNOWN, "acme-0"))

    assert "firmware said no" in inventory.warnings[0]


async def test_skipped_plugin_is_named_in_warnings_when_it_cannot_be_loaded(bench: _Bench) -> None:
    """A plugin that does not load is told to everybody who reads the inventory; the others run."""
    await bench.publish_machine()

    async with bench.service(ToyDriver("acme", count=1), skipped=(SkippedPlugin(name="broken", value="no:Driver", why="ImportError: no"),)):
        inventory = await bench.inventory(lambda _: True)

    assert inventory.warnings == ("broken: plugin is skipped: ImportError: no",)
    assert list(_states(inventory)) == ["acme-0"]


async def test_vanished_device_leaves_when_it_is_free_and_stays_when_it_is_held(bench: _Bench) -> None:
    """After forget_s a free device leaves with an is_removed event; a held one stays listed as Unhealthy."""
    toy = ToyDriver("acme", count=2)
    allocation = Allocation(owner=_OWNER, holdings=(Holding(devices={"gpu": ("acme-0",)}),))
    await bench.bus.put(LEDGER, Ledger(node=_NODE, allocations={_OWNER.key: allocation}), node=_NODE)
    await bench.publish_machine()

    async with bench.service(toy, health=HealthSettings(poll_s=0.05, hold_s=0.2, forget_s=0.2)):
        await bench.inventory(lambda inventory: len(inventory.devices) == 2)
        toy.names = ()
        left = await bench.inventory(lambda inventory: len(inventory.devices) == 1)
        event = await bench.event(lambda health_event: health_event.device == "acme-1" and health_event.is_removed)
        toy.names = ("acme-1",)
        again = await bench.event(
            lambda health_event: (
                health_event.device == "acme-1" and not health_event.is_removed and health_event.generation > event.generation
            )
        )

    assert _states(left) == {"acme-0": HealthState.UNHEALTHY}
    assert event.health.state is HealthState.UNHEALTHY
    assert (again.previous, again.generation) == (None, event.generation + 1)


async def test_sticky_fault_heals_when_the_operator_forgives_it(bench: _Bench) -> None:
    """A sticky fault outlives its evidence and a restart; a start with health.forgive lets it heal."""
    toy = ToyDriver("acme", count=1)
    fault = Observation(dimension=Dimension.COMPUTE, state=HealthState.UNHEALTHY, reason="xid", is_sticky=True)
    await bench.publish_machine()

    async with bench.service(toy):
        await bench.inventory(_is(HealthState.HEALTHY, "acme-0"))
        toy.faults = {"acme-0": (fault,)}
        await bench.event(lambda health_event: health_event.generation == 2)
    toy.faults = {}
    async with bench.service(toy, health=HealthSettings(poll_s=0.05, hold_s=0.2, forgive=("acme-0",))):
        await bench.event(lambda health_event: health_event.generation == 4)

    assert [event.health.state for event in await bench.events("acme-0")] == [
        HealthState.HEALTHY,
        HealthState.UNHEALTHY,
        HealthState.RECOVERING,
        HealthState.HEALTHY,
    ]


async def test_inventory_comes_back_when_the_store_is_lost(own_bench: _Bench, own_nats_server: NatsServer) -> None:
    """A server that comes back with an empty store gets inventory and events again, without a restart of the service."""
    toy = ToyDriver("acme", count=1)
    await own_bench.publish_machine()

    async with own_bench.service(toy):
        await own_bench.event(lambda health_event: health_event.device == "acme-0")
        await own_nats_server.stop()
        shutil.rmtree(own_nats_server.store)
        await own_nats_server.start()
        await own_bench.bus.provision()
        await own_bench.publish_machine()
        inventory = await own_bench.inventory(lambda each_inventory: len(each_inventory.devices) == 1)
        event = await own_bench.event(lambda health_event: health_event.device == "acme-0")

    assert _states(inventory) == {"acme-0": HealthState.HEALTHY}
    assert event.generation == 1


_FORGED_INVENTORIES: dict[str, Callable[[Inventory], bytes]] = {
    "an-acknowledgement": lambda _one: b'{"stream":"TOPOBUS_HEALTH","seq":7}',
    "nothing": lambda _one: b"",
    "no-devices": lambda inventory: encode(msgspec.structs.replace(inventory, devices=())),
    "the-last-generation": lambda inventory: encode(msgspec.structs.replace(inventory, generation=2**53, devices=())),
    "of-another-node": lambda inventory: encode(msgspec.structs.replace(inventory, node="elsewhere")),
}


@pytest.mark.parametrize("forgery", _FORGED_INVENTORIES)
async def test_inventory_is_written_again_when_somebody_writes_over_it(bench: _Bench, forgery: str) -> None:
    """Garbage and false inventories are healed by the owner while it runs, with a generation that readers take."""
    await bench.publish_machine()

    async with bench.service(ToyDriver("acme", count=1)):
        inventory = await bench.inventory(lambda each_inventory: len(each_inventory.devices) == 1)
        forged = _FORGED_INVENTORIES[forgery](inventory)
        subject, stream = f"$KV.{INVENTORY.bucket}.{_NODE}.gpu", f"KV_{INVENTORY.bucket}"
        at = await bench.bus._states._jetstream.store(subject, forged, stream=stream, headers={})
        async with Reader(bench.bus.watch(INVENTORY, node=_NODE, device_class="gpu")) as changes:
            healed = (await changes.until(lambda items: any(change.revision > at and change.value for change in items)))[-1].value

    assert healed is not None
    assert healed.devices == inventory.devices
    assert healed.generation < 2**40


async def test_inventory_is_written_again_when_somebody_deletes_it(bench: _Bench) -> None:
    """A deletion marker is no word of the owner's."""
    await bench.publish_machine()

    async with bench.service(ToyDriver("acme", count=1)):
        inventory = await bench.inventory(lambda each_inventory: len(each_inventory.devices) == 1)
        await bench.bus.delete(INVENTORY, node=_NODE, device_class="gpu")
        async with Reader(bench.bus.watch(INVENTORY, node=_NODE, device_class="gpu")) as changes:
            healed = (await changes.until(lambda items: any(change.value for change in items)))[-1].value

    assert healed is not None
    assert healed.devices == inventory.devices


async def test_inventory_goes_on_when_the_life_before_left_a_generation_at_the_end(bench: _Bench) -> None:
    """A forged generation in the bucket at the start is not gone on from: its successor would be unreadable for everybody."""
    await bench.publish_machine()
    await bench.bus.put(INVENTORY, Inventory(node=_NODE, device_class="gpu", generation=2**53), node=_NODE, device_class="gpu")

    async with bench.service(ToyDriver("acme", count=1)):
        inventory = await bench.inventory(lambda each_inventory: len(each_inventory.devices) == 1)

    assert inventory.generation < 2**40


async def test_health_is_said_again_when_another_class_pushed_it_out_of_the_stream(bench: _Bench) -> None:
    """The newest event of each device is its present state for late subscribers, also after somebody else has filled the stream."""
    await bench.publish_machine()

    async with bench.service(ToyDriver("acme", count=2)):
        first = {name: await bench.event(lambda one, name=name: one.device == name) for name in ("acme-0", "acme-1")}
        await _fill_health(bench.bus)
        # Late subscribers: their snapshot begins after the flood.
        again = {name: await bench.event(lambda one, name=name: one.device == name) for name in first}

    assert {name: health_event.health.state for name, health_event in again.items()} == dict.fromkeys(first, HealthState.HEALTHY)
    assert [health_event.generation > first[name].generation for name, health_event in again.items()] == [True, True]


@pytest.mark.parametrize("stream", [f"KV_{INVENTORY.bucket}", HEALTH.stream, f"KV_{MACHINE.bucket}"])
async def test_service_says_all_again_when_a_stream_is_deleted_under_it(bench: _Bench, stream: str) -> None:
    """A deleted stream is made again and holds again what this service has to say, without a restart and without a reconnect."""
    await bench.publish_machine()

    async with bench.service(ToyDriver("acme", count=1)):
        await bench.inventory(lambda each_inventory: len(each_inventory.devices) == 1)
        await bench.event(lambda health_event: health_event.device == "acme-0")
        await bench.bus._states._jetstream.call(f"STREAM.DELETE.{stream}")
        inventory = await bench.inventory(lambda each_inventory: len(each_inventory.devices) == 1)
        event = await bench.event(lambda health_event: health_event.device == "acme-0")

    assert _states(inventory) == {"acme-0": event.health.state}


async def _fill_health(bus: Bus) -> None:
    """Write more events of a class of somebody else's than the stream takes; a small stream, so that it is soon done."""
    api = bus._states._jetstream
    info = await api.stream_info(HEALTH.stream)
    assert info is not None
    await api.call(f"STREAM.UPDATE.{HEALTH.stream}", {**info.config, "max_bytes": 1024 * 1024})
    for number in range(40):
        subject = HEALTH.subject(node=_NODE, device_class="nic", device=f"flood-{number}")
        await api.store(subject, b"x" * 60_000, stream=HEALTH.stream, headers={})


async def test_prepare_and_hints_are_answered_when_asked_over_the_bus(bench: _Bench, gpus: tuple[str, str]) -> None:
    """Prepare gives edits of each GPU and the variable for all; hints follow the devices' NUMA node; unknown devices are refused."""
    await bench.publish_machine()

    async with bench.service(NvidiaDriver()):
        await bench.inventory(lambda inventory: len(inventory.devices) == 2)
        where = {"node": _NODE, "device_class": "gpu"}
        request = PrepareRequest(op_id="op-1", owner=_OWNER, devices=gpus)
        first = await bench.bus.ask(PREPARE, request, **where)
        again = await bench.bus.ask(PREPARE, request, **where)
        unknown = await bench.bus.ask(PREPARE, PrepareRequest(op_id="op-2", owner=_OWNER, devices=("gpu-x",)), **where)
        async with Bus.session(NatsSettings(url=bench.url), name="gateway") as gateway:
            undone = await gateway.ask(UNPREPARE, UnprepareRequest(op_id="op-3", owner=_OWNER, devices=gpus), **where)
        hints = await bench.bus.ask(HINTS, HintsRequest(count=2, available=gpus), timeout_s=5, **where)

    assert isinstance(first.result, Prepared)
    assert first.result.edits[gpus[0]].device_nodes[0].path == "/dev/nvidia0"
    assert first.result.common.env["TOPOBUS_GPU_DEVICES"] == ",".join(gpus)
    assert first.result.common.env["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
    assert again == first
    assert isinstance(unknown.result, Refusal)
    assert undone.refusal is None
    assert hints.hints == (Hint(NodeSet(0), True),)  # noqa: FBT003 - Hint's own shape
