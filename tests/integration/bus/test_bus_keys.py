"""Watches of one key, which have no consumer: what is said of a key is a hint, what is stored is
the truth, and a lost word heals.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from integration.values import health, inventory
from support.reading import Reader
from topobus.bus.bus import Bus, Change, ChangeKind
from topobus.bus.feeds import key_feed
from topobus.bus.server_config.streams import stream_names
from topobus.bus.streams.jetstream import JetStream
from topobus.formats.messages.catalogue import HEALTH, INVENTORY
from topobus.formats.messages.codec import encode
from topobus.values.device import Inventory

pytestmark = [pytest.mark.integration, pytest.mark.both_buses]

_KEY = {"node": "n1", "device_class": "gpu"}
_STREAM = f"KV_{INVENTORY.home(**_KEY).bucket}"
_HINTS = INVENTORY.subject(**_KEY)


def _generations(items: list[Change[Inventory]]) -> list[int]:
    return [item.value.generation for item in items if item.value is not None]


async def _write(bus: Bus, generation: int) -> None:
    await bus.put(INVENTORY, inventory(generation), **_KEY)


@pytest_asyncio.fixture
async def deaf(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Reader[Change[Inventory]]]:
    """A watch that has begun, and whose subscription the server has lost since.

    Looks for what was missed come often.
    """
    monkeypatch.setattr(key_feed, "CHECK_S", 0.1)
    monkeypatch.setattr(key_feed, "_FIRST_CHECK_S", 0.1)
    monkeypatch.setattr(key_feed, "_TICK_S", 0.1)
    async with Reader(bus.watch(INVENTORY, **_KEY)) as reader:
        await reader.until(lambda items: len(items) == 1)
        # Of the class's bucket, and of the common one.
        listening = [each for each in bus._connection._subscriptions._lasting if each.subject == _HINTS]
        assert len(listening) == 2
        for lasting in listening:
            assert lasting.live is not None
            await lasting.live.unsubscribe()
        await bus._connection.barrier()
        yield reader


async def test_key_watch_tells_a_change_when_the_word_of_it_was_lost(bus: Bus, deaf: Reader[Change[Inventory]]) -> None:
    """A server says each write once, to who listens at that moment.

    What nobody heard is seen at the next look, again and again, and counted.
    """
    for generation in (1, 2):
        await _write(bus, generation)
        await deaf.until(lambda items, generation=generation: generation in _generations(items))

    assert bus._connection.metrics.resyncs.labels(_STREAM, "missed-hint")._value.get() >= 1


async def test_key_watch_says_reset_when_a_lost_bucket_was_made_again_unheard(
    bus: Bus, deaf: Reader[Change[Inventory]]
) -> None:
    """A bucket that somebody deletes and makes again is another one, also when the connection
    stays.
    """
    await _write(bus, 1)
    await deaf.until(lambda items: 1 in _generations(items))
    await bus._jetstream.call(f"STREAM.DELETE.{_STREAM}")
    await bus.provision()
    await _write(bus, 2)
    items = await deaf.until(lambda items: 2 in _generations(items))

    assert ChangeKind.RESET in [item.kind for item in items]


async def test_key_watch_believes_the_store_when_somebody_forges_the_word(bus: Bus) -> None:
    """Whoever may publish where writes are said can make us look, and no more: neither a value nor
    a number nor a deletion is taken from there.
    """
    forged = {
        "Nats-Stream": _STREAM,
        "Nats-Subject": f"$KV.{INVENTORY.home(**_KEY).bucket}.n1.gpu",
        "Nats-Sequence": "999",
        "Nats-Last-Sequence": "998",
    }
    await _write(bus, 1)
    async with Reader(bus.watch(INVENTORY, **_KEY)) as reader:
        await reader.until(lambda items: len(items) == 2)
        for headers in (
            {},
            forged,
            {**forged, "KV-Operation": "DEL"},
            {**forged, "Nats-Sequence": "0"},
            {"Nats-Sequence": "x" * 5000},
        ):
            await bus._connection.publish(_HINTS, encode(inventory(7)), headers=headers)
        await bus._connection.barrier()
        await _write(bus, 2)
        items = await reader.until(lambda items: 2 in _generations(items))

    assert [(item.kind, item.revision) for item in items] == [
        (ChangeKind.PUT, 1),
        (ChangeKind.SNAPSHOT_END, 0),
        (ChangeKind.PUT, 2),
    ]


async def test_nothing_of_one_key_needs_a_consumer(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch, list, get, history and the last event of one subject, garbage included, make none:
    users who take all that a stream may have stop nobody.
    """
    verbs: list[str] = []
    call = JetStream.call

    async def note(self: JetStream, verb: str, payload: dict[str, object] | None = None) -> dict[str, object]:
        verbs.append(verb)
        return await call(self, verb, payload)

    monkeypatch.setattr(JetStream, "call", note)
    await _write(bus, 1)
    await _write(bus, 2)
    await bus.publish(HEALTH, health(1), event_id="1", device="gpu-0", **_KEY)
    await bus._connection.publish(HEALTH.subject(device="gpu-0", **_KEY), b"{")
    await bus._connection.barrier()

    async with Reader(bus.watch(INVENTORY, **_KEY)) as reader:
        await reader.until(lambda items: len(items) == 2)
        assert [entry.value.generation for entry in await bus.list(INVENTORY, **_KEY)] == [2]
        assert [entry.value.generation for entry in await bus.history(INVENTORY, **_KEY)] == [1, 2]
        assert [event.value.generation for event in await bus.last(HEALTH, limit=1, device="gpu-0", **_KEY)] == [1]
        infos = [await bus._jetstream.stream_info(name) for name in stream_names()]

    assert [info.consumer_count for info in infos if info is not None] == [0] * len(infos)
    assert [verb for verb in verbs if verb.startswith("CONSUMER")] == []
