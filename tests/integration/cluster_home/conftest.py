"""A cluster for a controller."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from support.cluster_home import ClusterHome
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator


@pytest_asyncio.fixture
async def home(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[ClusterHome]:
    """An API server with two nodes of two devices each."""
    async with ApiServerSimulator(token="secret", bookmark_s=0.5) as server:
        made = ClusterHome(server, nats_server.url, tmp_path)
        made.machine_room()
        yield made
