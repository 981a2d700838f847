"""The clock as a parameter: code that needs the time or waits for it gets a `Clock`, or uses the
event loop that the clock follows.

`SystemClock` reads the running event loop's time, which also drives `asyncio.sleep`,
`asyncio.timeout` and `loop.call_later`. So a process has one monotonic clock, and a test on
`topobus.testing.clock.VirtualTimeLoop` controls every wait of the service.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import Protocol

__all__ = ["Clock", "SystemClock", "is_real", "is_set_within", "until_tick"]

# A timer may fire a little before its time by the resolution of the clock. That tick then counts as
# reached, and is not waited for again.
_EARLY = 0.1
_ROUNDING_S = 1e-6


class Clock(Protocol):
    """The present time: `now` for people and records, `monotonic` (seconds) for durations. Waits
    with `sleep` and `timeout`.
    """

    def now(self) -> datetime:
        """Give the present moment, aware, in UTC."""
        ...

    def monotonic(self) -> float:
        """Return the seconds since some fixed moment. The value never decreases."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when so many seconds of `monotonic` have passed.

        0 or less gives the other tasks one turn.
        """
        ...

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """Give a block that ends with TimeoutError after so many seconds of `monotonic`, as
        `asyncio.timeout` does.

        None never ends it.
        """
        ...


class SystemClock:
    """The machine's own clock, read through the event loop that runs the caller."""

    def now(self) -> datetime:
        """Give the present moment, aware, in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Give the event loop's time.

        In a thread without a loop give CLOCK_MONOTONIC, which asyncio's own loops read as well.
        """
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return when so many seconds of the event loop have passed."""
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """Give a block that ends with TimeoutError after so many seconds of the event loop."""
        return asyncio.timeout(seconds)


def is_real(clock: Clock) -> bool:
    """Return whether the seconds of a clock, read in the event loop, are CLOCK_MONOTONIC's. A
    thread may then wait for them by itself.

    Errors: raises RuntimeError outside of an event loop.
    """
    return isinstance(clock, SystemClock) and type(asyncio.get_running_loop()).time is asyncio.BaseEventLoop.time


async def is_set_within(event: asyncio.Event, limit: AbstractAsyncContextManager[object]) -> bool:
    """Wait for an event. False when the limit, the `timeout` of a clock or of asyncio, came first."""
    try:
        async with limit:
            await event.wait()
    except TimeoutError:
        return False
    return True


def until_tick(now_s: float, every_s: float) -> float:
    """Return the seconds until the next whole multiple of a period, so that all loops of one
    process that wait for it wake the process up together.

    Shapes: now_s — of the monotonic clock; result — above a tenth of the period, and at most a
    tenth more than one.

    >>> until_tick(7.25, 1.0), until_tick(7.25, 5.0), until_tick(7.0, 1.0)
    (0.75, 2.75, 1.0)
    """
    left_s = every_s - now_s % every_s
    if left_s <= _EARLY * every_s:
        left_s += every_s
    # At a tick the pause is the period itself, not what rounding leaves of it.
    return every_s if abs(left_s - every_s) < _ROUNDING_S else left_s
