"""When a connection sends a message to itself to see whether it lives.

On virtual time, with a client that only knows whether it is closed.
"""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from topobus.bus.connection.canary import CANARY_EVERY_S, Canary
from topobus.bus.connection.connection import Connection
from topobus.bus.feeds.shared_heartbeats import BEAT_S
from topobus.process.clock import SystemClock
from topobus.process.config import NatsSettings
from topobus.process.metrics import BusMetrics
from topobus.process.readiness import Readiness

pytestmark = pytest.mark.virtual_time


class Watched(Connection):
    """Writes down when it asks itself; the client lives until it is said to be dead."""

    def __init__(self) -> None:
        super().__init__(NatsSettings(), "gpu", SystemClock(), BusMetrics(CollectorRegistry()), Readiness())
        self.asked_at: list[float] = []
        self.is_dead = False
        self._dialer.is_alive = self._note_asked

    async def _note_asked(self, client: Any) -> bool:
        now = asyncio.get_running_loop().time()
        self.asked_at.append(now)
        if not self.is_dead:
            self._mailbox._answered_at = now
        return not self.is_dead

    async def hear(self, *, answers: bool, every_s: float) -> None:
        """Get messages for ever, as they come from subscriptions or as answers."""
        while True:
            now = asyncio.get_running_loop().time()
            if answers:
                self._mailbox._answered_at = now
            else:
                self._canary.heard_at = now
            await asyncio.sleep(every_s)


async def watch(connection: Watched, seconds: float, *hearing: Any) -> list[float]:
    """Watch over a client for so long.

    Gives when the connection asked itself, from the beginning.
    """
    client = SimpleNamespace(is_closed=False, last_error=None, close=_nothing)
    connection._client = cast("Any", client)
    began = asyncio.get_running_loop().time()
    tasks = [asyncio.create_task(coroutine) for coroutine in hearing]
    watching = asyncio.create_task(connection._wait_for_loss(cast("Any", client)))
    await asyncio.wait({watching}, timeout=seconds)
    for task in (watching, *tasks):
        task.cancel()
    await asyncio.wait({watching, *tasks})
    return [at - began for at in connection.asked_at]


async def _nothing() -> None:
    return None


async def test_connection_asks_itself_each_period_when_nothing_comes() -> None:
    """A quiet client is looked at regularly, at ticks of the period."""
    connection = Watched()

    asked = await watch(connection, 10 * CANARY_EVERY_S + 0.5)

    assert 9 <= len(asked) <= 11
    assert all(late - early == pytest.approx(CANARY_EVERY_S, abs=0.1) for early, late in itertools.pairwise(asked))


async def test_connection_asks_nothing_when_messages_and_answers_come() -> None:
    """Who talks anyway need not talk to himself."""
    connection = Watched()

    asked = await watch(
        connection,
        60.0,
        connection.hear(answers=False, every_s=CANARY_EVERY_S / 3),
        connection.hear(answers=True, every_s=CANARY_EVERY_S),
    )

    assert asked == []


async def test_connection_asks_itself_when_messages_come_and_no_answers() -> None:
    """That we hear says nothing about whether we are heard."""
    connection = Watched()

    asked = await watch(connection, 60.0, connection.hear(answers=False, every_s=CANARY_EVERY_S / 3))

    assert len(asked) >= 60.0 // (2 * CANARY_EVERY_S + 1.0)


async def test_connection_gives_the_client_up_when_it_falls_silent_after_talking() -> None:
    """The question comes within one period of the last message, so a lost connection is found in 6
    s whenever it was lost.
    """
    connection = Watched()
    connection.is_dead = True
    talking = asyncio.create_task(connection.hear(answers=True, every_s=CANARY_EVERY_S / 3))
    asyncio.get_running_loop().call_later(30.0, talking.cancel)

    asked = await watch(connection, 60.0)

    assert [at for at in asked if at < 30.0] == []
    assert asked[0] <= 30.0 + CANARY_EVERY_S
    assert not connection.is_connected


async def test_connection_is_not_looked_at_when_messages_come_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look wakes the process up: one that hears and is answered is left alone for as long as
    that lasts.
    """
    connection = Watched()
    looks: list[float] = []

    async def get_answers() -> None:
        while True:
            connection._mailbox._answered_at = asyncio.get_running_loop().time()
            connection._canary.put_off()
            await asyncio.sleep(BEAT_S)

    def note_look(canary: Canary) -> bool:
        looks.append(canary.silent_s)
        return True

    monkeypatch.setattr(Canary, "is_talking", property(note_look))
    asked = await watch(connection, 60.0, get_answers())

    assert (asked, looks) == ([], [])
