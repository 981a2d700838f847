"""Health of devices as users hear it: the whole story of a GPU, with its holders.

Nothing twice, and all again when it was lost.
"""

from __future__ import annotations

import pytest
from msgspec import structs

from support.device_bench import NODE, OWNER, DeviceBench, has_state, states
from support.looks import until
from support.toy_driver import ToyDriver
from topobus.bus.bus import Bus
from topobus.engine.health.health_machine import HealthSettings
from topobus.formats.messages.catalogue import HEALTH, LEDGER
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.process.readiness import Readiness
from topobus.values.health import Dimension, HealthState, Observation
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind

pytestmark = pytest.mark.integration


async def test_health_tells_the_whole_story_when_a_gpu_vanishes_and_returns(
    bench: DeviceBench, gpus: tuple[str, str]
) -> None:
    """Gone: Unhealthy, with the owner who is hit; back: Recovering, then Healthy.

    Events are numbered; the inventory agrees; the neighbour is left alone.
    """
    gpu, neighbour = gpus
    address = bench.recorded.pci("h100")[0]
    allocation = Allocation(owner=OWNER, holdings=(Holding(devices={"gpu": (gpu,)}),))
    await bench.bus.put(LEDGER, Ledger(node=NODE, allocations={OWNER.key: allocation}), node=NODE)
    await bench.publish_machine()

    async with bench.service(NvidiaDriver()):
        await bench.inventory(has_state(HealthState.HEALTHY, gpu))
        bench.recorded.remove_pci(address)
        await bench.publish_machine()
        sick = await bench.inventory(has_state(HealthState.UNHEALTHY, gpu))
        bench.recorded.restore_pci(address)
        await bench.publish_machine()
        await bench.inventory(has_state(HealthState.HEALTHY, gpu))
        await bench.event(lambda health_event: health_event.device == gpu and health_event.generation == 4)

    events = await bench.events(gpu)
    device = sick.device(gpu)
    assert device is not None
    assert device.pci == PciAddress.parse(address), "a vanished device keeps its facts"
    assert states(sick)[neighbour] is HealthState.HEALTHY
    assert [(event.generation, event.previous, event.health.state) for event in events] == [
        (1, None, HealthState.HEALTHY),
        (2, HealthState.HEALTHY, HealthState.UNHEALTHY),
        (3, HealthState.UNHEALTHY, HealthState.RECOVERING),
        (4, HealthState.RECOVERING, HealthState.HEALTHY),
    ]
    assert [condition.reason for condition in events[1].health.conditions] == ["fell-off-bus"]
    assert events[1].affected == (OWNER,)
    assert len(await bench.events(neighbour)) == 1


async def test_health_names_the_pods_behind_a_claim_when_they_use_the_device(
    bench: DeviceBench, gpus: tuple[str, str]
) -> None:
    """A claim tells an operator little.

    The event has the pods that use it, each once, beside the claim.
    """
    gpu, neighbour = gpus
    claim = Owner(kind=OwnerKind.CLAIM, name="training", uid="u2")
    pods = tuple(Owner(kind=OwnerKind.POD, name=name, uid=f"u-{name}") for name in ("trainer-0", "trainer-1"))
    allocations = {
        claim.key: Allocation(owner=claim, holdings=(Holding(devices={"gpu": (gpu, neighbour)}),), pods=pods),
    }
    await bench.publish_machine()

    async with bench.service(NvidiaDriver()):
        await bench.inventory(has_state(HealthState.HEALTHY, gpu))
        await bench.bus.put(LEDGER, Ledger(node=NODE, allocations=allocations), node=NODE)
        bench.recorded.remove_pci(bench.recorded.pci("h100")[0])
        await bench.publish_machine()
        gone = await bench.event(lambda health_event: health_event.device == gpu and health_event.generation == 2)

    assert gone.affected == (claim,)
    assert gone.pods == pods


async def test_health_names_the_present_holder_when_the_ledger_changed_since_the_last_event(
    bench: DeviceBench, gpus: tuple[str, str]
) -> None:
    """An event names who holds the device when it is told, not who held it when the service started
    or at the event before.
    """
    gpu, _ = gpus
    address = bench.recorded.pci("h100")[0]
    allocation = Allocation(owner=OWNER, holdings=(Holding(devices={"gpu": (gpu,)}),))
    await bench.publish_machine()

    async with bench.service(NvidiaDriver()):
        await bench.inventory(has_state(HealthState.HEALTHY, gpu))
        await bench.bus.put(LEDGER, Ledger(node=NODE, allocations={OWNER.key: allocation}), node=NODE)
        bench.recorded.remove_pci(address)
        await bench.publish_machine()
        gone = await bench.event(lambda health_event: health_event.device == gpu and health_event.generation == 2)
        await bench.bus.put(LEDGER, Ledger(node=NODE, sequence=1), node=NODE)
        bench.recorded.restore_pci(address)
        await bench.publish_machine()
        back = await bench.event(lambda health_event: health_event.device == gpu and health_event.generation == 3)

    assert gone.affected == (OWNER,)
    assert back.affected == ()


async def test_restart_repeats_nothing_when_nothing_changed(bench: DeviceBench, gpus: tuple[str, str]) -> None:
    """A second life publishes no inventory and no event that says the same again, and numbers on
    from the first.
    """
    gpu, _ = gpus
    await bench.publish_machine()
    async with bench.service(NvidiaDriver()):
        await bench.event(lambda health_event: health_event.device == gpu)
        first = await bench.inventory(lambda inventory: len(inventory.devices) == 2)

    readiness = Readiness()
    async with bench.service(NvidiaDriver(), readiness=readiness):
        await until(lambda: readiness.is_ready)
        bench.recorded.remove_pci(bench.recorded.pci("h100")[0])
        await bench.publish_machine()
        second = await bench.inventory(has_state(HealthState.UNHEALTHY, gpu))
        await bench.event(lambda health_event: health_event.device == gpu and health_event.generation == 2)

    assert (first.generation, second.generation) == (1, 2)
    assert [event.generation for event in await bench.events(gpu)] == [1, 2]


async def test_vanished_device_leaves_when_it_is_free_and_stays_when_it_is_held(bench: DeviceBench) -> None:
    """After forget_s a free device leaves with an is_removed event.

    A held one stays listed as Unhealthy.
    """
    toy = ToyDriver("acme", count=2)
    allocation = Allocation(owner=OWNER, holdings=(Holding(devices={"gpu": ("gpu-acme-0",)}),))
    await bench.bus.put(LEDGER, Ledger(node=NODE, allocations={OWNER.key: allocation}), node=NODE)
    await bench.publish_machine()

    async with bench.service(toy, health=HealthSettings(poll_s=0.05, hold_s=0.2, forget_s=0.2)):
        await bench.inventory(lambda inventory: len(inventory.devices) == 2)
        toy.names = ()
        left = await bench.inventory(lambda inventory: len(inventory.devices) == 1)
        event = await bench.event(lambda health_event: health_event.device == "gpu-acme-1" and health_event.is_removed)
        toy.names = ("gpu-acme-1",)
        again = await bench.event(
            lambda health_event: (
                health_event.device == "gpu-acme-1"
                and not health_event.is_removed
                and health_event.generation > event.generation
            )
        )

    assert states(left) == {"gpu-acme-0": HealthState.UNHEALTHY}
    assert event.health.state is HealthState.UNHEALTHY
    assert (again.previous, again.generation) == (None, event.generation + 1)


async def test_sticky_fault_stays_when_the_service_starts_without_its_evidence(bench: DeviceBench) -> None:
    """Its neighbour's fault, which is not sticky, heals meanwhile."""
    toy = ToyDriver("acme", count=2)
    fault = Observation(dimension=Dimension.COMPUTE, state=HealthState.UNHEALTHY, reason="xid")
    toy.faults = {"gpu-acme-0": (structs.replace(fault, is_sticky=True),), "gpu-acme-1": (fault,)}
    await bench.publish_machine()
    async with bench.service(toy):
        await bench.inventory(has_state(HealthState.UNHEALTHY, "gpu-acme-1"))
    toy.faults = {}

    async with bench.service(toy):
        healed = await bench.inventory(has_state(HealthState.HEALTHY, "gpu-acme-1"))

    assert states(healed)["gpu-acme-0"] is HealthState.UNHEALTHY


async def test_health_is_said_again_when_another_class_pushed_it_out_of_the_stream(bench: DeviceBench) -> None:
    """The newest event of each device is its present state for late subscribers, also after
    somebody else has filled the stream.
    """
    await bench.publish_machine()

    async with bench.service(ToyDriver("acme", count=2)):
        first = {
            name: await bench.event(lambda event, name=name: event.device == name)
            for name in ("gpu-acme-0", "gpu-acme-1")
        }
        await _fill_health(bench.bus)
        # Late subscribers: their snapshot begins after the flood.
        again = {name: await bench.event(lambda event, name=name: event.device == name) for name in first}

    assert {name: health_event.health.state for name, health_event in again.items()} == dict.fromkeys(
        first, HealthState.HEALTHY
    )
    assert [health_event.generation > first[name].generation for name, health_event in again.items()] == [True, True]


async def _fill_health(bus: Bus) -> None:
    """Write more events of a class of somebody else's than the stream takes.

    A small stream, so that it is soon done.
    """
    api = bus._jetstream
    info = await api.stream_info(HEALTH.stream)
    assert info is not None
    await api.call(f"STREAM.UPDATE.{HEALTH.stream}", {**info.config, "max_bytes": 1024 * 1024})
    for number in range(40):
        subject = HEALTH.subject(node=NODE, device_class="nic", device=f"flood-{number}")
        await api.store(subject, b"x" * 60_000, stream=HEALTH.stream, headers={})
