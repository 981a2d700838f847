"""The controller dies at every step of a classic claim's life, on a real nats-server, and another
replica goes on: nothing is handed out twice, nothing leaks.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random

import pytest
import pytest_asyncio

from lab.memory_nats.fates import FatedBus
from support.classic_home import ClassicPlace, classic_place, controller, devices_of, node_of
from support.laws import steps
from support.looks import until
from support.mortal_bus import died_or
from support.running import service
from topobus.bus.bus import Bus
from topobus.controller.classic.rules import classic_lifecycle
from topobus.formats.kubernetes.classic.classic_handles import as_structured
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import PlaceRequest
from topobus.simulation.nats_server import NatsServer
from topobus.testing.clock import VirtualTimeLoop
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest, Policy

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

CLASSES = """
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {name: gpu}
driverName: gpu.topobus.dev
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {name: nic}
driverName: nic.topobus.dev
"""


def claim(name: str, mode: str = "WaitForFirstConsumer", of: str = "gpu") -> str:
    """Write a claim."""
    spec = f"{{resourceClassName: {of}, allocationMode: {mode}}}"
    return (
        f"---\n{{apiVersion: resource.k8s.io/v1alpha2, kind: ResourceClaim, metadata: {{name: {name}}}, spec: "
        f"{spec}}}\n"
    )


def pod(name: str, *claims: str) -> str:
    """Write a pod."""
    entries = ", ".join(
        f"{{name: c{index}, source: {{resourceClaimName: {each_claim}}}}}" for index, each_claim in enumerate(claims)
    )
    return (
        f"---\n{{apiVersion: v1, kind: Pod, metadata: {{name: {name}}}, spec: {{containers: [{{name: m}}], "
        f"resourceClaims: [{entries}]}}}}\n"
    )


@pytest_asyncio.fixture
async def place(bus: Bus, nats_server: NatsServer) -> AsyncIterator[ClassicPlace]:
    """Two nodes, classes, no controller."""
    async with classic_place(bus, nats_server.url) as made:
        await made.apply(CLASSES)
        yield made


async def allocate(place: ClassicPlace, name: str) -> None:
    """An immediate claim."""
    await place.apply(claim(name, "Immediate"))


async def is_allocated(place: ClassicPlace, name: str) -> None:
    """The claim has what the ledger shows."""
    done = await place.allocated(name)
    assert place.held(node_of(done)) == {f"claim/default/{name}": devices_of(done)}


async def negotiate(place: ClassicPlace, name: str) -> None:
    """A pod with two delayed claims of different drivers."""
    await place.apply(claim(name) + claim(f"{name}-nic", of="nic") + pod(name, name, f"{name}-nic"))


async def is_bound(place: ClassicPlace, name: str) -> None:
    """The pod has its node, and both claims are there and its."""
    node = await place.scheduled(name)
    for api_object in (await place.allocated(name), await place.allocated(f"{name}-nic")):
        assert (node_of(api_object), [user["name"] for user in api_object.status["reservedFor"]]) == (node, [name])
    await place.gone("podschedulingcontext", name)


async def delete(place: ClassicPlace, name: str) -> None:
    """Delete an allocated claim."""
    await place.delete("resourceclaim", name)


async def is_gone(place: ClassicPlace, name: str) -> None:
    """The claim is gone, and nothing is held."""
    await place.gone("resourceclaim", name)
    assert place.held("n1") == place.held("n2") == {}


async def ask_back(place: ClassicPlace, name: str) -> None:
    """End the pod of a delayed claim."""
    await place.delete("pod", name)


async def is_free(place: ClassicPlace, name: str) -> None:
    """The claims are pending again, unreserved, and nothing is held."""
    for claim_name in (name, f"{name}-nic"):
        await place.until(
            "resourceclaim",
            claim_name,
            lambda value: value is not None and classic_lifecycle.status_of(value).allocation is None,
        )
        status = classic_lifecycle.status_of(await place.claim(claim_name))
        assert (status.driver_name, status.reserved_for, status.deallocation_requested) == ("", (), False)
    assert place.held("n1") == place.held("n2") == {}


Act = Callable[[ClassicPlace, str], Awaitable[None]]

# What goes before and how it ends, what is cut short, how that ends.
STORIES: dict[str, tuple[Act | None, Act | None, Act, Act]] = {
    "allocate": (None, None, allocate, is_allocated),
    "negotiate": (None, None, negotiate, is_bound),
    "delete": (allocate, is_allocated, delete, is_gone),
    "deallocate": (negotiate, is_bound, ask_back, is_free),
}


async def _clean(place: ClassicPlace, name: str) -> None:
    """Leave nothing for the next round."""
    for kind, object_name in (("pod", name), ("resourceclaim", name), ("resourceclaim", f"{name}-nic")):
        if place.versions(kind, object_name) and place.versions(kind, object_name)[-1] is not None:
            await place.delete(kind, object_name)
            await place.gone(kind, object_name)


async def _round(place: ClassicPlace, story: str, name: str, dies_at: int, *, is_after: bool) -> FatedBus:
    """Let one replica die at a step of the story, and another one end it."""
    before, is_ready, act, is_done = STORIES[story]
    if before is not None and is_ready is not None:
        async with controller(place.url):
            await before(place, name)
            await is_ready(place, name)
    async with controller(place.url, dies_at=dies_at, is_after=is_after) as mortal:
        await act(place, name)
        await died_or(is_done(place, name), mortal.fates)
    async with controller(place.url):
        await is_done(place, name)
        await place.check()
        await _clean(place, name)
    assert place.held("n1") == place.held("n2") == {}
    return mortal


@pytest.mark.law
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.timeout(300)
async def test_another_replica_goes_on_when_one_dies_at_any_step(place: ClassicPlace, story: str) -> None:
    """Before and after each write and each ask: the claim ends as if nobody had died, its devices
    are in one ledger once, and all is let go in the end.
    """
    whole = await _round(place, story, "whole", 0, is_after=False)
    assert any(step.operation == "ask" for step in whole.fates.steps)

    deaths = 0
    tried = steps(len(whole.fates.steps) + 1)
    for step in tried:
        for is_after in (False, True):
            mortal = await _round(place, story, f"s{step}-{'after' if is_after else 'before'}", step, is_after=is_after)
            deaths += mortal.fates.died.is_set()
            # A replica that lives came to its end in fewer steps.
            assert mortal.fates.died.is_set() or len(mortal.fates.steps) < step

    if isinstance(asyncio.get_running_loop(), VirtualTimeLoop):
        assert deaths == 2 * len(tried)
    # On a real server two changes may come as one, and a round then has a step less
    # than the one that was counted.
    assert deaths >= 0.8 * 2 * len(tried)


async def test_replicas_give_one_device_once_when_they_work_at_the_same_claims(place: ClassicPlace) -> None:
    """Three replicas see each claim at the same time.

    Every claim gets its device, and no two the same.
    """
    names = [f"c{index}" for index in range(8)]
    async with controller(place.url), controller(place.url), controller(place.url):
        await place.apply("".join(claim(name, "Immediate") for name in names))
        done = [await place.allocated(name) for name in names]
        given = [(node_of(api_object), device) for api_object in done for device in devices_of(api_object)]

        assert len(set(given)) == 8
        await place.check()
        await place.apply(claim("one-more", "Immediate"))
        await place.until_reason("one-more", "DoesNotFit")
        for name in names:
            await place.delete("resourceclaim", name)
        for name in names:
            await place.gone("resourceclaim", name)
        await place.allocated("one-more")
        await place.check()


def _structured(name: str, count: int) -> str:
    request = f"{{name: r, exactly: {{deviceClassName: gpu.topobus.dev, count: {count}}}}}"
    return (
        f"{{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {{name: {name}}}, spec: {{devices: "
        f"{{requests: [{request}]}}}}}}"
    )


async def _plug(place: ClassicPlace, node: str, uid: str) -> None:
    """Take a GPU as a device plugin's container does: past all claims, straight at the node's
    ledger.
    """
    owner = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid=uid)
    request = PodRequest(
        owner=owner,
        containers=(ContainerRequest(name="c", devices=(DeviceRequest(device_class="gpu", count=1),)),),
        policy=Policy.NONE,
    )
    await place.bus.ask(catalogue.PLACE, PlaceRequest(op_id=f"plug-{uid}", pod=request), node=node)


def _is_consistent(place: ClassicPlace) -> bool:
    """Say whether ledgers and claims tell the same, and nothing is under way."""
    newest = {
        change.parts["name"]: change.value
        for change in place.objects.items
        if change.parts.get("kind") == "resourceclaim"
    }
    given: dict[tuple[str, str], str] = {}
    for name, api_object in newest.items():
        if api_object is None:
            continue
        if (
            api_object.metadata.get("deletionTimestamp")
            or api_object.status.get("deallocationRequested")
            or not api_object.status.get("conditions")
        ):
            return False
        for result in ((as_structured(api_object).status.get("allocation") or {}).get("devices") or {}).get(
            "results"
        ) or []:
            assert (result["pool"], result["device"]) not in given
            given[result["pool"], result["device"]] = name
    held = {
        (node, device): owner.rpartition("/")[2]
        for node in place.nodes
        for owner, names in place.held(node).items()
        for device in names
        if owner.startswith("claim/")
    }
    return held == given


@pytest.mark.real_server
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.timeout(300)
async def test_nothing_is_given_twice_when_replicas_are_killed_while_claims_of_both_generations_come_and_go(
    place: ClassicPlace, seed: int
) -> None:
    """Two replicas as processes, one of them killed again and again.

    Classic claims, structured ones, pods and device plugins want the same eight GPUs.
    """
    random = Random(seed)
    settings = {
        "TOPOBUS_CONTROLLER__RETRY_S": "0.2",
        "TOPOBUS_CONTROLLER__ASK_TIMEOUT_S": "1",
        # The test itself answers for the device services; a busy machine
        # must not make them look silent.
        "TOPOBUS_CONTROLLER__SILENCE__HUNG_S": "3600",
        "TOPOBUS_CONTROLLER__SILENCE__GONE_S": "3600",
    }
    async with service("controller", place.url, settings) as steady:
        await steady.until_ready()
        for number in range(4):
            async with service("controller", place.url, settings) as doomed:
                await doomed.until_ready()
                before = len(place.objects.items)
                name = f"{seed}-{number}"
                await place.apply(claim(f"now-{name}", "Immediate"))
                await place.apply(_structured(f"new-{name}", random.choice([1, 2])))
                await place.apply(claim(f"later-{name}") + pod(f"pod-{name}", f"later-{name}"))
                await _plug(place, random.choice(["n1", "n2"]), name)
                for kind in ("now", "new", "pod"):
                    if number and random.random() < 0.6:
                        await place.delete(
                            "pod" if kind == "pod" else "resourceclaim", f"{kind}-{seed}-{random.randrange(number)}"
                        )
                wanted = before + random.randrange(4, 16)
                await place.objects.until(lambda items, wanted=wanted: len(items) >= wanted)  # type: ignore[misc]  # a default argument
                doomed.process.kill()
                assert await doomed.process.wait() == -signal.SIGKILL  # it worked until then
        await until(lambda: _is_consistent(place))
