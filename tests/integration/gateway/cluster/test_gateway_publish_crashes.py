"""A gateway killed (SIGKILL) at every single step of publishing: the next one brings the pool to
what it should be, and nobody is misled meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from support.gateway_rig import Rig, make_rig
from support.laws import steps
from support.lives import GatewayLives
from support.looks import until
from support.mortal_gateway import PUBLISH
from support.node_plane import device
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator

pytestmark = pytest.mark.integration

# A slice has 64: these fill two and four, so that slices are updated, created and deleted.
FEW, MANY = 70, 200
MOST_STEPS = 100


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer, server: ApiServerSimulator) -> AsyncIterator[Rig]:
    """A gateway that knows the cluster."""
    async with make_rig(nats_server.url) as made:
        made.join(server)
        yield made


def names(count: int) -> list[str]:
    """The devices of an inventory of this size."""
    return [f"gpu-{index:03d}" for index in range(count)]


async def show(rig: Rig, count: int) -> None:
    """Publish an inventory."""
    await rig.plane.show("gpu", *(device(name, 0) for name in names(count)))


def pool(server: ApiServerSimulator) -> tuple[bool, list[str]]:
    """The pool as the scheduler reads it: whether it is complete, and the devices of its newest
    generation.
    """
    specs: list[dict[str, Any]] = [resource_slice["spec"] for resource_slice in server.objects("ResourceSlice")]
    newest = max((spec["pool"]["generation"] for spec in specs), default=0)
    current = [spec for spec in specs if spec["pool"]["generation"] == newest]
    is_complete = {spec["pool"]["resourceSliceCount"] for spec in current} == {len(current)}
    return is_complete, sorted(it["name"] for spec in current for it in spec.get("devices", ()))


def is_published(server: ApiServerSimulator, count: int) -> bool:
    """Say whether exactly these devices are there, and no slice besides those that hold them."""
    return pool(server) == (True, names(count)) and len(server.objects("ResourceSlice")) == -(-count // 64)


@pytest.mark.law
@pytest.mark.parametrize(("before", "after"), [(FEW, MANY), (MANY, FEW)], ids=["grows", "shrinks"])
async def test_pool_is_right_after_the_next_start_when_the_gateway_is_killed_at_any_write(
    rig: Rig, server: ApiServerSimulator, lives: GatewayLives, before: int, after: int
) -> None:
    """Between the two pools there is no third: a scheduler sees the old one, the new one, or one
    that is not complete, which it leaves alone.
    """
    await show(rig, before)
    await lives.start()
    for step in steps(MOST_STEPS):
        await server.until(lambda: is_published(server, before), what=f"{before} devices")
        lives.doom(PUBLISH, step)
        await show(rig, after)
        await until_dead_or_published(lives, server, after)
        if not await lives.died():
            break
        at = f"killed at {lives.where()}"
        is_complete, seen = pool(server)
        assert not is_complete or seen in (names(before), names(after)), at

        await lives.start()
        await server.until(lambda: is_published(server, after), what=f"{after} devices after it was {at}")
        await show(rig, before)

    # Before the one at which all was published.
    assert 6 <= step - 1 < MOST_STEPS - 2, f"{step - 1} steps"


async def until_dead_or_published(lives: GatewayLives, server: ApiServerSimulator, count: int) -> None:
    """Wait for whichever comes first."""
    await until(lambda: lives.is_dead or is_published(server, count))
