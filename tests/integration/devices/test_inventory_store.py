"""An inventory that is lost, forged or deleted in its bucket is written again by the service that
owns it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import msgspec
import pytest

from support.device_bench import NODE, DeviceBench, states
from support.reading import Reader
from support.toy_driver import ToyDriver
from topobus.formats.messages.catalogue import HEALTH, INVENTORY, MACHINE
from topobus.formats.messages.codec import encode
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Inventory
from topobus.values.health import HealthState

pytestmark = pytest.mark.integration


async def test_inventory_comes_back_when_the_store_is_lost(own_bench: DeviceBench, own_nats_server: NatsServer) -> None:
    """A server that comes back with an empty store gets inventory and events again, without a
    restart of the service.

    Whoever saw the first event takes the second.
    """
    toy = ToyDriver("acme", count=1)
    await own_bench.publish_machine()

    async with own_bench.service(toy):
        await own_bench.event(lambda health_event: health_event.device == "gpu-acme-0")
        await own_nats_server.stop()
        shutil.rmtree(own_nats_server.store)
        await own_nats_server.start()
        await own_bench.bus.provision()
        await own_bench.publish_machine()
        inventory = await own_bench.inventory(lambda each_inventory: len(each_inventory.devices) == 1)
        event = await own_bench.event(lambda health_event: health_event.device == "gpu-acme-0")

    assert states(inventory) == {"gpu-acme-0": HealthState.HEALTHY}
    assert event.generation == 2


_BUCKET = INVENTORY.home(device_class="gpu").bucket

_FORGED_INVENTORIES: dict[str, Callable[[Inventory], bytes]] = {
    "an-acknowledgement": lambda _one: b'{"stream":"TOPOBUS_HEALTH","seq":7}',
    "nothing": lambda _one: b"",
    "no-devices": lambda inventory: encode(msgspec.structs.replace(inventory, devices=())),
    "the-last-generation": lambda inventory: encode(msgspec.structs.replace(inventory, generation=2**53, devices=())),
    "of-another-node": lambda inventory: encode(msgspec.structs.replace(inventory, node="elsewhere")),
}


@pytest.mark.parametrize("forgery", _FORGED_INVENTORIES)
async def test_inventory_is_written_again_when_somebody_writes_over_it(bench: DeviceBench, forgery: str) -> None:
    """Garbage and false inventories are healed by the owner while it runs, with a generation that
    readers take.
    """
    await bench.publish_machine()

    async with bench.service(ToyDriver("acme", count=1)):
        inventory = await bench.inventory(lambda each_inventory: len(each_inventory.devices) == 1)
        forged = _FORGED_INVENTORIES[forgery](inventory)
        subject, stream = f"$KV.{_BUCKET}.{NODE}.gpu", f"KV_{_BUCKET}"
        at = (await bench.bus._jetstream.store(subject, forged, stream=stream, headers={})).sequence
        async with Reader(bench.bus.watch(INVENTORY, node=NODE, device_class="gpu")) as changes:
            items = await changes.until(lambda items: any(change.revision > at and change.value for change in items))
            # The end of the snapshot may have come behind it.
            healed = next(change.value for change in items if change.revision > at and change.value)

    assert healed is not None
    assert healed.devices == inventory.devices
    assert healed.generation < 2**40


async def test_inventory_is_written_again_when_somebody_deletes_it(bench: DeviceBench) -> None:
    """A deletion marker is no word of the owner's."""
    await bench.publish_machine()

    async with bench.service(ToyDriver("acme", count=1)):
        inventory = await bench.inventory(lambda each_inventory: len(each_inventory.devices) == 1)
        await bench.bus.delete(INVENTORY, node=NODE, device_class="gpu")
        async with Reader(bench.bus.watch(INVENTORY, node=NODE, device_class="gpu")) as changes:
            items = await changes.until(lambda items: any(change.value for change in items))
            healed = next(change.value for change in items if change.value)

    assert healed is not None
    assert healed.devices == inventory.devices


async def test_inventory_goes_on_when_the_life_before_left_a_generation_at_the_end(bench: DeviceBench) -> None:
    """A forged generation in the bucket at the start is not gone on from: its successor would be
    unreadable for everybody.
    """
    await bench.publish_machine()
    await bench.bus.put(
        INVENTORY, Inventory(node=NODE, device_class="gpu", generation=2**53), node=NODE, device_class="gpu"
    )

    async with bench.service(ToyDriver("acme", count=1)):
        inventory = await bench.inventory(lambda each_inventory: len(each_inventory.devices) == 1)

    assert inventory.generation < 2**40


@pytest.mark.parametrize("stream", [f"KV_{_BUCKET}", HEALTH.stream, f"KV_{MACHINE.bucket}"])
async def test_service_says_all_again_when_a_stream_is_deleted_under_it(bench: DeviceBench, stream: str) -> None:
    """A deleted stream is made again and holds again what this service has to say, without a
    restart and without a reconnect.
    """
    await bench.publish_machine()

    async with bench.service(ToyDriver("acme", count=1)):
        await bench.inventory(lambda each_inventory: len(each_inventory.devices) == 1)
        await bench.event(lambda health_event: health_event.device == "gpu-acme-0")
        await bench.bus._jetstream.call(f"STREAM.DELETE.{stream}")
        inventory = await bench.inventory(lambda each_inventory: len(each_inventory.devices) == 1)
        event = await bench.event(lambda health_event: health_event.device == "gpu-acme-0")

    assert states(inventory) == {"gpu-acme-0": event.health.state}
