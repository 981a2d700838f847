"""Ids of events at the hub: another node that uses them before takes no event away."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.values import health
from support.leaf_pair import NODE, leaf_pair
from support.relays import events, relay, tell_sickness, until_equal
from topobus.bus.bus import Bus
from topobus.bus.streams.uplink import Delivery, Uplink
from topobus.formats.messages.catalogue import HEALTH, RELAY
from topobus.formats.messages.codec import encode

pytestmark = pytest.mark.integration


async def _use_id(hub: Bus, event_id: str) -> None:
    """Store an event of another node under an id."""
    await hub.publish(HEALTH, health(1), event_id=event_id, node="n1", device_class="gpu", device="gpu-0")


async def test_events_are_all_stored_when_another_node_used_the_ids_that_services_gave(nats_binary: Path) -> None:
    """The ids that a node's services choose can be guessed.

    At the hub theirs are others, and stay the same over a restart of the relay.
    """
    async with leaf_pair(nats_binary) as pair, pair.buses() as (hub, leaf):
        for generation in (1, 2, 3):
            await _use_id(hub, f"gpu-0-{generation}")
            await tell_sickness(leaf, generation)
        async with relay(pair):
            await until_equal(hub, leaf)
            note = await hub.get(RELAY, node=NODE)
        async with relay(pair):
            await tell_sickness(leaf, 4)
            await until_equal(hub, leaf)
            after = await hub.get(RELAY, node=NODE)

        assert note is not None
        assert after is not None
        assert len(note.value.id_ending) > 16
        assert note.value.id_ending == after.value.id_ending
        assert len((await events(hub))[HEALTH.name]) == 4


async def test_event_is_stored_under_another_id_when_its_own_is_taken_all_the_same(
    nats_binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who knew the ending took the id of the next event: that is noticed, and the event is
    there once.
    """
    async with leaf_pair(nats_binary) as pair, pair.buses() as (hub, leaf):
        async with relay(pair):
            await tell_sickness(leaf, 1)
            await until_equal(hub, leaf)
        note = await hub.get(RELAY, node=NODE)
        assert note is not None
        await _use_id(hub, f"gpu-0-2.{note.value.id_ending}")
        answers = []
        store = Uplink.store_event

        async def stored(self: Uplink, event: object, delivery: Delivery, *, id_ending: str) -> object:
            answers.append(await store(self, event, delivery, id_ending=id_ending))  # type: ignore[arg-type]  # what the relay gave
            return answers[-1]

        monkeypatch.setattr(Uplink, "store_event", stored)
        await tell_sickness(leaf, 2)
        async with relay(pair):
            await until_equal(hub, leaf)

        # The first event may be said again before, and is a repetition indeed.
        assert [answer.is_duplicate for answer in answers[-2:]] == [True, False]
        (newest,) = await hub.last(HEALTH, limit=1, node=NODE, device_class="gpu", device="gpu-0")
        assert encode(newest.value) == (await events(leaf))[HEALTH.name][-1]
