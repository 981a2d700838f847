"""A gateway on a node of a simulated cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest_asyncio

from support.gateway_rig import Rig, make_rig
from support.node_plane import NODE, device
from topobus.gateway.config import ClusterSettings
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.kubelet import KubeletTimings


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ApiServerSimulator]:
    """An API server that knows our node."""
    async with ApiServerSimulator(token="secret", bookmark_s=0.5) as running:
        running.put({"kind": "Node", "metadata": {"name": NODE}})
        yield running


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer, server: ApiServerSimulator, tmp_path: Path) -> AsyncIterator[Rig]:
    """Two GPUs and a NIC; a kubelet that wipes slices; a gateway that knows the cluster."""

    def wipe(driver: str) -> int:
        return server.wipe_slices(NODE, driver)

    async with make_rig(nats_server.url, wipe_slices=wipe, timings=KubeletTimings(wipe_s=0.1)) as made:
        await made.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        await made.plane.show("nic", device("nic-0", 0))
        cluster = ClusterSettings(
            mode="kubeconfig",
            kubeconfig=str(server.write_kubeconfig(tmp_path / "kubeconfig")),
            retry_s=0.05,
            publish_delay_s=0.01,
        )
        made.settings = msgspec.structs.replace(made.settings, cluster=cluster)
        yield made
