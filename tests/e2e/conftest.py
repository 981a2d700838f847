"""A real nats-server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from topobus.bus.bus import Bus
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer


@pytest_asyncio.fixture
async def server() -> AsyncIterator[NatsServer]:
    """A fresh server with an empty store."""
    async with NatsServer() as made:
        yield made


@pytest_asyncio.fixture
async def client(server: NatsServer) -> AsyncIterator[Bus]:
    """A connected bus with all streams and buckets made."""
    async with Bus.session(NatsSettings(url=server.url), name="topobus-cli") as made:
        await made.provision()
        yield made
