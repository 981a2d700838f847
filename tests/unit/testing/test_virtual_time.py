"""Clocks: every one keeps the same promises, and the jumping loop passes time only when nothing
else can happen.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from topobus.process.clock import Clock, SystemClock
from topobus.testing import clock as testing_clock
from topobus.testing.clock import LoopClock, ManualClock, Standstill, VirtualTimeLoop

CLOCKS: list[Callable[[], Clock]] = [SystemClock, LoopClock, ManualClock]


async def _pass_time(clock: Clock) -> None:
    """Move the time on for whoever sleeps on a clock that is moved by hand.

    The others move by themselves.
    """
    while isinstance(clock, ManualClock):
        for _turn in range(10):  # whom the last step woke come to their end first
            await asyncio.sleep(0)
        clock.advance(0.25)


async def _with(clock: Clock, work: asyncio.Future[None]) -> None:
    moving = asyncio.ensure_future(_pass_time(clock))
    try:
        await work
    finally:
        moving.cancel()


@pytest.mark.virtual_time
@pytest.mark.parametrize("make", CLOCKS, ids=lambda make: make.__name__)
async def test_sleep_returns_when_the_seconds_have_passed(make: Callable[[], Clock]) -> None:
    """Sleepers return in the order of their moments, whichever began
    first, and at those moments.
    """
    clock, returned = make(), []
    began_s = clock.monotonic()

    async def sleep(seconds: float) -> None:
        await clock.sleep(seconds)
        returned.append((seconds, clock.monotonic() - began_s))

    await _with(clock, asyncio.gather(*(sleep(seconds) for seconds in (3600.0, 0.5, 60.0, 0.0))))  # type: ignore[arg-type]

    assert returned == [(0.0, 0.0), (0.5, 0.5), (60.0, 60.0), (3600.0, 3600.0)]


@pytest.mark.virtual_time
@pytest.mark.parametrize("make", CLOCKS, ids=lambda make: make.__name__)
async def test_timeout_ends_the_block_when_it_takes_longer(make: Callable[[], Clock]) -> None:
    """A block that waits for ever ends with TimeoutError at its moment.

    One that is quicker is left alone, as is one without a limit.
    """
    clock = make()
    began_s = clock.monotonic()

    async def wait(limit_s: float | None, seconds: float) -> float | None:
        try:
            async with clock.timeout(limit_s):
                await clock.sleep(seconds)
        except TimeoutError:
            return clock.monotonic() - began_s
        return None

    async def check() -> None:
        assert await asyncio.gather(wait(10.0, 20.0), wait(10.0, 5.0), wait(None, 20.0)) == [10.0, None, None]

    await _with(clock, asyncio.ensure_future(check()))


async def test_system_clock_is_the_event_loops_when_a_loop_runs() -> None:
    """A service that asks the clock and one that asks the loop get one answer."""
    loop = asyncio.get_running_loop()

    before_s, told_s, after_s = loop.time(), SystemClock().monotonic(), loop.time()

    assert before_s <= told_s <= after_s


def test_system_clock_is_the_loops_source_when_a_thread_without_loop_asks() -> None:
    """A deadline made in the loop can be compared in a thread."""
    loop = asyncio.new_event_loop()
    before_s, told_s, after_s = loop.time(), SystemClock().monotonic(), loop.time()
    loop.close()

    assert before_s <= told_s <= after_s


async def test_manual_clock_moves_nobody_when_it_stands_still() -> None:
    """A sleeper wakes by the test's hand alone, and one that was cancelled is not counted."""
    clock = ManualClock()
    sleeping, cancelled = asyncio.create_task(clock.sleep(10)), asyncio.create_task(clock.sleep(10))
    await asyncio.sleep(0)
    cancelled.cancel()
    clock.advance(9)
    await asyncio.sleep(0)
    waiting = clock.waiting
    was_done = sleeping.done()
    clock.advance(1)
    await sleeping

    assert (waiting, was_done, clock.waiting) == (1, False, 0)


def _run(work: Callable[[VirtualTimeLoop], object]) -> float:
    """Run a coroutine function on a loop of its own; gives the virtual seconds that passed."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        runner.run(work(loop))  # type: ignore[arg-type]
        return loop.time()


def test_loop_stands_still_when_a_call_runs_in_a_thread() -> None:
    """A time-out does not come before the answer of a thread that takes real time."""
    goes_on = threading.Event()

    async def work(_loop: VirtualTimeLoop) -> None:
        async with asyncio.timeout(0.001):
            await asyncio.gather(asyncio.to_thread(goes_on.wait, 10), asyncio.to_thread(goes_on.set))

    assert _run(work) == 0.0


def test_loop_passes_time_by_hand_when_a_call_hangs_in_a_thread() -> None:
    """A test that says so lets the time-out of a hung call come, at its exact moment."""
    ends = threading.Event()

    async def work(loop: VirtualTimeLoop) -> None:
        async def call() -> None:
            async with asyncio.timeout(5):
                await asyncio.to_thread(ends.wait, 10)

        calling = asyncio.create_task(call())
        await asyncio.sleep(0)
        loop.advance(5)
        with pytest.raises(TimeoutError):
            await calling
        ends.set()

    assert _run(work) == 5.0


def test_loop_refuses_to_wait_when_a_socket_is_open() -> None:
    """What comes over a socket takes real time: the loop says so instead of jumping past it."""
    ours, sock = socket.socketpair()

    async def work(loop: VirtualTimeLoop) -> None:
        loop.add_reader(ours, lambda: None)
        await asyncio.sleep(1)

    with ours, sock, pytest.raises(Standstill, match="file descriptors"):
        _run(work)


def test_loop_refuses_to_wait_when_nothing_can_happen_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadlock is told as one instead of lasting until somebody ends the test."""
    monkeypatch.setattr(testing_clock, "_PATIENCE_S", 0.01)

    async def work(_loop: VirtualTimeLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Standstill, match="no timer is left"):
        _run(work)


def test_loop_comes_to_the_moment_when_a_year_passes() -> None:
    """Time-outs longer than what asyncio lets a selector take at once (a day) come, and where a
    float is coarser than a nanosecond.
    """
    year_s = 365 * 86400.0

    async def work(_loop: VirtualTimeLoop) -> None:
        await asyncio.sleep(year_s)

    assert _run(work) == pytest.approx(year_s)


@pytest.mark.virtual_time
async def test_loop_clock_stamps_are_the_same_in_every_run() -> None:
    """A record that is written after two seconds says so, exactly, and a thread reads the same
    clock.
    """
    clock = LoopClock()
    await asyncio.sleep(2)

    assert clock.now() == datetime(2026, 1, 1, 0, 0, 2, tzinfo=UTC)
    assert await asyncio.to_thread(clock.monotonic) == 2.0


async def test_manual_clock_ticks_only_when_somebody_waits_for_that_length() -> None:
    """A sleeper of another length sets no pace, and each step comes after the work of the step
    before it.
    """
    clock, looks = ManualClock(), []

    async def look() -> None:
        while True:
            await clock.sleep(0.97)
            looks.append(clock.monotonic())
            await asyncio.to_thread(lambda: None)  # real work, in which time stands still

    looking, other = asyncio.create_task(look()), asyncio.create_task(clock.sleep(2.0))
    async with clock.ticking(0.97):
        await other
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)

    assert looks[:2] == [pytest.approx(0.97), pytest.approx(1.94)]
