"""A gateway, a kubelet and a node with a claim for both GPUs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.dra_claims import claim_rig
from support.gateway_rig import Rig
from support.lives import GatewayLives
from topobus.simulation.nats_server import NatsServer


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """Two GPUs and two NICs, a claim for both GPUs; kubelet and gateway are started by the test."""
    async with claim_rig(nats_server) as made:
        yield made


@pytest_asyncio.fixture
async def own_rig(own_nats_server: NatsServer) -> AsyncIterator[Rig]:
    """The same on a server that can be stopped."""
    async with claim_rig(own_nats_server) as made:
        yield made


@pytest_asyncio.fixture
async def lives(rig: Rig) -> AsyncIterator[GatewayLives]:
    """The gateway's processes, with a kubelet beside them."""
    made = GatewayLives(rig)
    async with rig.kubelet:
        await made.start()
        try:
            yield made
        finally:
            await made.stop()


@pytest.fixture
def checkpoint_path(rig: Rig) -> Path:
    """The checkpoint's place, its folder made."""
    path = Path(rig.settings.checkpoint_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
