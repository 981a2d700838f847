"""Controllers beside each other, and controllers that die: a device is given once, and an attempt
that was begun is finished.
"""

from __future__ import annotations

import itertools
from random import Random

import pytest

from support.controller_home import Home, claim, condition, is_settled
from support.controllers import NOW, controller
from support.looks import until
from support.mortal_bus import died_or, mortal_controller
from support.real_topology import WatchedTopology
from topobus.bus.bus import Change, ChangeKind
from topobus.formats.kubernetes import admit, object_parts
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject
from topobus.simulation.nats_server import NatsServer

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]


async def test_controller_completes_attempt_when_another_replica_died_after_placing(
    home: Home, nats_server: NatsServer
) -> None:
    """What a crash left between the node's ledger and the claim's status is completed with the same
    devices.
    """
    await home.put(claim("crashed", count=2))
    async with controller(nats_server.url):
        await home.results("crashed")
    attempt = next(
        change.value
        for change in home.objects.items
        if change.value is not None and "topobus.dev/attempt" in (change.value.metadata.get("annotations") or {})
    )
    await home.put(attempt)

    async with controller(nats_server.url):
        api_object = await home.until_claim(
            "crashed", lambda value: value is not None and "topobus.dev/attempt" not in value.metadata["annotations"]
        )

    assert api_object is not None
    held = next(iter(home.topology.ledger.allocations.values())).holdings[0].devices["gpu"]
    assert sorted(result["device"] for result in api_object.status["allocation"]["devices"]["results"]) == sorted(held)
    assert len({request.op_id for request in home.topology.requests}) == 1


async def test_controller_never_gives_device_twice_when_three_replicas_compete(
    home: Home, nats_server: NatsServer
) -> None:
    """Three replicas serve twelve claims for eight GPUs: eight are allocated, each device once."""
    async with controller(nats_server.url), controller(nats_server.url), controller(nats_server.url):
        for index in range(12):
            await home.put(claim(f"c{index:02d}"))
        await home.objects.until(lambda items: len(_allocated_devices(items)) == 8, timeout_s=60)
        for index in range(12):
            await home.until_claim(f"c{index:02d}", lambda value: bool(condition(value)))

    devices = _allocated_devices(home.objects.items)
    assert len(set(devices.values())) == 8
    assert len(home.topology.ledger.allocations) == 8


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_controller_keeps_claims_and_ledger_equal_when_replicas_die_at_any_moment(
    home: Home, nats_server: NatsServer, seed: int
) -> None:
    """Twelve replicas are cut off after some writes, while claims come and go.

    In the end every holding has its claim and the reverse.
    """
    random = Random(seed)
    names = [f"c{index}" for index in range(10)]
    numbers = itertools.count()

    async def change() -> None:
        name = random.choice(names)
        if random.random() < 0.4:
            await home.delete("resourceclaim", name)
        else:
            fresh = admit(claim(name, count=random.choice([1, 2, 3])), uid=f"uid-{name}-{next(numbers)}", now=NOW)
            await home.bus.compare_and_set(catalogue.OBJECT, fresh, 0, **object_parts(fresh))

    for _ in range(12):
        step, is_done = random.randrange(1, 6), random.random() < 0.5
        await change()
        async with mortal_controller(nats_server.url, step, is_done=is_done) as fates:
            # A change may be nothing to do, such as the end of a claim that is not there: who lives
            # when all is settled is given another one.
            while not await died_or(home.objects.until(is_settled, timeout_s=60), fates):
                await change()

    async with controller(nats_server.url):
        await home.until_settled()
        # A claim that was told why it waits may be under way again:
        # something was let go after that.
        await until(lambda: _given(home.objects.items) == _held(home.topology))


def _given(items: list[Change[ApiObject]]) -> dict[str, list[str]]:
    """List what stored claims say that they have, by uid."""
    newest = {change.parts["name"]: change.value for change in items if change.parts.get("kind") == "resourceclaim"}
    return {
        api_object.metadata["uid"]: sorted(
            result["device"] for result in api_object.status["allocation"]["devices"]["results"]
        )
        for api_object in newest.values()
        if api_object is not None and api_object.status.get("allocation")
    }


def _held(topology: WatchedTopology) -> dict[str, list[str]]:
    """List what the ledger says that claims have, by uid."""
    return {
        allocation.owner.uid: sorted(allocation.holdings[0].devices["gpu"])
        for allocation in topology.ledger.allocations.values()
    }


def _allocated_devices(items: list[Change[ApiObject]]) -> dict[str, str]:
    newest = {change.parts["name"]: change.value for change in items if change.kind is ChangeKind.PUT}
    return {
        name: api_object.status["allocation"]["devices"]["results"][0]["device"]
        for name, api_object in newest.items()
        if api_object is not None and api_object.status.get("allocation")
    }
