"""Watches and followers against a real server: nothing lost, nothing twice, whatever happens to
server, store or reader (B7 to B10).
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from integration.values import health, inventory
from support.reading import Reader
from topobus.bus.bus import Bus, Change, ChangeKind, Received, Start
from topobus.bus.connection.client import GatedClient
from topobus.bus.connection.connection import Connection
from topobus.bus.feeds import feed
from topobus.formats.messages.catalogue import HEALTH, INVENTORY
from topobus.formats.messages.messages import HealthEvent
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Inventory
from topobus.values.errors import PeerUnavailable

pytestmark = [pytest.mark.integration, pytest.mark.both_buses]

_KEY = {"node": "n1", "device_class": "gpu"}
# A watch of the whole bucket has a consumer unless its reader may make none, a watch of one key has
# none; all keep the same promises.
_both_ways = pytest.mark.parametrize("watched", [{}, _KEY, {"node": "n1"}], ids=["bucket", "key", "unconsumed"])
_each_reader = pytest.mark.parametrize("rights", ["consumed", "unconsumed"], indirect=True)


@pytest.fixture(autouse=True)
def rights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the right to consumers from our own bus where a test's case says so, as the console has
    none.
    """
    if "unconsumed" in request.node.name:
        monkeypatch.setattr(Connection, "makes_consumers", False)


async def _put(bus: Bus, generation: int, **options: int) -> int:
    return await bus.put(INVENTORY, inventory(generation, **options), **_KEY)


async def _publish(bus: Bus, generation: int, device: str = "gpu-0") -> int:
    return await bus.publish(
        HEALTH, health(generation, device), event_id=f"{device}-{generation}", device=device, **_KEY
    )


def _generations(items: list[Change[Inventory]]) -> list[int]:
    return [item.value.generation for item in items if item.value is not None]


def _events(items: list[Received[HealthEvent]]) -> list[int]:
    return [item.value.generation for item in items]


def _kinds(items: list[Change[Inventory]]) -> list[ChangeKind]:
    return [item.kind for item in items]


async def _restart(server: NatsServer, bus: Bus) -> None:
    await server.stop()
    await server.start()
    async with asyncio.timeout(30):
        await bus.wait_connected()


@_both_ways
async def test_watch_gives_snapshot_then_end_then_changes_when_a_bucket_has_values(
    bus: Bus, watched: dict[str, str]
) -> None:
    """A watch tells the present values, then that they are complete, then each change with its
    key's parts.
    """
    await _put(bus, 1)
    await _put(bus, 2)
    async with Reader(bus.watch(INVENTORY, **watched)) as reader:
        await reader.until(lambda items: len(items) == 2)
        await _put(bus, 3)
        await reader.until(lambda items: len(items) == 3)
        await bus.delete(INVENTORY, **_KEY)
        items = await reader.until(lambda items: len(items) == 4)

    assert _kinds(items) == [ChangeKind.PUT, ChangeKind.SNAPSHOT_END, ChangeKind.PUT, ChangeKind.DELETE]
    assert _generations(items) == [2, 3]
    assert [item.revision for item in items] == [2, 0, 3, 4]
    assert items[3].parts == _KEY


@_both_ways
async def test_watch_tells_a_deletion_when_it_never_told_the_value(bus: Bus, watched: dict[str, str]) -> None:
    """A value may come and go while the feed is made anew.

    Whoever wrote it must hear that it is gone. What was deleted before the snapshot is not told.
    """
    await bus.delete(INVENTORY, **_KEY)
    async with Reader(bus.watch(INVENTORY, **watched)) as reader:
        await reader.until(lambda items: len(items) == 1)
        await bus.delete(INVENTORY, **_KEY)
        items = await reader.until(lambda items: len(items) == 2)

    assert _kinds(items) == [ChangeKind.SNAPSHOT_END, ChangeKind.DELETE]
    assert items[1].parts == _KEY


@_both_ways
async def test_watch_ends_its_snapshot_at_once_when_the_bucket_is_empty(bus: Bus, watched: dict[str, str]) -> None:
    """An empty bucket has a snapshot too: its end comes without a first value."""
    async with Reader(bus.watch(INVENTORY, **watched)) as reader:
        items = await reader.until(lambda items: len(items) == 1)

    assert _kinds(items) == [ChangeKind.SNAPSHOT_END]


@pytest.mark.parametrize("watched", [{"node": "n1"}, _KEY], ids=["bucket", "key"])
async def test_watch_leaves_out_what_was_deleted_when_it_begins_later(bus: Bus, watched: dict[str, str]) -> None:
    """A key deleted before the watch began is no news.

    One that does not match the parts neither.
    """
    await _put(bus, 1)
    await bus.delete(INVENTORY, **_KEY)
    await bus.put(INVENTORY, inventory(7, node="n2"), node="n2", device_class="gpu")
    async with Reader(bus.watch(INVENTORY, **watched)) as reader:
        items = await reader.until(lambda items: len(items) == 1)

    assert _kinds(items) == [ChangeKind.SNAPSHOT_END]


@_both_ways
async def test_watch_skips_the_value_when_it_is_malformed(bus: Bus, watched: dict[str, str]) -> None:
    """Bytes that are no inventory do not end the watch, nor stand in it."""
    await bus._connection.publish("$KV.topobus_inventories.n1.gpu", b"{not json")
    await bus._connection.barrier()
    async with Reader(bus.watch(INVENTORY, **watched)) as reader:
        await _put(bus, 2)
        items = await reader.until(lambda items: bool(_generations(items)))

    assert _generations(items) == [2]


@_both_ways
async def test_watch_goes_on_within_seconds_when_the_server_restarts(
    own_nats_server: NatsServer, own_bus: Bus, watched: dict[str, str]
) -> None:
    """B7: after a restart the stock watcher is blind for 19 s.

    Ours gives the next change within a few, and no value again.
    """
    await _put(own_bus, 1)
    async with Reader(own_bus.watch(INVENTORY, **watched)) as reader:
        await reader.until(lambda items: len(items) == 2)
        await _restart(own_nats_server, own_bus)
        await _put(own_bus, 2)
        items = await reader.until(lambda items: len(items) == 3, timeout_s=15)

    assert _kinds(items) == [ChangeKind.PUT, ChangeKind.SNAPSHOT_END, ChangeKind.PUT]
    assert _generations(items) == [1, 2]


@pytest.mark.virtual_time
@_both_ways
async def test_watch_goes_on_when_the_server_froze(
    own_nats_server: NatsServer, own_bus: Bus, watched: dict[str, str]
) -> None:
    """A server frozen for longer than the watchdog allows costs no change and repeats none."""
    async with Reader(own_bus.watch(INVENTORY, **watched)) as reader:
        await reader.until(lambda items: len(items) == 1)
        lost = asyncio.Event()
        forget = own_bus._connection.on_change(lost.set)
        own_nats_server.pause()
        await asyncio.wait_for(lost.wait(), 30)
        forget()
        own_nats_server.resume()
        async with asyncio.timeout(30):
            await own_bus.wait_connected()
        await _put(own_bus, 1)
        items = await reader.until(lambda items: len(items) == 2)

    assert _generations(items) == [1]


async def test_watch_goes_on_when_its_consumer_is_deleted(bus: Bus) -> None:
    """Somebody removing our consumer on the server is noticed, and the
    watch goes on where it was.
    """
    await _put(bus, 1)
    async with Reader(bus.watch(INVENTORY)) as reader:
        await reader.until(lambda items: len(items) == 2)
        api = bus._jetstream
        for name in (await api.call("CONSUMER.NAMES.KV_topobus_inventories"))["consumers"]:
            await api.call(f"CONSUMER.DELETE.KV_topobus_inventories.{name}")
        await _put(bus, 2)
        items = await reader.until(lambda items: len(items) == 3)

    assert _generations(items) == [1, 2]


@_each_reader
async def test_watch_loses_nothing_when_its_reader_is_slow_and_values_are_large(bus: Bus) -> None:
    """B8: more bytes than any client-side queue holds wait on the server while the reader sleeps.

    Then all keys arrive.
    """
    changes = bus.watch(INVENTORY)
    try:
        assert (await anext(changes)).kind is ChangeKind.SNAPSHOT_END
        for number in range(60):
            await bus.put(
                INVENTORY,
                inventory(number, node=f"n{number}", padding_bytes=300_000),
                node=f"n{number}",
                device_class="gpu",
            )

        async with asyncio.timeout(60):
            seen = [(await anext(changes)).parts["node"] for _ in range(60)]
    finally:
        await changes.aclose()
    assert seen == [f"n{number}" for number in range(60)]


@_each_reader
async def test_watch_completes_its_snapshot_when_every_key_is_overwritten_under_it(bus: Bus) -> None:
    """Keys whose first value is pushed out of history while the snapshot is read stall the server's
    own last-per-subject delivery; not ours.
    """
    nodes = [f"n{number}" for number in range(40)]
    for node in nodes:
        await bus.put(INVENTORY, inventory(0, node=node, device_class="ssd"), node=node, device_class="ssd")
    changes = bus.watch(INVENTORY, device_class="ssd")
    try:
        seen = [await anext(changes)]
        for generation in range(1, INVENTORY.history + 4):
            await asyncio.gather(
                *(
                    bus.put(
                        INVENTORY, inventory(generation, node=node, device_class="ssd"), node=node, device_class="ssd"
                    )
                    for node in nodes
                )
            )
        async with asyncio.timeout(60):
            while seen[-1].kind is not ChangeKind.SNAPSHOT_END:
                seen.append(await anext(changes))
    finally:
        await changes.aclose()

    newest = {item.parts["node"]: item.value.generation for item in seen if item.value is not None}
    revisions_by_node: dict[str, list[int]] = {}
    for item in seen[:-1]:
        revisions_by_node.setdefault(item.parts["node"], []).append(item.revision)
    assert newest == dict.fromkeys(nodes, INVENTORY.history + 3)
    assert all(revisions == sorted(set(revisions)) for revisions in revisions_by_node.values())


@pytest.mark.real_server
async def test_follow_loses_nothing_when_the_client_drops_messages(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """B8: what a client drops is noticed as a gap and read again: every event once, in order."""
    for generation in range(20):
        await _publish(bus, generation)
    arrived, process = itertools.count(), GatedClient._process_msg
    subject_of_events = HEALTH.subject(device="gpu-0", **_KEY).encode()

    async def drop_one(self: GatedClient, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        if subject != subject_of_events or next(arrived) != 3:
            await process(self, sid, subject, reply, data, headers)

    monkeypatch.setattr(GatedClient, "_process_msg", drop_one)
    async with Reader(bus.follow(HEALTH, start=Start.ALL)) as reader:
        items = await reader.until(lambda items: len(items) >= 20, timeout_s=60)
    resyncs = bus._connection.metrics.resyncs.labels("TOPOBUS_HEALTH", "gap")._value.get()

    assert _events(items) == list(range(20))
    assert resyncs > 0


@pytest.mark.real_server
@_both_ways
async def test_watch_starts_anew_when_an_older_store_was_put_back(
    own_nats_server: NatsServer, own_bus: Bus, watched: dict[str, str]
) -> None:
    """B9: revisions that go backwards make a stock watcher blind.

    Ours says RESET and tells the other history from its start.
    """
    await _put(own_bus, 1)
    await own_nats_server.stop()
    shutil.copytree(own_nats_server.store, own_nats_server.folder / "old")
    await own_nats_server.start()
    await asyncio.wait_for(own_bus.wait_connected(), 30)
    for generation in range(2, 12):
        await _put(own_bus, generation)
    async with Reader(own_bus.watch(INVENTORY, **watched)) as reader:
        await reader.until(lambda items: ChangeKind.SNAPSHOT_END in _kinds(items))
        await own_nats_server.stop()
        shutil.rmtree(own_nats_server.store)
        shutil.copytree(own_nats_server.folder / "old", own_nats_server.store)
        await own_nats_server.start()
        await reader.until(lambda items: _kinds(items).count(ChangeKind.SNAPSHOT_END) == 2)
        await _put(own_bus, 99)
        items = await reader.until(lambda items: 99 in _generations(items))

    kinds = _kinds(items)
    assert _generations(items) == [11, 1, 99]
    assert kinds == [
        ChangeKind.PUT,
        ChangeKind.SNAPSHOT_END,
        ChangeKind.RESET,
        ChangeKind.PUT,
        ChangeKind.SNAPSHOT_END,
        ChangeKind.PUT,
    ]


@pytest.mark.real_server
@_both_ways
async def test_watch_starts_anew_when_a_put_back_store_was_written_on_past_our_position(
    own_nats_server: NatsServer, own_bus: Bus, watched: dict[str, str]
) -> None:
    """B9, the hidden case: the numbers look right again, but what stands at our position is another
    message.
    """
    await _put(own_bus, 1)
    await own_nats_server.stop()
    shutil.copytree(own_nats_server.store, own_nats_server.folder / "old")
    await own_nats_server.start()
    await asyncio.wait_for(own_bus.wait_connected(), 30)
    await _put(own_bus, 2)
    async with Reader(own_bus.watch(INVENTORY, **watched)) as reader:
        await reader.until(lambda items: ChangeKind.SNAPSHOT_END in _kinds(items))
        await own_nats_server.stop()
        shutil.rmtree(own_nats_server.store)
        shutil.copytree(own_nats_server.folder / "old", own_nats_server.store)
        # Written while our bus cannot look: on another port, by somebody else.
        async with NatsServer(binary=own_nats_server.binary) as other:
            await other.stop()
            shutil.rmtree(other.store, ignore_errors=True)
            shutil.copytree(own_nats_server.store, other.store)
            await other.start()
            async with Bus.session(NatsSettings(url=other.url), name="other") as writer:
                await _put(writer, 50)
                await _put(writer, 51)
            await other.stop()
            shutil.rmtree(own_nats_server.store)
            shutil.copytree(other.store, own_nats_server.store)
        await own_nats_server.start()
        items = await reader.until(lambda items: 51 in _generations(items))

    assert ChangeKind.RESET in _kinds(items)
    assert _generations(items)[-1] == 51


@_both_ways
async def test_log_says_that_a_watch_is_fed_again_when_it_said_that_it_waits(
    bus: Bus, watched: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that nobody has made yet, as at a slow start: who reads that the watch waits reads
    that it is over, once each.
    """
    said: list[str] = []
    heard = {"feed.waiting": asyncio.Event(), "feed.healed": asyncio.Event()}

    class Log:
        def info(self, event: str, **_: object) -> None:
            said.append(event)
            heard.setdefault(event, asyncio.Event()).set()

        debug = warning = lambda self, event, **_: None

    monkeypatch.setattr(feed, "get_logger", Log)
    await bus._jetstream.call("STREAM.DELETE.KV_topobus_inventories")
    async with Reader(bus.watch(INVENTORY, **watched)) as reader:
        await heard["feed.waiting"].wait()
        await bus.provision()
        await heard["feed.healed"].wait()
        await _put(bus, 1)
        await reader.until(lambda items: _generations(items) == [1])

    assert said == ["feed.waiting", "feed.healed"]


@pytest.mark.real_server
@_both_ways
async def test_watch_starts_anew_when_the_whole_store_was_lost(
    own_nats_server: NatsServer, own_bus: Bus, watched: dict[str, str]
) -> None:
    """A server that comes back empty gets its buckets again from us, and the watch says that all it
    told is void.
    """
    await _put(own_bus, 1)
    async with Reader(own_bus.watch(INVENTORY, **watched)) as reader:
        await reader.until(lambda items: len(items) == 2)
        await own_nats_server.stop()
        shutil.rmtree(own_nats_server.store)
        await own_nats_server.start()
        await reader.until(lambda items: _kinds(items).count(ChangeKind.SNAPSHOT_END) == 2)
        await _put(own_bus, 2)
        items = await reader.until(lambda items: 2 in _generations(items))

    assert _kinds(items)[2] is ChangeKind.RESET


@_each_reader
async def test_follow_gives_the_newest_of_each_then_changes_when_it_starts_late(bus: Bus) -> None:
    """A late follower first learns each device's present health, then what changes, and can tell
    the two apart.
    """
    for generation in (1, 2, 3):
        await _publish(bus, generation, "gpu-0")
    await _publish(bus, 1, "gpu-1")
    async with Reader(bus.follow(HEALTH)) as reader:
        await reader.until(lambda items: len(items) == 2)
        await _publish(bus, 4, "gpu-0")
        items = await reader.until(lambda items: len(items) == 3)

    assert [(item.parts["device"], item.value.generation, item.is_replay) for item in items] == [
        ("gpu-0", 3, True),
        ("gpu-1", 1, True),
        ("gpu-0", 4, False),
    ]


@_each_reader
async def test_follow_has_no_gap_and_no_duplicate_when_the_server_restarts_under_it(
    own_nats_server: NatsServer, own_bus: Bus
) -> None:
    """Two restarts while events are published: every event arrives once, in order."""
    published: list[int] = []

    async def publish(first: int, last: int) -> None:
        for generation in range(first, last):
            while True:
                try:
                    await _publish(own_bus, generation)
                    break
                except PeerUnavailable:
                    await own_bus.wait_connected()
            published.append(generation)

    async with Reader(own_bus.follow(HEALTH, start=Start.ALL)) as reader:
        await publish(0, 20)
        for first in (20, 40):
            publishing = asyncio.create_task(publish(first, first + 20))
            await _restart(own_nats_server, own_bus)
            await asyncio.wait_for(publishing, 30)
        items = await reader.until(lambda items: len(items) >= 60)

    assert _events(items) == published == list(range(60))


async def test_follow_starts_with_the_next_event_when_asked_for_new_ones(
    own_nats_server: NatsServer, own_bus: Bus
) -> None:
    """Start.NEW skips what was there, and from then on nothing, a restart included."""
    await _publish(own_bus, 1)
    async with Reader(own_bus.follow(HEALTH, start=Start.NEW)) as reader:
        api = own_bus._jetstream
        async with asyncio.timeout(60):
            # The follower has begun when its consumer exists; each look is a round trip.
            while not (await api.call("CONSUMER.NAMES.TOPOBUS_HEALTH"))["consumers"]:
                pass
        await _publish(own_bus, 2)
        await _restart(own_nats_server, own_bus)
        await _publish(own_bus, 3)
        items = await reader.until(lambda items: len(items) == 2)

    assert _events(items) == [2, 3]
    assert not any(item.is_replay for item in items)


async def test_follow_reads_positions_when_the_server_writes_them_in_the_newer_form(nats_binary: Path) -> None:
    """B10: with the server's flag js_ack_fc_v2 every ordered consumer of nats-py breaks.

    Ours reads both forms.
    """
    asked = [nats_binary, "--version"]
    shown = subprocess.run(asked, check=True, capture_output=True, text=True)  # noqa: ASYNC221 - a moment
    version = shown.stdout.split("v")[-1].strip()
    if tuple(map(int, version.split(".")[:2])) < (2, 14):
        pytest.skip(f"nats-server {version} has no such flag (2.14 has)")
    async with (
        NatsServer(binary=nats_binary, config="feature_flags { js_ack_fc_v2: true }") as server,
        Bus.session(NatsSettings(url=server.url), name="test") as bus,
    ):
        await bus.provision()
        await _publish(bus, 1)
        async with Reader(bus.follow(HEALTH)) as reader:
            await reader.until(lambda items: len(items) == 1)
            await _publish(bus, 2)
            items = await reader.until(lambda items: len(items) == 2)

    assert _events(items) == [1, 2]
