"""A gateway with a folder for device plugins of others."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from support.foreign_rig import make_foreign_rig
from support.gateway_rig import Rig
from topobus.simulation.nats_server import NatsServer


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """A node with two NUMA nodes and no devices of ours."""
    async with make_foreign_rig(nats_server.url) as made:
        yield made
