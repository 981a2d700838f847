"""Heartbeats: /healthz fails when a loop does not turn, and only then."""

from __future__ import annotations

import asyncio
import threading

from prometheus_client import CollectorRegistry

from support.web_pages import page_of
from topobus.process.config import HttpSettings
from topobus.process.heartbeat import EVENT_LOOP, Heartbeats
from topobus.process.http import Endpoint
from topobus.process.probe import ask_ready
from topobus.process.readiness import Readiness
from topobus.simulation.nats_server import free_port
from topobus.testing.clock import ManualClock


def test_a_loop_is_stuck_when_its_work_makes_no_progress() -> None:
    """A step that takes longer than the limit is named, with how long.

    A loop that waits for news may wait for ever.
    """
    clock = ManualClock()
    beats = Heartbeats(clock, work_limit_s=120)
    working, waiting = beats.loop("reconcile"), beats.loop("publish")
    working.turn()
    waiting.turn()
    waiting.rest()

    clock.advance(120)
    assert beats.stalled() == {}
    clock.advance(1)

    assert beats.stalled() == {"reconcile": 121.0}


def test_a_loop_is_not_stuck_when_it_has_ended_at_its_work() -> None:
    """What a device host that failed leaves behind must not end the process minutes later."""
    clock = ManualClock()
    beats = Heartbeats(clock, work_limit_s=120)
    with beats.working("publish-gpu") as beat:
        beat.turn()

    clock.advance(1000)

    assert beats.stalled() == {}


def test_a_long_pass_is_alive_when_it_makes_progress() -> None:
    """Ten thousand objects of a second each are an honest pass: it says so with each of them."""
    clock = ManualClock()
    beats = Heartbeats(clock)
    beat = beats.loop("reconcile")
    seen: set[str] = set()

    for _ in range(10_000):
        beat.turn()
        clock.advance(1)
        seen |= beats.stalled().keys()

    assert seen == set()
    assert clock.monotonic() == 10_000


def test_a_loop_that_never_began_is_not_stuck() -> None:
    """A service that waits for its bus has no work yet: readiness says so, not health."""
    clock = ManualClock()
    beats = Heartbeats(clock)
    beats.loop("reconcile")

    clock.advance(1e6)

    assert beats.stalled() == {}


def test_endpoint_is_neither_alive_nor_ready_when_a_loop_is_stuck() -> None:
    """Both probes fail and name the loop, and both are well again with its next step."""
    clock = ManualClock()
    beats = Heartbeats(clock)
    beat = beats.loop("reconcile")
    readiness = Readiness()
    readiness.set("bus", is_ready=True)
    settings = HttpSettings(port=free_port())
    with Endpoint(settings, readiness, CollectorRegistry(), beats):
        beat.turn()
        before = page_of(settings.port, "/healthz"), page_of(settings.port, "/readyz")[0]
        clock.advance(300)
        stuck = page_of(settings.port, "/healthz"), ask_ready(settings.host, settings.port)
        beat.turn()
        after = page_of(settings.port, "/healthz"), page_of(settings.port, "/readyz")[0]

    assert before == after == ((200, "ok\n"), 200)
    assert stuck[0] == (503, "reconcile stalled: no progress for 300 s\n")
    assert stuck[1][0] is False
    assert "no progress for 300 s" in stuck[1][1]


async def test_endpoint_is_not_alive_when_the_event_loop_is_blocked() -> None:
    """A step that holds the event loop makes /healthz fail while it holds it, and only so long."""
    clock = ManualClock()
    beats = Heartbeats(clock)
    settings = HttpSettings(port=free_port())
    answers: list[tuple[int, str]] = []
    release = threading.Event()

    def look() -> None:
        clock.advance(11)
        answers.append(page_of(settings.port, "/healthz"))
        release.set()

    with Endpoint(settings, Readiness(), CollectorRegistry(), beats):
        beating = asyncio.create_task(beats.follow_event_loop())
        await asyncio.sleep(0)
        looker = threading.Thread(target=look)
        looker.start()
        release.wait()  # this blocks the very loop that should beat
        looker.join()
        assert beats.stalled() == {EVENT_LOOP: 11.0}
        beating.cancel()
        await asyncio.wait({beating})
        answers.append(page_of(settings.port, "/healthz"))

    assert answers == [(503, "event-loop stalled: no progress for 11 s\n"), (200, "ok\n")]
