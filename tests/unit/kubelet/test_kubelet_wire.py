"""The simulator's dialling of a plugin's socket."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from topobus.simulation.kubelet.wire import dial


class _Channel:
    """A channel that is ready when the test says so."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.is_closed = False

    async def channel_ready(self) -> None:
        await self.ready.wait()

    async def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("turns", range(3))
async def test_dial_is_cancelled_when_the_socket_answers_in_the_same_moment(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whichever turn of the loop the owner stops: the channel is closed, and the task ends
    instead of registering a plugin with nobody.
    """
    channel = _Channel()
    monkeypatch.setattr(grpc.aio, "insecure_channel", lambda *_, **__: channel)
    dialling = asyncio.create_task(dial(Path("p.sock"), 60.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    channel.ready.set()
    for _ in range(turns):
        if not dialling.done():
            await asyncio.sleep(0)
    was_over = dialling.done()
    dialling.cancel()
    await asyncio.wait({dialling})

    assert was_over or (dialling.cancelled() and channel.is_closed)
