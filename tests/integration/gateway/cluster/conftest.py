"""A gateway on a node of a simulated cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from support.gateway_rig import Rig, make_rig
from support.lives import GatewayLives
from support.node_plane import NODE, device
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.kubelet import KubeletTimings


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer, server: ApiServerSimulator) -> AsyncIterator[Rig]:
    """Two GPUs and a NIC; a kubelet that wipes slices; a gateway that knows the cluster."""

    def wipe(driver: str) -> int:
        return server.wipe_slices(NODE, driver)

    async with make_rig(nats_server.url, wipe_slices=wipe, timings=KubeletTimings(wipe_s=0.1)) as made:
        await made.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        await made.plane.show("nic", device("nic-0", 0))
        made.join(server)
        yield made


@pytest_asyncio.fixture
async def lives(rig: Rig) -> AsyncIterator[GatewayLives]:
    """The gateway's processes."""
    made = GatewayLives(rig)
    try:
        yield made
    finally:
        await made.stop()
