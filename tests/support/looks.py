"""Waits for what has no event: another process, a file, a server's state, another thread.

The only place where a test with real time pauses; a test with virtual time may sleep as it likes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

__all__ = ["LIMIT_S", "next_look", "next_turn", "other_threads", "until", "until_scraped"]

T = TypeVar("T")

LIMIT_S = 60.0
"""A lost event, not a slow machine, is what it finds."""
_LOOK_EVERY_S = 0.02
# A loop that looks again at once takes the interpreter's lock back after every system call of a
# thread: milliseconds of work then take a minute.
_THREAD_TURN_S = 0.001


async def until(look: Callable[[], T], what: str = "", *, limit_s: float = LIMIT_S) -> T:
    """Look until the result is true, and give it.

    Errors: raises AssertionError with `what` and the last result after `limit_s`.
    """
    seen = look()
    try:
        async with asyncio.timeout(limit_s):
            while not seen:
                await next_look()
                seen = look()
    except TimeoutError:
        raise AssertionError(f"not within {limit_s:g} s: {what or look}; last seen: {seen!r}") from None
    return seen


async def until_scraped(look: Callable[[], T], what: str = "") -> T:
    """Look at metrics until the result is true, and give it: in a thread, as a scrape is, since their
    lines may need the event loop.

    Errors: raises AssertionError as `until` does.
    """
    try:
        async with asyncio.timeout(LIMIT_S):
            while not (seen := await asyncio.to_thread(look)):
                await next_look()
    except TimeoutError:
        raise AssertionError(f"not within {LIMIT_S:g} s: {what or look}") from None
    return seen


async def next_look() -> None:
    """Pause before the next look, or before a request is repeated."""
    await asyncio.sleep(_LOOK_EVERY_S)


async def next_turn() -> None:
    """Let every task of this loop that is ready run once."""
    await asyncio.sleep(0)


async def other_threads() -> None:
    """Let the other threads of this process run."""
    await asyncio.sleep(_THREAD_TURN_S)
