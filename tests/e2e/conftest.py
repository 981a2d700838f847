"""A real nats-server and a short folder for sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from topobus.bus.bus import Bus
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a path so short that sockets below it fit (pytest's own may not be)."""
    made = Path(tempfile.mkdtemp(prefix="tb-"))
    yield made
    shutil.rmtree(made)


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
