"""Wakes all waiters for an event at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext

__all__ = ["Broadcast", "first_of"]


class Broadcast:
    """Wakes every waiter at once.

    A waiter takes the ticket first, then checks, then waits, so it misses nothing.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        """Return the event that the next announcement will set."""
        return self._event

    def announce(self) -> None:
        """Wake all ticket holders."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def until(self, holds: Callable[[], bool], limit: AbstractAsyncContextManager[object] | None = None) -> bool:
        """Wait until a condition holds, which is checked now and after each announcement. False when
        the limit, the `timeout` of a clock or of asyncio, came first.
        """
        if holds():
            return True  # without a timer, as most often
        try:
            async with nullcontext() if limit is None else limit:
                while True:
                    ticket = self.ticket()
                    if holds():
                        return True
                    await ticket.wait()
        except TimeoutError:
            return False


async def first_of(tickets: Iterable[asyncio.Event], timeout_s: float | None = None) -> bool:
    """Wait until one of several tickets is announced. False: the time was over first."""
    waiting = [asyncio.ensure_future(ticket.wait()) for ticket in tickets]
    try:
        done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        for waiter in waiting:
            waiter.cancel()
