"""Wakes all waiters for an event at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

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


async def first_of(tickets: Iterable[asyncio.Event], timeout_s: float | None = None) -> None:
    """Wait until one of several tickets is announced, or the time is over."""
    waiting = [asyncio.ensure_future(ticket.wait()) for ticket in tickets]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiting:
            waiter.cancel()
