"""Promises of waits with a limit."""

from __future__ import annotations

import asyncio

import pytest

from topobus.process.clock import is_set_within


@pytest.mark.parametrize("is_set", [True, False])
async def test_event_is_waited_for_no_longer_than_the_limit(is_set: bool) -> None:
    """The answer says whether the event or the limit came first, and no error is raised."""
    event = asyncio.Event()
    if is_set:
        event.set()

    assert await is_set_within(event, asyncio.timeout(0 if not is_set else None)) is is_set


async def test_cancelled_wait_is_no_answer() -> None:
    """A task that is ended while it waits ends."""
    waiting = asyncio.create_task(is_set_within(asyncio.Event(), asyncio.timeout(None)))
    await asyncio.sleep(0)

    waiting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await waiting
