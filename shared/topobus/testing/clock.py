"""Clocks for tests: a clock that a test moves by hand, and an event loop whose time jumps to the
next timer when no other event is pending.

`ManualClock` is for a part that takes a clock as argument. `VirtualTimeLoop` is for whole services
on a bus in memory: their waits take no real time and end in the order and at the times of the code,
also on a busy machine. It follows trio's `MockClock(autojump_threshold=0)`. The library `looptime`
does the same for any loop but also jumps while a socket's answer is under way, so that a time-out
may fire before an answer that takes a millisecond. Here that is an error.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

__all__ = ["LoopClock", "ManualClock", "Standstill", "VirtualTimeLoop"]

# Real seconds that a loop with nothing to do waits for its threads. A wrong test then fails with
# the reason, long before pytest-timeout's 120 s.
_PATIENCE_S = 30.0
_START = datetime(2026, 1, 1, tzinfo=UTC)


class ManualClock:
    """A `topobus.process.clock.Clock` that a test moves: it stops until `advance`, and so do the
    tasks that sleep on it.

    >>> clock = ManualClock()
    >>> clock.advance(1.5)
    >>> clock.monotonic()
    1.5
    """

    def __init__(self, start: datetime = _START) -> None:
        self._start = start
        self._elapsed_s = 0.0
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._lengths: dict[int, float] = {}
        """How long each alarm's owner asked to wait, by the alarm's number."""
        self._expected: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> datetime:
        """Return the moment that the test has set."""
        return self._start + timedelta(seconds=self._elapsed_s)

    def monotonic(self) -> float:
        """Return the seconds that the test has advanced."""
        return self._elapsed_s

    def advance(self, seconds: float) -> None:
        """Advance time, and wake in order the tasks that wait for a moment until then.

        They run when the test awaits next.

        Errors: raises ValueError for a negative time.
        """
        if seconds < 0:
            raise ValueError(f"time does not go back: got {seconds} s")
        until_s = self._elapsed_s + seconds
        while self._alarms and self._alarms[0][0] <= until_s:
            self._elapsed_s, number, ring = heapq.heappop(self._alarms)
            self._lengths.pop(number, None)
            ring()
        self._elapsed_s = until_s

    async def sleep(self, seconds: float) -> None:
        """Return when the test has advanced so many seconds."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        with self._alarm(seconds, lambda: None if woken.done() else woken.set_result(None)):
            await woken

    @asynccontextmanager
    async def timeout(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Return a block that ends with TimeoutError when the test has advanced so many seconds
        inside it.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as limit:
            if seconds is None:
                yield limit
                return
            with self._alarm(max(0.0, seconds), lambda: limit.reschedule(loop.time())):
                yield limit

    async def asleep(self, seconds: float) -> None:
        """Return when a task waits on this clock that asked for exactly so many seconds. From then
        on the test's next `advance` reaches it.
        """
        if seconds in self._lengths.values():
            return
        expected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._expected.append((seconds, expected))
        await expected

    @asynccontextmanager
    async def ticking(self, seconds: float) -> AsyncIterator[None]:
        """Advance time in steps of so many seconds inside the block, each as soon as a task waits
        that asked for exactly that. There is no step while all tasks work.
        """

        async def tick() -> None:
            while True:
                await self.asleep(seconds)
                self.advance(seconds)
                await asyncio.sleep(0)

        ticks = asyncio.create_task(tick())
        try:
            yield
        finally:
            ticks.cancel()

    @property
    def waiting(self) -> int:
        """The number of waiters on this clock. A test that advances before they wait wakes none."""
        return len(self._alarms)

    @contextmanager
    def _alarm(self, seconds: float, ring: Callable[[], None]) -> Iterator[None]:
        number = next(self._numbers)
        alarm = (self._elapsed_s + seconds, number, ring)
        heapq.heappush(self._alarms, alarm)
        self._lengths[number] = seconds
        for length, expected in self._expected:
            if length == seconds and not expected.done():
                expected.set_result(None)
        self._expected = [(length, expected) for length, expected in self._expected if not expected.done()]
        try:
            yield
        finally:
            self._lengths.pop(number, None)
            if alarm in self._alarms:
                self._alarms.remove(alarm)
                heapq.heapify(self._alarms)


class Standstill(RuntimeError):
    """Raised out of the event loop when virtual time cannot pass: a socket is open, or no more
    event can come.
    """


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stops while anything runs, and jumps to the next timer when nothing
    can run before it.

    Errors: raises Standstill out of `run_until_complete` when it would have to wait and a file
    descriptor other than its own is registered (a socket, a pipe: what comes over it takes real
    time), and when no timer is left and no thread wakes it: a deadlock. A call in
    `asyncio.to_thread` holds the time until it is over or given up. A thread of another kind does
    not: the time may jump before it wakes the loop.

    >>> loop = VirtualTimeLoop()
    >>> loop.run_until_complete(asyncio.sleep(3600))
    >>> loop.time()
    3600.0
    >>> loop.close()
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._in_threads: set[asyncio.Future[Any]] = set()
        self._jumps = _JumpingSelector(self)
        super().__init__(self._jumps)
        # asyncio runs timers that are due before `time() + _clock_resolution`; its 1e-9 is lost in
        # a float's rounding after half a year, and then a timer is never due.
        self._clock_resolution = 1e-6
        # The pipe by which other threads wake the loop, made by the line above.
        self._jumps.own = frozenset(key.fd for key in self._jumps.get_map().values())

    def time(self) -> float:
        """Give the virtual seconds since the loop was made."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Advance time although something holds it: so a test of a call that hangs in a thread
        reaches its time-out.

        Errors: raises ValueError for a negative time.
        """
        if seconds < 0:
            raise ValueError(f"time does not go back: got {seconds} s")
        self._now_s += seconds

    @property
    def is_held(self) -> bool:
        """Return whether a call in a thread is under way."""
        return bool(self._in_threads)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run a call in a thread.

        Virtual time stops until it is over, or until no task waits for it any more.
        """
        call: asyncio.Future[Any] = super().run_in_executor(executor, func, *args)
        self._in_threads.add(call)
        call.add_done_callback(self._in_threads.discard)
        return call


class _JumpingSelector(selectors.DefaultSelector):
    """Returns what is ready, and moves the loop's time where asyncio would sleep."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop
        self.own: frozenset[int] = frozenset()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if strangers := sorted(self._strangers()):
            raise Standstill(
                "virtual time cannot pass while these file descriptors are watched, for what they bring "
                f"takes real time: {strangers}"
            )
        if timeout is None or self._loop.is_held:
            ready = super().select(_PATIENCE_S)
            if not ready:
                raise Standstill(
                    "a call in a thread does not end"
                    if self._loop.is_held
                    else "every task waits, and no timer is left to end that"
                )
            return ready
        self._loop.advance(timeout)
        return []

    def _strangers(self) -> list[int]:
        return [key.fd for key in self.get_map().values() if key.fd not in self.own]


class LoopClock:
    """A `Clock` that follows one event loop, for records with exact stamps and for code that reads
    the time in a thread.

    `now` begins at a fixed moment and moves with the loop, so that a stamp in a message is the same
    in every run.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now(self) -> datetime:
        """Give the start and the loop's time together."""
        return _START + timedelta(seconds=self._loop.time())

    def monotonic(self) -> float:
        """Give the loop's time, in any thread."""
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        """Return when so many seconds of the loop have passed."""
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float | None) -> asyncio.Timeout:
        """Give a block that ends with TimeoutError after so many seconds of the loop."""
        return asyncio.timeout(seconds)
