"""The relay between a real leaf and a real hub: what the node's server stores is what the hub has,
whatever was cut, killed, emptied or put back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
from nats.aio.msg import Msg

from integration.values import inventory
from support.leaf_pair import NODE, Joined, leaf_pair
from support.looks import next_look, until
from support.relays import events, relay, revisions, states, tell_sickness, until_equal
from topobus.bus.bus import Bus
from topobus.bus.streams.uplink import NotWritten, Uplink
from topobus.controller.node_removal import NodeRemoval
from topobus.formats.messages.catalogue import HEALTH, INVENTORY, LEDGER, LINK, MACHINE, RELAY
from topobus.formats.messages.codec import encode
from topobus.formats.messages.forget_messages import ForgetRequest
from topobus.formats.messages.relay_messages import LinkRequest
from topobus.process.clock import SystemClock
from topobus.values.errors import PeerUnavailable
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine

pytestmark = pytest.mark.integration


@pytest_asyncio.fixture
async def joined(nats_binary: Path) -> AsyncIterator[Joined]:
    """Both servers with all streams."""
    async with leaf_pair(nats_binary) as pair, pair.buses() as (hub, leaf):
        yield Joined(pair=pair, hub=hub, leaf=leaf)


def _machine(generation: int) -> Machine:
    return Machine(node=NODE, generation=generation, numa_nodes=(), cpus=())


async def _write_node(leaf: Bus, generation: int = 1) -> None:
    """Write what a small node's services write."""
    await leaf.put(MACHINE, _machine(generation), node=NODE)
    await leaf.put(LEDGER, Ledger(node=NODE, sequence=generation), node=NODE)
    for device_class in ("gpu", "fpga"):
        value = inventory(generation, node=NODE)
        await leaf.put(
            INVENTORY,
            type(value)(node=NODE, device_class=device_class, generation=generation),
            node=NODE,
            device_class=device_class,
        )


async def test_hub_has_what_the_node_stores_when_it_is_joined(joined: Joined) -> None:
    """States with their changes and deletions, and every event once.

    The node's server alone is written by its services.
    """
    await _write_node(joined.leaf)
    await tell_sickness(joined.leaf, 1)
    async with relay(joined.pair):
        await until_equal(joined.hub, joined.leaf)
        await joined.leaf.put(LEDGER, Ledger(node=NODE, sequence=2), node=NODE)
        await joined.leaf.delete(INVENTORY, node=NODE, device_class="fpga")
        for generation in (2, 3):
            await tell_sickness(joined.leaf, generation)
        await until_equal(joined.hub, joined.leaf)

    at_hub = await states(joined.hub)
    assert set(at_hub) == {f"machine/{NODE}", f"ledger/{NODE}", f"inventory/{NODE}.gpu"}
    assert [len(stored) for stored in (await events(joined.hub)).values()] == [3, 0, 0]


async def test_hub_hears_the_relays_note_and_forgets_no_node_when_it_alone_runs(joined: Joined) -> None:
    """Over the link it is told what the relay has noted, and that a node
    with a relay is not gone.
    """
    await _write_node(joined.leaf)
    async with relay(joined.pair):
        await tell_sickness(joined.leaf, 1)
        await until_equal(joined.hub, joined.leaf)
        await until_noted(joined, 1)
        note = await joined.hub.ask(LINK, LinkRequest(), node=NODE)
        reply = await NodeRemoval(joined.hub, SystemClock()).forget(ForgetRequest(node=NODE, is_forced=True))

    assert note == (await joined.hub.list(RELAY))[0].value
    assert reply.refusal is not None
    assert "relay answers there" in reply.refusal.reasons[0].message
    assert set(await states(joined.hub)) == {
        f"machine/{NODE}",
        f"ledger/{NODE}",
        f"inventory/{NODE}.fpga",
        f"inventory/{NODE}.gpu",
    }


async def test_hub_is_brought_up_to_date_when_the_link_was_cut(joined: Joined) -> None:
    """What was written while the node was cut off arrives, the newest of each state alone.

    What the hub had is not written again.
    """
    await _write_node(joined.leaf)
    async with relay(joined.pair) as running:
        await until_equal(joined.hub, joined.leaf)
        before = await revisions(joined.hub)
        joined.pair.link.cut()
        await until(lambda: "cut off since" in running.remark)
        for sequence in (2, 3, 4):
            await joined.leaf.put(LEDGER, Ledger(node=NODE, sequence=sequence), node=NODE)
        await joined.leaf.delete(INVENTORY, node=NODE, device_class="fpga")
        for generation in range(1, 21):
            await tell_sickness(joined.leaf, generation, f"gpu-{generation % 3}")
        await until(lambda: "2 states and 20 events wait" in running.remark)
        assert running.readiness.is_ready
        joined.pair.link.join()
        await until_equal(joined.hub, joined.leaf)
        await until(lambda: running.remark == "ready")

    after = await revisions(joined.hub)
    assert after[f"machine/{NODE}"] == before[f"machine/{NODE}"]
    assert after[f"inventory/{NODE}.gpu"] == before[f"inventory/{NODE}.gpu"]
    assert after[f"ledger/{NODE}"] == before[f"ledger/{NODE}"] + 1, "the newest alone was said"


async def test_hub_has_all_again_when_it_was_killed_and_started_empty(joined: Joined) -> None:
    """A hub that lost its store gets every state, and every event that the node still has, also
    those that it had before.
    """
    await _write_node(joined.leaf)
    await tell_sickness(joined.leaf, 1)
    async with relay(joined.pair):
        await until_equal(joined.hub, joined.leaf)
        await joined.pair.hub.kill()
        joined.pair.hub.lose_store()
        await tell_sickness(joined.leaf, 2)
        await joined.pair.hub.start()

        await until_equal(joined.hub, joined.leaf)


async def test_hub_has_all_again_when_an_older_copy_was_put_back(joined: Joined, tmp_path: Path) -> None:
    """What the hub acknowledged after the copy was made is said again, though the relay knows that
    it was acknowledged.
    """
    await _write_node(joined.leaf)
    await tell_sickness(joined.leaf, 1)
    async with relay(joined.pair):
        await until_equal(joined.hub, joined.leaf)
        await until_noted(joined, 1)
        await joined.pair.hub.stop()
        joined.pair.hub.copy_store(tmp_path / "copy")
        await joined.pair.hub.start()
        await _write_node(joined.leaf, 2)
        await tell_sickness(joined.leaf, 2)
        await joined.leaf.delete(INVENTORY, node=NODE, device_class="fpga")
        await until_equal(joined.hub, joined.leaf)
        await until_noted(joined, 2)
        await joined.pair.hub.kill()
        joined.pair.hub.restore_store(tmp_path / "copy")
        await joined.pair.hub.start()

        await until_equal(joined.hub, joined.leaf)


async def test_hub_forgets_what_the_node_lost_when_its_store_is_another_one(joined: Joined) -> None:
    """A node that lost its store says what its services write now.

    A class that stays away is deleted, a ledger is not, and new events follow the old ones.
    """
    await _write_node(joined.leaf)
    await tell_sickness(joined.leaf, 1)
    async with relay(joined.pair):
        await until_equal(joined.hub, joined.leaf)
        await joined.pair.leaf.kill()
        joined.pair.leaf.lose_store()
        await joined.pair.leaf.start()
        await joined.leaf.wait_connected()
        await joined.leaf.provision()
        await joined.leaf.put(MACHINE, _machine(7), node=NODE)
        await joined.leaf.put(INVENTORY, inventory(9, node=NODE), node=NODE, device_class="gpu")
        await tell_sickness(joined.leaf, 7)
        wanted = {**await states(joined.leaf), f"ledger/{NODE}": (await states(joined.hub))[f"ledger/{NODE}"]}
        async with asyncio.timeout(90):
            while await states(joined.hub) != wanted or len((await events(joined.hub))["health"]) != 2:
                await next_look()


async def test_hub_is_not_written_again_when_the_relay_restarts(joined: Joined) -> None:
    """A relay that knows nothing reads what the hub has, and finds that there is nothing to say."""
    await _write_node(joined.leaf)
    await tell_sickness(joined.leaf, 1)
    async with relay(joined.pair):
        await until_equal(joined.hub, joined.leaf)
        await until_noted(joined, 1)
    before = await revisions(joined.hub), (await joined.hub.span(HEALTH)).newest
    async with relay(joined.pair) as running:
        await until(lambda: running.said("ledger", "compared") == 1 and running.said("inventory", "compared") == 2)
        await tell_sickness(joined.leaf, 2)
        await until_equal(joined.hub, joined.leaf)

    assert await revisions(joined.hub) == before[0]
    assert (await joined.hub.span(HEALTH)).newest == before[1] + 1
    assert running.said("health", "duplicate") == 0


async def until_noted(joined: Joined, events_said: int) -> None:
    """Wait until the hub's note says so many health events."""
    async with asyncio.timeout(90):
        while True:
            # A hub that was just started may not be there yet.
            with suppress(PeerUnavailable):
                entry = await joined.hub.get(RELAY, node=NODE)
                position = entry.value.events.get("health") if entry is not None else None
                if position is not None and position.sequence == events_said:
                    return
            await next_look()


async def test_hub_ends_right_when_the_relay_dies_at_each_step(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before or after any message to the hub, and started again: the node's present states,
    and each event once.
    """
    # The note follows at once here, so that each round is short.
    monkeypatch.setattr("topobus.relay.service._NOTE_AFTER_S", 0.01)
    send = Uplink._send
    deaths = 0
    for step in range(1, 100):
        is_dead = asyncio.Event()
        # Of two neighbours in the sequence one dies before it sends, the other after.
        dying = _dying(at=step, is_sent_first=step % 2 == 0, is_dead=is_dead)
        await _write_node(joined.leaf, step)
        if step % 3 == 0:
            await joined.leaf.delete(INVENTORY, node=NODE, device_class="fpga")
        await tell_sickness(joined.leaf, step)
        monkeypatch.setattr(Uplink, "_send", dying)
        async with relay(joined.pair):
            equal = asyncio.create_task(until_settled(joined))
            death = asyncio.create_task(is_dead.wait())
            await asyncio.wait({equal, death}, return_when=asyncio.FIRST_COMPLETED)
            equal.cancel()
            death.cancel()
        monkeypatch.setattr(Uplink, "_send", send)
        async with relay(joined.pair):
            await until_equal(joined.hub, joined.leaf)
        if not is_dead.is_set():
            break
        deaths += 1

    # What a relay says after a start with one change of each kind: it reads, compares and writes
    # four states, an event and the note.
    assert deaths >= 10


async def test_older_value_is_refused_when_it_arrives_after_a_newer(joined: Joined) -> None:
    """A write that was stuck in a dead connection names a sequence that is gone: the hub keeps the
    newer value.
    """
    await joined.leaf.put(LEDGER, Ledger(node=NODE, sequence=1), node=NODE)
    async with relay(joined.pair) as running:
        await until_equal(joined.hub, joined.leaf)
        stale = (await revisions(joined.hub))[f"ledger/{NODE}"]
        await joined.leaf.put(LEDGER, Ledger(node=NODE, sequence=2), node=NODE)
        await until_equal(joined.hub, joined.leaf)
        outcome = await running.bus.uplink().write(
            LEDGER, encode(Ledger(node=NODE, sequence=1)), stale, written_by="", node=NODE
        )

        assert isinstance(outcome, NotWritten)
        assert await states(joined.hub) == await states(joined.leaf)


async def test_nothing_of_another_node_is_touched_when_a_relay_joins(joined: Joined) -> None:
    """The hub has many nodes; a relay writes, deletes and says again what is its own node's."""
    await joined.hub.put(MACHINE, Machine(node="other", numa_nodes=(), cpus=()), node="other")
    await joined.hub.put(INVENTORY, inventory(1, node="other"), node="other", device_class="gpu")
    await _write_node(joined.leaf)
    async with relay(joined.pair):
        await until_equal(joined.hub, joined.leaf)

    assert [entry.revision for entry in await joined.hub.list(MACHINE, node="other")] == [1]
    assert [entry.revision for entry in await joined.hub.list(INVENTORY, node="other")] == [1]


def _dying(
    *, at: int, is_sent_first: bool, is_dead: asyncio.Event
) -> Callable[[Uplink, str, bytes, Mapping[str, str]], Awaitable[Msg]]:
    """Speak to the hub as a process does that is killed at its n-th message, before that is sent or
    before its answer is read.
    """
    send = Uplink._send
    count = 0

    async def speak(self: Uplink, subject: str, payload: bytes, headers: Mapping[str, str]) -> Msg:
        nonlocal count
        count += 1
        if count < at:
            return await send(self, subject, payload, headers)
        if count == at and is_sent_first:
            await send(self, subject, payload, headers)
        is_dead.set()
        # A process that was killed says nothing more.
        return await asyncio.get_running_loop().create_future()

    return speak


async def until_settled(joined: Joined) -> None:
    """Wait until the hub has everything, the note included."""
    await until_equal(joined.hub, joined.leaf)
    newest = (await joined.leaf.span(HEALTH)).newest
    await until_noted(joined, newest)
