"""What a device service takes of a NATS server: no consumer, whatever it has to read."""

from __future__ import annotations

import pytest

from support.device_bench import NODE, DeviceBench
from support.toy_driver import ToyDriver
from topobus.bus.streams.jetstream import JetStream
from topobus.formats.messages.catalogue import HEALTH, INVENTORY

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

_DEVICE = {"node": NODE, "device_class": "gpu", "device": "gpu-acme-0"}


async def test_device_service_makes_no_consumer_when_all_that_it_has_to_read_is_garbage(
    bench: DeviceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machine, ledger, its own inventory and its own events are read key by key and subject by
    subject, and older ones where the newest cannot be read.
    """
    calls: list[str] = []
    call = JetStream.call

    async def note(self: JetStream, verb: str, payload: dict[str, object] | None = None) -> dict[str, object]:
        if self.connection.name == "gpu":
            calls.append(verb)
        return await call(self, verb, payload)

    monkeypatch.setattr(JetStream, "call", note)
    await bench.publish_machine()
    async with bench.service(ToyDriver("acme", count=1)):
        await bench.event(lambda event: event.device == "gpu-acme-0")
        first = await bench.inventory(lambda inventory: len(inventory.devices) == 1)
    await bench.bus._connection.publish(f"$KV.{INVENTORY.home(device_class='gpu').bucket}.{NODE}.gpu", b"{")
    await bench.bus._connection.publish(HEALTH.subject(**_DEVICE), b"{")
    await bench.bus._connection.barrier()
    async with bench.service(ToyDriver("acme", count=1)):
        await bench.inventory(lambda inventory: inventory.generation > first.generation)

    read = {call.removeprefix("STREAM.MSG.GET.") for call in calls if call.startswith("STREAM.MSG.GET.")}
    assert {"KV_topobus_machines", "KV_topobus_inventories_gpu", "KV_topobus_inventories", "TOPOBUS_HEALTH"} <= read
    assert [call for call in calls if call.startswith("CONSUMER")] == []
