"""A controller that dies at any step of scheduling a pod, or of ending one: the next replica goes
on, and nothing is left over or held twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from support.controllers import ApiUser, controller
from support.laws import steps
from support.mortal_bus import died_or, mortal_controller
from support.reading import Reader
from support.real_topology import WatchedTopology, real_topology
from topobus.bus.bus import Bus, Change
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Inventory
from topobus.values.machine import Machine

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

# Writes and asks of a pod's way, and of its end, as counted: with fewer deaths
# than these, steps were missed.
SCHEDULING_STEPS = 13
ENDING_STEPS = 13
# More than there are: a loop that never ends would be a bug of the test.
MOST_STEPS = 100

MANIFEST = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: two-gpus}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.topobus.dev, count: 2}}]}}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: shared, annotations: {topobus.dev/allocation-mode: WaitForFirstConsumer}}
spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.topobus.dev}}]}}
---
apiVersion: v1
kind: Pod
metadata: {name: trainer}
spec:
  containers: [{name: main, resources: {limits: {topobus.dev/gpu: 3}}}]
  resourceClaims: [{name: own, resourceClaimTemplateName: two-gpus}, {name: shared, resourceClaimName: shared}]
"""


class Place(ApiUser):
    """One recorded node, and a user of the API."""

    def __init__(self, bus: Bus, objects: Reader[Change[ApiObject]], topology: WatchedTopology) -> None:
        super().__init__(bus, objects)
        self.topology = topology
        self._namespaces: dict[str, str] = {}

    async def clear(self) -> None:
        """Have nothing stored and nothing held, as before the first step."""
        for key in await self.until_all(lambda _: True):
            kind, _, name = key.partition("/")
            await self.bus.delete(catalogue.OBJECT, kind=kind, namespace=self._namespaces[key], name=name)
        await self.until_all(lambda stored: not stored)
        await self.topology.lose_ledger()

    async def start_and_ask_end(self, url: str) -> None:
        """Have the pod scheduled, and then ask for its end."""
        await self.apply(MANIFEST)
        async with controller(url):
            await self.until_all(is_scheduled)
        await self.delete("pod", "trainer")

    async def until_all(self, is_enough: Callable[[dict[str, ApiObject]], bool]) -> dict[str, ApiObject]:
        """Wait until what is stored satisfies the test; gives it by kind and name."""

        def newest(items: list[Change[ApiObject]]) -> dict[str, ApiObject]:
            api_objects = {
                f"{change.parts['kind']}/{change.parts['name']}": change.value for change in items if change.parts
            }
            self._namespaces = {
                f"{change.parts['kind']}/{change.parts['name']}": change.parts["namespace"]
                for change in items
                if change.parts
            }
            return {key: api_object for key, api_object in api_objects.items() if api_object is not None}

        await self.objects.until(lambda items: is_enough(newest(items)))
        return newest(self.objects.items)

    def held(self) -> dict[str, int]:
        """Count the devices that the ledger holds, by owner."""
        return {
            key.rpartition("/")[0]: sum(
                len(names) for holding in allocation.holdings for names in holding.devices.values()
            )
            for key, allocation in sorted(self.topology.ledger.allocations.items())
        }


def is_scheduled(stored: dict[str, ApiObject]) -> bool:
    """Say whether the pod has its node."""
    pod = stored.get("pod/trainer")
    return pod is not None and any(condition["status"] == "True" for condition in pod.status.get("conditions") or ())


def is_ended(stored: dict[str, ApiObject]) -> bool:
    """Say whether the pod, its own claim and the shared claim's allocation are gone."""
    claims = [api_object for key, api_object in stored.items() if key.startswith("resourceclaim/")]
    return (
        "pod/trainer" not in stored
        and [claim.metadata["name"] for claim in claims] == ["shared"]
        and _is_free(claims[0])
    )


def _is_free(claim: ApiObject) -> bool:
    return not claim.status.get("allocation") and not claim.metadata.get("finalizers")


@pytest_asyncio.fixture
async def place(bus: Bus, recorded: tuple[Machine, list[Inventory]]) -> AsyncIterator[Place]:
    """One node of eight GPUs, no controller yet."""
    machine, (gpus, _) = recorded
    async with real_topology(bus, machine, [gpus]) as topology, Reader(bus.watch(catalogue.OBJECT)) as objects:
        yield Place(bus, objects, topology)


async def dies_at(
    place: Place, url: str, step: int, *, is_done: bool, is_enough: Callable[[dict[str, ApiObject]], bool]
) -> bool:
    """Run a replica that dies at a step; False when all was done before it came to that many."""
    async with mortal_controller(url, step, is_done=is_done) as fates:
        return await died_or(place.until_all(is_enough), fates)


@pytest.mark.law
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
async def test_pod_is_scheduled_whole_when_a_replica_dies_at_any_step(
    place: Place, nats_server: NatsServer, *, is_done: bool
) -> None:
    """Whatever step was the last: the next replica gives the pod its node, each claim its devices
    once, and the reservations.
    """
    await place.apply(MANIFEST)
    for step in steps(MOST_STEPS):
        if not await dies_at(place, nats_server.url, step, is_done=is_done, is_enough=is_scheduled):
            break
        async with controller(nats_server.url):
            stored = await place.until_all(is_scheduled)

        (made,) = [key.rpartition("/")[2] for key in stored if key.startswith("resourceclaim/trainer-own")]
        assert place.held() == {f"claim/default/{made}": 2, "claim/default/shared": 1, "pod/default/trainer": 3}, (
            f"step {step}"
        )
        uid = stored["pod/trainer"].metadata["uid"]
        for name in (made, "shared"):
            users = stored[f"resourceclaim/{name}"].status["reservedFor"]
            assert [user["uid"] for user in users] == [uid], f"step {step}"
        await place.clear()
        await place.apply(MANIFEST)

    assert SCHEDULING_STEPS <= step - 1 < MOST_STEPS - 2


@pytest.mark.law
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
async def test_pod_leaves_nothing_when_a_replica_dies_at_any_step_of_its_end(
    place: Place, nats_server: NatsServer, *, is_done: bool
) -> None:
    """Whatever step of the end was the last: the next replica frees all devices, ends the pod's
    claim and gives the shared one back.
    """
    await place.start_and_ask_end(nats_server.url)
    for step in steps(MOST_STEPS):
        if not await dies_at(place, nats_server.url, step, is_done=is_done, is_enough=is_ended):
            break
        async with controller(nats_server.url):
            await place.until_all(is_ended)

        assert place.held() == {}, f"step {step}"
        await place.clear()
        await place.start_and_ask_end(nats_server.url)

    assert ENDING_STEPS <= step - 1 < MOST_STEPS - 2
