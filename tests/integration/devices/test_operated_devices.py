"""What a device service does with an operator's word: seen at once, kept over restarts of the
service and of the store, done once for one id.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from support.asking import ask_patiently
from support.device_bench import LIMIT_S, NODE, OWNER, DeviceBench, has_state
from support.garbage import write_garbage
from support.looks import next_look, other_threads
from support.runtimes import runtime_of
from support.toy_driver import ToyDriver
from topobus.bus.bus import Bus
from topobus.devicekit.maintenance import device_operator
from topobus.devicekit.maintenance.maintenance_store import MaintenanceStore
from topobus.engine.health.health_machine import HealthSettings
from topobus.formats.messages.catalogue import INVENTORY, LEDGER, MAINTENANCE, PERFORM, PREPARE
from topobus.formats.messages.messages import Prepared, PrepareRequest
from topobus.formats.messages.operation_messages import ClassMaintenance, Operated, PerformRequest
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.tree import Tree
from topobus.values.device import Device, Inventory
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.health import Dimension, HealthState, Observation
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.maintenance import DeviceOperation, DeviceVerb
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.both_buses]

POD = Owner(kind=OwnerKind.POD, name="trainer", uid="p1")
STICKY = Observation(dimension=Dimension.MEMORY, state=HealthState.UNHEALTHY, reason="row-remap-failed", is_sticky=True)


class _ResettingToy(ToyDriver):
    """Counts resets."""

    def __init__(self) -> None:
        super().__init__("toy", count=2)
        self.resets: list[str] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def reset(self, tree: Tree, device: Device) -> Refusal | None:
        """Reset."""
        self.resets.append(device.name)
        self.may_end.wait(LIMIT_S)
        return None


@asynccontextmanager
async def _topology(bench: DeviceBench) -> AsyncIterator[Bus]:
    async with Bus.session(NatsSettings(url=bench.url), name="topology") as bus:
        yield bus


def _request(verb: DeviceVerb, op_id: str, *, device: str = "gpu-toy-0", is_draining: bool = False) -> PerformRequest:
    operation = DeviceOperation(
        device_class="gpu", device=device, verb=verb, why="fan", who="ada", is_draining=is_draining
    )
    return PerformRequest(op_id=op_id, operation=operation, time="2026-01-02T03:04:05.000000Z")


async def _perform(bus: Bus, verb: DeviceVerb, op_id: str, *, device: str = "gpu-toy-0") -> Operated | Refusal:
    return (await bus.ask(PERFORM, _request(verb, op_id, device=device), node=NODE, device_class="gpu")).result


def _kept_back(device: str, *, is_so: bool = True) -> Callable[[Inventory], bool]:
    def wanted(inventory: Inventory) -> bool:
        listed = inventory.device(device)
        return listed is not None and (listed.maintenance is not None) is is_so

    return wanted


def _code(result: Operated | Refusal) -> str:
    assert isinstance(result, Refusal)
    return result.reasons[0].code


async def test_device_is_seen_as_kept_back_when_the_answer_comes(bench: DeviceBench) -> None:
    """The inventory says it by then, the neighbour is offered, a new user is refused, and one who
    had it is made ready again.
    """
    await bench.publish_machine()
    async with _topology(bench) as bus, bench.service(ToyDriver(count=2)):
        await bench.inventory(has_state(HealthState.HEALTHY, "gpu-toy-0"))
        result = await _perform(bus, DeviceVerb.MAINTAIN, "op-1")
        entry = await bench.inventory(lambda _: True)
        async with Bus.session(NatsSettings(url=bench.url), name="gateway") as gateway:
            new = await gateway.ask(
                PREPARE, PrepareRequest(op_id="", owner=OWNER, devices=("gpu-toy-0",)), node=NODE, device_class="gpu"
            )
            again = await gateway.ask(
                PREPARE,
                PrepareRequest(op_id="", owner=OWNER, devices=("gpu-toy-0",), is_again=True),
                node=NODE,
                device_class="gpu",
            )

    assert isinstance(result, Operated)
    device, neighbour = entry.device("gpu-toy-0"), entry.device("gpu-toy-1")
    assert device is not None
    assert neighbour is not None
    assert (device.is_allocatable, device.maintenance, device.health.state) == (
        False,
        result.maintenance,
        HealthState.HEALTHY,
    )
    assert neighbour.is_allocatable
    assert isinstance(new.result, Refusal)
    assert new.result.reasons[0].code == "device-kept-back"
    assert isinstance(again.result, Prepared)


async def test_word_stands_when_the_service_begins_anew(bench: DeviceBench) -> None:
    """The same id gets the same answer, and the service that starts again does not offer the device
    for a moment.
    """
    await bench.publish_machine()
    async with _topology(bench) as bus:
        async with bench.service(ToyDriver(count=2)):
            await bench.inventory(has_state(HealthState.HEALTHY, "gpu-toy-0"))
            first = await _perform(bus, DeviceVerb.EXCLUDE, "op-1")
        generation = (await bench.inventory(lambda _: True)).generation
        async with bench.service(ToyDriver(count=2)):
            again = await _perform_patiently(bus, DeviceVerb.EXCLUDE, "op-1")
            returned = await _perform(bus, DeviceVerb.RETURN, "op-2")
            await bench.inventory(_kept_back("gpu-toy-0", is_so=False))
        history = await bench.bus.history(INVENTORY, node=NODE, device_class="gpu")

    assert isinstance(first, Operated)
    assert again == first
    assert isinstance(returned, Operated)
    assert (returned.maintenance, returned.is_changed) == (None, True)
    # Between the word and its end nothing else was said of it.
    offered = [
        entry.value.generation
        for entry in history
        if not _kept_back("gpu-toy-0")(entry.value) and entry.value.generation > generation
    ]
    assert offered in ([], [history[-1].value.generation])


@pytest.mark.real_server
async def test_word_is_written_again_when_the_store_is_lost(
    own_bench: DeviceBench, own_nats_server: NatsServer
) -> None:
    """A server that comes back with an empty store is told by the service that runs on, so that its
    next start knows it.
    """
    bench = own_bench
    await bench.publish_machine()
    async with bench.service(ToyDriver(count=2)):
        await bench.inventory(has_state(HealthState.HEALTHY, "gpu-toy-0"))
        async with _topology(bench) as bus:
            first = await _perform(bus, DeviceVerb.MAINTAIN, "op-1")
        await own_nats_server.stop()
        shutil.rmtree(own_nats_server.store)
        await own_nats_server.start()
        await bench.bus.provision()
        await bench.publish_machine()
        stored = await _stored(bench)
        inventory = await bench.inventory(_kept_back("gpu-toy-0"))

    assert isinstance(first, Operated)
    assert stored.devices == {"gpu-toy-0": first.maintenance}
    assert _kept_back("gpu-toy-0")(inventory)


async def _stored(bench: DeviceBench) -> ClassMaintenance:
    async with asyncio.timeout(LIMIT_S):
        async for change in bench.bus.watch(MAINTENANCE, node=NODE, device_class="gpu"):
            if change.value is not None:
                return change.value
    raise AssertionError("the watch ended")


async def _perform_patiently(bus: Bus, verb: DeviceVerb, op_id: str) -> Operated | Refusal:
    """Ask a service that is starting."""
    return (await ask_patiently(bus, PERFORM, _request(verb, op_id), node=NODE, device_class="gpu")).result


async def test_words_are_left_as_they_are_when_another_release_wrote_them_and_they_cannot_be_read(
    bench: DeviceBench,
) -> None:
    """What was kept back under that release would be offered, so the service ends, and writes
    nothing.
    """
    revision = await write_garbage(bench.bus, MAINTENANCE, release="99.0.0", node=NODE, device_class="gpu")
    runtime = runtime_of("gpu", NODE, bench.bus)
    with pytest.raises(ContractError, match=r"release 99\.0\.0 wrote it") as ended:
        await MaintenanceStore(runtime, "gpu").load()
    with pytest.raises(ContractError) as unread:
        await bench.bus.get(MAINTENANCE, node=NODE, device_class="gpu")

    assert "start that release here again" in ended.value.next_step
    assert unread.value.facts["revision"] == revision


async def test_device_recovers_when_its_sticky_fault_is_forgiven(bench: DeviceBench) -> None:
    """Without a restart.

    While the evidence is seen it stays Unhealthy, and when that ends it heals,
    which unforgiven it never would.
    """
    driver = ToyDriver(count=2)
    driver.faults = {"gpu-toy-0": (STICKY,)}
    await bench.publish_machine()
    async with _topology(bench) as bus, bench.service(driver, health=HealthSettings(poll_s=0.05, hold_s=0.0)):
        await bench.inventory(has_state(HealthState.UNHEALTHY, "gpu-toy-0"))
        result = await _perform(bus, DeviceVerb.FORGIVE, "op-1")
        forgiven = await bench.inventory(lambda _: True)
        driver.faults = {}
        await bench.inventory(has_state(HealthState.HEALTHY, "gpu-toy-0"))
        again = await _perform(bus, DeviceVerb.FORGIVE, "op-1")
        healthy = await _perform(bus, DeviceVerb.FORGIVE, "op-2")

    assert isinstance(result, Operated)
    assert result.is_changed
    assert has_state(HealthState.UNHEALTHY, "gpu-toy-0")(forgiven)
    assert again == result
    assert isinstance(healthy, Operated)
    assert not healthy.is_changed


async def test_reset_is_refused_with_the_holder_when_the_device_is_held(bench: DeviceBench) -> None:
    """By the ledger; nothing is reset, and its neighbour can be."""
    driver = _ResettingToy()
    holding = Holding(devices={"gpu": ("gpu-toy-0",)})
    ledger = Ledger(node=NODE, allocations={POD.key: Allocation(owner=POD, holdings=(holding,))})
    await bench.publish_machine()
    await bench.bus.put(LEDGER, ledger, node=NODE)
    async with _topology(bench) as bus, bench.service(driver):
        await bench.inventory(has_state(HealthState.HEALTHY, "gpu-toy-0"))
        held = await _perform(bus, DeviceVerb.RESET, "op-1")
        free = await _perform(bus, DeviceVerb.RESET, "op-2", device="gpu-toy-1")
        again = await _perform(bus, DeviceVerb.RESET, "op-2", device="gpu-toy-1")
        reused = await _perform(bus, DeviceVerb.RESET, "op-2", device="gpu-toy-0")

    assert isinstance(held, Refusal)
    assert (held.reasons[0].code, "pod default/trainer holds gpu-toy-0" in held.reasons[0].message) == (
        "device-held",
        True,
    )
    assert isinstance(free, Operated)
    assert again == free
    assert _code(reused) == "operation-reused"
    assert driver.resets == ["gpu-toy-1"]


async def test_reset_and_rebind_are_refused_when_nobody_can_do_it(bench: DeviceBench) -> None:
    """A device without a PCI function whose driver has no verb for it.

    An unknown one is told apart.
    """
    await bench.publish_machine()
    async with _topology(bench) as bus, bench.service(ToyDriver(count=1)):
        await bench.inventory(has_state(HealthState.HEALTHY, "gpu-toy-0"))
        unsupported = await _perform(bus, DeviceVerb.RESET, "op-1")
        unbound = await _perform(bus, DeviceVerb.REBIND, "op-2")
        unknown = await _perform(bus, DeviceVerb.MAINTAIN, "op-3", device="gpu-toy-7")

    assert [_code(result) for result in (unsupported, unbound, unknown)] == [
        "reset-unsupported",
        "rebind-unsupported",
        "device-unknown",
    ]


async def test_reset_continues_and_has_its_answer_later_when_it_takes_long(
    bench: DeviceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it is not known, another operation finds the device busy, and asked again with the
    same id it is not done twice.
    """
    driver = _ResettingToy()
    driver.may_end.clear()
    monkeypatch.setattr(device_operator, "_ANSWER_S", 0.2)
    await bench.publish_machine()
    async with _topology(bench) as bus, bench.service(driver, timeout_s=LIMIT_S):
        await bench.inventory(has_state(HealthState.HEALTHY, "gpu-toy-0"))
        with pytest.raises(PeerUnavailable, match="reset of gpu-toy-0 is under way"):
            await _perform(bus, DeviceVerb.RESET, "op-1")
        other = await _perform(bus, DeviceVerb.REBIND, "op-2")
        driver.may_end.set()
        result = await _perform(bus, DeviceVerb.RESET, "op-1")

    assert _code(other) == "device-busy"
    assert isinstance(result, Operated)
    assert driver.resets == ["gpu-toy-0"]


async def test_device_stays_busy_until_a_late_reset_has_ended(bench: DeviceBench) -> None:
    """The asker learns that the driver hangs; no other operation gets at the device before the driver
    has come back.
    """
    driver = _ResettingToy()
    driver.may_end.clear()
    await bench.publish_machine()
    async with _topology(bench) as bus, bench.service(driver, timeout_s=0.3):
        await bench.inventory(has_state(HealthState.HEALTHY, "gpu-toy-0"))
        late = await _perform(bus, DeviceVerb.RESET, "op-1")
        other = await _perform(bus, DeviceVerb.REBIND, "op-2")
        driver.may_end.set()
        async with asyncio.timeout(LIMIT_S):
            while isinstance(await _perform(bus, DeviceVerb.RESET, "op-3"), Refusal):
                await next_look()

    assert [_code(late), _code(other)] == ["driver-hung", "device-busy"]
    assert driver.resets == ["gpu-toy-0", "gpu-toy-0"]


async def test_other_makers_devices_are_offered_throughout_when_a_driver_is_exchanged(bench: DeviceBench) -> None:
    """Kept back, idle, the driver fails as it is exchanged (Unknown), comes back with a sticky
    fault, is forgiven, heals, is returned: the neighbour is offered in each inventory.
    """
    acme, other = ToyDriver("acme", count=1), ToyDriver("other", count=1)
    shown: list[Inventory] = []

    async def record() -> None:
        # A pattern, so that no inventory is passed over.
        async for change in bench.bus.watch(INVENTORY, node=NODE):
            if change.value is not None:
                shown.append(change.value)  # noqa: PERF401  (it never ends)

    await bench.publish_machine()
    async with asyncio.TaskGroup() as group:
        recording = group.create_task(record())
        async with _topology(bench) as bus, bench.service(acme, other, health=HealthSettings(poll_s=0.05, hold_s=0.0)):
            first = await bench.inventory(lambda inventory: len(inventory.devices) == 2)
            await _perform(bus, DeviceVerb.MAINTAIN, "op-1", device="gpu-acme-0")
            acme.error = OSError("the driver is exchanged")
            await bench.inventory(has_state(HealthState.UNKNOWN, "gpu-acme-0"))
            acme.faults = {"gpu-acme-0": (STICKY,)}
            acme.error = None
            await bench.inventory(has_state(HealthState.UNHEALTHY, "gpu-acme-0"))
            await _perform(bus, DeviceVerb.FORGIVE, "op-2", device="gpu-acme-0")
            acme.faults = {}
            await bench.inventory(has_state(HealthState.HEALTHY, "gpu-acme-0"))
            await _perform(bus, DeviceVerb.RETURN, "op-3", device="gpu-acme-0")
            last = await bench.inventory(_kept_back("gpu-acme-0", is_so=False))
        async with asyncio.timeout(LIMIT_S):
            while not shown or shown[-1].generation < last.generation:
                await other_threads()
        recording.cancel()

    between = [inventory for inventory in shown if first.generation < inventory.generation < last.generation]
    assert {_is_allocatable(inventory, "gpu-other-0") for inventory in between} == {True}
    assert {_is_allocatable(inventory, "gpu-acme-0") for inventory in between} == {False}
    assert _is_allocatable(last, "gpu-acme-0")


def _is_allocatable(inventory: Inventory, name: str) -> bool:
    device = inventory.device(name)
    return device is not None and device.is_allocatable
