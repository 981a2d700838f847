"""A gateway and a kubelet on a node, not yet started."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from support.gateway_rig import Rig, make_rig
from topobus.simulation.nats_server import NatsServer


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """A folder with everything but a running kubelet and gateway."""
    async with make_rig(nats_server.url) as made:
        yield made


@pytest_asyncio.fixture
async def own_rig(own_nats_server: NatsServer) -> AsyncIterator[Rig]:
    """The same on a server that can be stopped."""
    async with make_rig(own_nats_server.url) as made:
        yield made
