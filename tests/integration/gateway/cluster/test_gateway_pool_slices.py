"""Pools of a class in ResourceSlices: those are shown whose exposure says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from support.gateway_rig import Rig, make_rig
from support.node_plane import device
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer, server: ApiServerSimulator) -> AsyncIterator[Rig]:
    """Two GPUs, one of them in a pool, and a NIC; a gateway that knows the cluster."""
    async with make_rig(nats_server.url) as made:
        await made.plane.show("gpu", device("gpu-0", 0), msgspec.structs.replace(device("gpu-1", 1), pool="gpu-h100"))
        await made.plane.show("nic", device("nic-0", 0))
        made.join(server)
        yield made


def shown(server: ApiServerSimulator) -> dict[str, list[str]]:
    """Class to device names, as the API server has them. A slice has devices of one class."""
    return {
        names[0].partition("-")[0]: names
        for names in (
            [it["name"] for it in resource_slice["spec"].get("devices", [])]
            for resource_slice in server.objects("ResourceSlice")
        )
    }


@pytest.mark.parametrize(
    ("exposure", "gpus"),
    [
        pytest.param({}, ["gpu-0", "gpu-1"], id="all"),
        pytest.param({"gpu-h100": "device-plugin"}, ["gpu-0"], id="all-but-the-pool"),
        pytest.param({"gpu": "device-plugin", "gpu-h100": "dra"}, ["gpu-1"], id="only-the-pool"),
        pytest.param({"gpu": "none"}, None, id="nothing"),
    ],
)
async def test_slices_show_what_the_exposure_of_class_and_pool_says(
    rig: Rig, server: ApiServerSimulator, exposure: dict[str, Any], gpus: list[str] | None
) -> None:
    """What is offered by device plugin alone is not for the scheduler's claims.

    A change of exposure takes back what was shown before.
    """
    wanted = {"nic": ["nic-0"], **({"gpu": gpus} if gpus is not None else {})}
    async with rig.gateway():
        await server.until(lambda: len(shown(server)) == 2, what="two slices")
    async with rig.gateway(exposure=exposure):
        await server.until(lambda: shown(server) == wanted, what=f"slices {wanted}")

    assert shown(server) == wanted
