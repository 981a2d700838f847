"""Events on a real server: stored once, read back from the end, and
CloudEvents to everybody else.
"""

from __future__ import annotations

import pytest

from integration.values import health
from topobus.bus.bus import Bus, Received
from topobus.formats.messages.catalogue import HEALTH
from topobus.formats.messages.messages import HealthEvent

pytestmark = [pytest.mark.integration, pytest.mark.both_buses]

_KEY = {"node": "n1", "device_class": "gpu"}


async def _publish(bus: Bus, generation: int, device: str = "gpu-0") -> int:
    return await bus.publish(
        HEALTH, health(generation, device), event_id=f"{device}-{generation}", device=device, **_KEY
    )


def _events(items: list[Received[HealthEvent]]) -> list[int]:
    return [item.value.generation for item in items]


async def test_publish_stores_once_when_the_same_event_is_published_twice(bus: Bus) -> None:
    """The event's id makes a retry harmless."""
    first = await _publish(bus, 1)
    second = await _publish(bus, 1)

    assert first == second
    assert len(await bus.last(HEALTH, limit=10)) == 1


async def test_last_gives_the_newest_oldest_first_when_there_are_more(bus: Bus) -> None:
    """`last` reads back from the end, within the pattern only."""
    assert await bus.last(HEALTH, limit=2) == ()
    for generation in range(5):
        await _publish(bus, generation)
    for generation in range(20):
        await _publish(bus, generation, "gpu-1")

    assert _events(list(await bus.last(HEALTH, limit=2, device="gpu-0"))) == [3, 4]
    assert _events(list(await bus.last(HEALTH, limit=100, device="gpu-0"))) == [0, 1, 2, 3, 4]
    assert _events(list(await bus.last(HEALTH, limit=2))) == [18, 19]


async def test_events_are_cloud_events_when_read_by_somebody_else(bus: Bus) -> None:
    """An event carries CloudEvents attributes as headers, so that a reader without our code knows
    what it has.
    """
    await _publish(bus, 1)
    stored = await bus._jetstream.last_message("TOPOBUS_HEALTH", HEALTH.subject(device="gpu-0", **_KEY))

    assert stored is not None
    headers = {key: value for key, value in stored.headers.items() if key.startswith("ce-")}
    time = headers.pop("ce-time")
    assert time.endswith("Z")
    assert headers == {
        "ce-specversion": "1.0",
        "ce-id": "gpu-0-1",
        "ce-type": "dev.topobus.health.v1",
        "ce-source": "/topobus/topobus-cli",
        "ce-subject": "n1/gpu/gpu-0",
    }
