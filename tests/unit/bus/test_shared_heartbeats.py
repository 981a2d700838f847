"""One feed's heartbeats speak for all feeds of a server; on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from lab.memory_nats.memory_bus import MemoryBus
from lab.memory_nats.memory_server import MemoryNats
from support.reading import Reader
from topobus.bus.feeds.shared_heartbeats import BEAT_S, Seat, SharedHeartbeats
from topobus.formats.messages.catalogue import INVENTORY, LEDGER, MACHINE

pytestmark = pytest.mark.virtual_time

# As long as a dead server may stay unnoticed while its reader waits; 7 s
# before heartbeats were shared.
_LIMIT_S = 5.0


class _Feed:
    """A feed as the heartbeats see it: it pulls, waits, and writes down when and why it was told to
    begin anew.
    """

    def __init__(self, heartbeats: SharedHeartbeats, server: str = "") -> None:
        self.told: list[tuple[float, str]] = []
        self.seat: Seat = heartbeats.enter(server, self._restart)

    def _restart(self, reason: str) -> None:
        self.told.append((asyncio.get_running_loop().time(), reason))

    def pull(self) -> bool:
        """Ask for messages and wait; gives whether heartbeats were asked for."""
        takes_beats = self.seat.takes_beats()
        self.seat.is_waiting = True
        return takes_beats

    async def hear(self, seconds: float) -> None:
        """Get a heartbeat as often as the server sends one, for so long."""
        for _ in range(int(seconds / BEAT_S)):
            await asyncio.sleep(BEAT_S)
            self.seat.note_message()


async def test_one_feed_takes_heartbeats_when_several_of_a_server_pull() -> None:
    """The first asks, and asks again with each pull.

    Another server's consumers do not answer for this one's.
    """
    heartbeats = SharedHeartbeats()
    first, second, elsewhere = _Feed(heartbeats, "a"), _Feed(heartbeats, "a"), _Feed(heartbeats, "b")

    asked = [feed.pull() for feed in (first, second, elsewhere, second, first)]

    assert asked == [True, False, True, False, True]


async def test_all_feeds_of_a_server_are_told_when_heartbeats_stop() -> None:
    """A server that died is found for all its feeds in 5 s.

    Those of another server hear nothing of it.
    """
    heartbeats = SharedHeartbeats()
    first, second, elsewhere = _Feed(heartbeats, "a"), _Feed(heartbeats, "a"), _Feed(heartbeats, "b")
    for feed in (first, second, elsewhere):
        feed.pull()

    await asyncio.gather(first.hear(60.0), elsewhere.hear(80.0))

    assert first.told == second.told == [(60.0 + _LIMIT_S, "silence")]
    assert elsewhere.told == []


async def test_nobody_is_told_when_heartbeats_come() -> None:
    """At rest nothing happens but heartbeats."""
    heartbeats = SharedHeartbeats()
    first, second = _Feed(heartbeats), _Feed(heartbeats)
    for feed in (first, second):
        feed.pull()

    await first.hear(600.0)

    assert first.told == second.told == []


async def test_another_feed_takes_the_heartbeats_when_theirs_ends() -> None:
    """A feed that ends leaves nobody unwatched: one that waits is told to ask, at once."""
    heartbeats = SharedHeartbeats()
    first, busy, third = _Feed(heartbeats), _Feed(heartbeats), _Feed(heartbeats)
    for feed in (first, busy, third):
        feed.pull()
    busy.seat.is_waiting = False

    first.seat.leave()

    assert (busy.told, third.told) == ([], [(0.0, "heartbeats")])
    assert third.pull()
    assert not busy.pull()


async def test_another_feed_takes_the_heartbeats_when_their_reader_does_not_read() -> None:
    """A reader that is busy gets no heartbeats, for it does not pull: that is no silence of the
    server.
    """
    heartbeats = SharedHeartbeats()
    first, second = _Feed(heartbeats), _Feed(heartbeats)
    for feed in (first, second):
        feed.pull()
    first.seat.is_waiting = False

    await asyncio.sleep(2 * _LIMIT_S)

    assert first.told == []
    assert second.told == [(_LIMIT_S, "heartbeats")]


async def test_no_feed_is_told_when_the_last_one_has_left() -> None:
    """Nothing is left behind by feeds that ended."""
    heartbeats = SharedHeartbeats()
    feed = _Feed(heartbeats)
    feed.pull()
    feed.seat.leave()

    await asyncio.sleep(2 * _LIMIT_S)

    assert feed.told == []


async def test_watches_get_the_heartbeats_of_one_when_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watches that have read their beginning get a heartbeat each two seconds, together, and the
    feed of each bucket the word that its pull ran out.
    """
    server, statuses = MemoryNats(), list[str]()
    deliver_status = server.deliver_status

    def note_status(inbox: str, headers: dict[str, str]) -> None:
        statuses.append(headers["Status"])
        deliver_status(inbox, headers)

    async with MemoryBus.session(server, name="controller") as bus:
        await bus.provision()
        async with Reader(bus.watch(MACHINE)), Reader(bus.watch(INVENTORY)), Reader(bus.watch(LEDGER)):
            await asyncio.sleep(60.0)
            monkeypatch.setattr(server, "deliver_status", note_status)
            await asyncio.sleep(600.0)
            counts = {status: statuses.count(status) for status in set(statuses)}

    assert counts.keys() == {"100", "408"}
    assert 270 <= counts["100"] <= 300
    feeds = sum(len(state.buckets()) for state in (MACHINE, INVENTORY, LEDGER))
    assert 19 * feeds <= counts["408"] <= 20 * feeds
