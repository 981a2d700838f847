"""Two replicas at the same objects: what one does between another's look and its write is never undone, on a real server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from support.alignment_nodes import dgx_facts
from support.small_topology import SmallTopology
from topobus.contracts.catalogue import INVENTORY, MACHINE, OBJECT, PLACE
from topobus.contracts.kubernetes import admit, ask_deletion, object_parts, parse_manifest
from topobus.contracts.kubernetes.objects import DELETE_PROTECTION
from topobus.contracts.kubernetes.resource import AllocationResult, DevicesAllocated, GrantedDevice
from topobus.contracts.messages import ApiObject, PlaceRequest
from topobus.controller.cel import CelCompiler
from topobus.controller.config import ControllerSettings
from topobus.controller.consumers import Consumers
from topobus.controller.core import claims
from topobus.controller.core.claims import Attempt
from topobus.controller.core.pods import claim_from_template, wanted_claims
from topobus.controller.core.scheduling_objects import with_finalizer
from topobus.controller.core.world import ObjectKey, Stored, World
from topobus.controller.evictor import Evictor
from topobus.controller.finding import Finder
from topobus.controller.keeper import ClaimKeeper
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.pen import Pen
from topobus.controller.podkeeper import PodKeeper
from topobus.domain.outcome import Placement, Reason
from topobus.runtime.bus import Bus, Written
from topobus.runtime.clock import SystemClock
from topobus.runtime.readiness import Readiness
from topobus.runtime.service import Runtime

pytestmark = pytest.mark.integration

NOW = "2026-01-01T00:00:00Z"
TEMPLATE = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: one-gpu}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.topobus.dev}}]}}}
"""
POD = """
apiVersion: v1
kind: Pod
metadata: {name: NAME}
spec:
  containers: [{name: main}]
  resourceClaims: [{name: made, resourceClaimTemplateName: one-gpu}]
"""


class InterruptedBus:
    """A real bus; something else happens while the first write is under way."""

    def __init__(self, bus: Bus, meanwhile: Callable[[], Awaitable[None]]) -> None:
        self._bus = bus
        self._meanwhile: Callable[[], Awaitable[None]] | None = meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def compare_and_set(self, *arguments: Any, **parts: Any) -> Any:
        """Write; what happens meanwhile happens before it is known to be done."""
        done = await self._bus.compare_and_set(*arguments, **parts)
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return done


def runtime_on(bus: Any) -> Runtime:
    """Give a replica's runtime on a bus."""
    return Runtime(name="controller", node="central", bus=bus, clock=SystemClock(), readiness=Readiness(), registry=CollectorRegistry())


def read(manifest: str) -> ApiObject:
    """Read one object as the CLI admits it."""
    (one,) = parse_manifest(manifest, where="test.yaml")
    return admit(one, uid=f"uid-{one.metadata['name']}", now=NOW)


async def store(bus: Bus, world: World, one: ApiObject) -> ObjectKey:
    """Store an object, and show it to a replica as its watch does."""
    key = ObjectKey(**object_parts(one))
    written = await bus.compare_and_set(OBJECT, one, 0, **key._asdict())
    assert isinstance(written, Written)
    world.put_object(key, Stored(written.revision, one))
    return key


async def test_claims_of_a_new_pod_stay_when_it_comes_while_other_pods_are_worked_on(bus: Bus) -> None:
    """A pod and its claim, made by another replica, arrive in the middle of a round: the claim is not taken for one of a pod that is gone."""
    world = World()
    template = read(TEMPLATE)
    await store(bus, world, template)
    await store(bus, world, read(POD.replace("NAME", "first")))
    second = read(POD.replace("NAME", "second"))
    (wanted,) = wanted_claims(second)
    made: list[ObjectKey] = []

    async def arrive() -> None:
        await store(bus, world, second)
        made.append(await store(bus, world, claim_from_template(second, wanted, template, now=NOW)))

    interrupted: Any = InterruptedBus(bus, arrive)
    await PodKeeper(runtime_on(interrupted), world).reconcile_all()

    entry = await bus.get(OBJECT, **made[0]._asdict())
    assert entry is not None
    assert "deletionTimestamp" not in entry.value.metadata


async def test_claim_stays_when_another_replica_protected_it_before_it_is_ended(bus: Bus) -> None:
    """The pod is gone and the claim looks free, but another replica has just written its attempt: the claim is not removed past the finalizer."""
    world = World()
    pod = read(POD.replace("NAME", "gone"))
    (wanted,) = wanted_claims(pod)
    claim = claim_from_template(pod, wanted, read(TEMPLATE), now=NOW)
    key = await store(bus, world, claim)
    protected = with_finalizer(claim, DELETE_PROTECTION)
    await bus.compare_and_set(OBJECT, protected, world.objects[key].revision, **key._asdict())

    await PodKeeper(runtime_on(bus), world).reconcile_all()

    entry = await bus.get(OBJECT, **key._asdict())
    assert entry is not None
    assert entry.value == protected


async def test_new_object_stays_when_a_replica_deletes_the_old_one_of_its_name(bus: Bus) -> None:
    """Two replicas end a pod, its user makes it anew after the first: the second one's deletion takes nothing away."""
    world = World()
    old = ask_deletion(with_finalizer(read(POD.replace("NAME", "again")), DELETE_PROTECTION), now=NOW)
    assert old is not None
    key = await store(bus, world, old)
    seen = world.objects[key].revision
    assert await Pen(bus, world).erase(key, seen)
    fresh = await store(bus, World(), read(POD.replace("NAME", "again")))

    assert not await Pen(bus, world).erase(key, seen)

    entry = await bus.get(OBJECT, **fresh._asdict())
    assert entry is not None
    assert "deletionTimestamp" not in entry.value.metadata


CLAIM = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: contested}
spec: {devices: {requests: [{name: r, exactly: {deviceClassName: gpu.topobus.dev}}]}}
"""


async def test_later_attempt_keeps_its_devices_when_a_replica_commits_an_older_one(bus: Bus) -> None:
    """A slow replica still has attempt 1 in its hands when another one has placed attempt 2: what that holds is not let go as left over."""
    machine, inventories = dgx_facts()
    node, gpus = machine.node, inventories["gpu"]
    await bus.put(MACHINE, machine, node=node)
    await bus.put(INVENTORY, gpus, node=node, device_class="gpu")
    topology = SmallTopology(bus, machine, [gpus])
    await topology.start()
    world = World()
    world.put_machine(machine)
    world.put_inventory(gpus)
    world.put_ledger(topology.ledger)

    def attempt(number: int) -> Attempt:
        granted = GrantedDevice(request="r", driver="gpu.topobus.dev", pool=node, device=gpus.devices[number].name)
        return Attempt(number=number, node=node, allocation=AllocationResult(devices=DevicesAllocated(results=(granted,))))

    first = claims.with_attempt(read(CLAIM), attempt(1))
    key = await store(bus, world, first)
    second = claims.with_attempt(claims.without_attempt(first), attempt(2))
    request = claims.placement_request(second, attempt(2).allocation, node)
    assert request is not None
    written = await bus.compare_and_set(OBJECT, second, world.objects[key].revision, **key._asdict())
    assert isinstance(written, Written)
    reply = await bus.ask(PLACE, PlaceRequest(op_id=f"allocate-{request.owner.uid}-2", pod=request), node=node)
    assert isinstance(reply.result, Placement)
    done = claims.with_allocation(second, attempt(2).allocation, now=NOW)
    await bus.compare_and_set(OBJECT, done, written.revision, **key._asdict())

    runtime, settings = runtime_on(bus), ControllerSettings()
    metrics, compiler = ControllerMetrics(runtime.registry), CelCompiler()
    finder = Finder(settings, runtime, world, compiler, metrics)
    await ClaimKeeper(settings, runtime, world, finder, Consumers(world), metrics).reconcile_all()

    assert [one.holdings[0].devices for one in topology.ledger.allocations.values()] == [{"gpu": (gpus.devices[2].name,)}]
    entry = await bus.get(OBJECT, **key._asdict())
    assert entry is not None
    assert entry.value == done


async def test_evicted_pod_that_its_user_made_anew_stays(bus: Bus) -> None:
    """A pod that nothing holds is deleted as it was evicted: one of its name that its user makes in that moment stays."""
    world = World()
    key = await store(bus, world, read(POD.replace("NAME", "victim")))
    fresh = msgspec.structs.replace(
        read(POD.replace("NAME", "victim")), metadata={"name": "victim", "namespace": "default", "uid": "uid-fresh"}
    )

    async def make_anew() -> None:
        await bus.delete(OBJECT, **key._asdict())
        await bus.compare_and_set(OBJECT, fresh, 0, **key._asdict())

    interrupted: Any = InterruptedBus(bus, make_anew)
    nobody: Any = None
    evictor = Evictor(runtime_on(interrupted), world, nobody)
    await evictor._mark_pod(key, "uid-victim", Reason(code="evicted", message="hot"))

    entry = await bus.get(OBJECT, **key._asdict())
    assert entry is not None
    assert entry.value == fresh
