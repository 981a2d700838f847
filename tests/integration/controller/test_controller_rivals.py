"""Two replicas at the same objects: what one does between another's look and its write is never
undone, on a real server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from lab.memory_nats.fates import FatedBus, Fates, Interrupted
from support.alignment_nodes import dgx_facts
from support.controllers import NOW, runtime_on
from support.real_topology import WatchedTopology, real_topology
from support.replica import claims_of, queue_on, read, start_node, store
from topobus.bus.bus import Bus, Written
from topobus.controller.commit.allocator import Allocator
from topobus.controller.commit.make_claims import ClaimTemplateReconciler
from topobus.controller.commit.node_ledgers import NodeLedgers
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.standalone.clean_up_pods import PodCleanup
from topobus.controller.standalone.evict_tainted import Evictor
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.nats_store import NatsStore
from topobus.engine.cel.selector import CelCompiler
from topobus.engine.claims import attempts, lifecycle
from topobus.engine.claims.attempts import Attempt
from topobus.engine.claims.lifecycle import with_finalizer
from topobus.engine.claims.objects import Claim
from topobus.engine.claims.reservations import with_node
from topobus.engine.claims.stored import ObjectKey
from topobus.engine.claims.templates import claim_from_template, wanted_claims
from topobus.formats.kubernetes import (
    ask_deletion,
)
from topobus.formats.kubernetes.objects import DELETE_PROTECTION
from topobus.formats.kubernetes.resource import AllocationResult, DevicesAllocated, GrantedDevice
from topobus.formats.messages.catalogue import OBJECT, PLACE
from topobus.formats.messages.messages import ApiObject, PlaceRequest
from topobus.values.errors import ContractError
from topobus.values.outcome import Placement, Reason
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

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


def interrupted_bus(bus: Bus, meanwhile: Callable[[], Awaitable[None]]) -> FatedBus:
    """Give a bus on which something else happens while the first write is under way, before it is
    known to be done.
    """
    return FatedBus(bus, Fates({1: Interrupted(meanwhile)}, counted=frozenset({"compare_and_set"})))


async def test_claims_of_a_new_pod_stay_when_it_comes_while_other_pods_are_worked_on(bus: Bus) -> None:
    """A pod and its claim, made by another replica, arrive in the middle of a round: the claim is
    not taken for one of a pod that is gone.
    """
    state = StandaloneState()
    template = read(TEMPLATE)
    await store(bus, state, template)
    await store(bus, state, read(POD.replace("NAME", "first")))
    second = read(POD.replace("NAME", "second"))
    (wanted,) = wanted_claims(second)
    made: list[ObjectKey] = []

    async def arrive() -> None:
        await store(bus, state, second)
        made.append(await store(bus, state, claim_from_template(second, wanted, template, now=NOW)))

    interrupted = interrupted_bus(bus, arrive)
    await ClaimTemplateReconciler(runtime_on(interrupted), state, queue_on(runtime_on(interrupted))).reconcile_all()

    entry = await bus.get(OBJECT, **made[0]._asdict())
    assert entry is not None
    assert "deletionTimestamp" not in entry.value.metadata


async def test_claim_stays_when_another_replica_protected_it_before_it_is_ended(bus: Bus) -> None:
    """The pod is gone and the claim looks free, but another replica has just written its attempt:
    the claim is not removed past the finalizer.
    """
    state = StandaloneState()
    pod = read(POD.replace("NAME", "gone"))
    (wanted,) = wanted_claims(pod)
    claim = claim_from_template(pod, wanted, read(TEMPLATE), now=NOW)
    key = await store(bus, state, claim)
    protected = with_finalizer(claim, DELETE_PROTECTION)
    await bus.compare_and_set(OBJECT, protected, state.objects[key].revision, **key._asdict())

    await ClaimTemplateReconciler(runtime_on(bus), state, queue_on(runtime_on(bus))).reconcile_all()

    entry = await bus.get(OBJECT, **key._asdict())
    assert entry is not None
    assert entry.value == protected


async def test_new_object_stays_when_a_replica_deletes_the_old_one_of_its_name(bus: Bus) -> None:
    """Two replicas end a pod, its user makes it anew after the first: the second one's deletion
    takes nothing away.
    """
    state = StandaloneState()
    old = ask_deletion(with_finalizer(read(POD.replace("NAME", "again")), DELETE_PROTECTION), now=NOW)
    assert old is not None
    key = await store(bus, state, old)
    seen = state.objects[key].revision
    assert await NatsStore(bus, state).delete(key, seen)
    fresh = await store(bus, StandaloneState(), read(POD.replace("NAME", "again")))

    assert not await NatsStore(bus, state).delete(key, seen)

    entry = await bus.get(OBJECT, **fresh._asdict())
    assert entry is not None
    assert "deletionTimestamp" not in entry.value.metadata


CLAIM = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: contested}
spec: {devices: {requests: [{name: r, exactly: {deviceClassName: gpu.topobus.dev}}]}}
"""


async def test_later_attempt_keeps_its_devices_when_a_replica_commits_an_older_one(
    bus: Bus, topologies: AsyncExitStack
) -> None:
    """A slow replica still has attempt 1 in its hands when another one has placed attempt 2: what
    that holds is not let go as left over.
    """
    machine, inventories = dgx_facts()
    node, gpus = machine.node, inventories["gpu"]
    topology = await topologies.enter_async_context(real_topology(bus, machine, [gpus]))
    state = StandaloneState()
    state.put_machine(machine)
    state.put_inventory(gpus)
    state.put_ledger(topology.ledger)

    def attempt(number: int) -> Attempt:
        granted = GrantedDevice(request="r", driver="topobus.dev", pool=node, device=gpus.devices[number].name)
        return Attempt(
            number=number, node=node, allocation=AllocationResult(devices=DevicesAllocated(results=(granted,)))
        )

    first = attempts.with_attempt(read(CLAIM), attempt(1))
    key = await store(bus, state, first)
    second = attempts.with_attempt(attempts.without_attempt(first), attempt(2))
    request = lifecycle.placement_request(second, attempt(2).allocation, node)
    assert request is not None
    written = await bus.compare_and_set(OBJECT, second, state.objects[key].revision, **key._asdict())
    assert isinstance(written, Written)
    reply = await bus.ask(PLACE, PlaceRequest(op_id=f"allocate-{request.owner.uid}-2", pod=request), node=node)
    assert isinstance(reply.result, Placement)
    done = lifecycle.with_allocation(second, attempt(2).allocation, now=NOW)
    await bus.compare_and_set(OBJECT, done, written.revision, **key._asdict())

    runtime, settings = runtime_on(bus), ControllerSettings()
    metrics, compiler = ControllerMetrics(runtime.registry), CelCompiler()
    allocator = Allocator(settings, runtime, state, compiler, metrics)
    await claims_of(runtime, state, allocator, metrics).reconcile_all()

    assert [allocation.holdings[0].devices for allocation in topology.ledger.allocations.values()] == [
        {"gpu": (gpus.devices[2].name,)}
    ]
    entry = await bus.get(OBJECT, **key._asdict())
    assert entry is not None
    assert entry.value == done


async def test_evicted_pod_that_its_user_made_anew_stays(bus: Bus) -> None:
    """A pod that nothing holds is deleted as it was evicted: one of its name that its user makes in
    that moment stays.
    """
    state = StandaloneState()
    key = await store(bus, state, read(POD.replace("NAME", "victim")))
    fresh = msgspec.structs.replace(
        read(POD.replace("NAME", "victim")), metadata={"name": "victim", "namespace": "default", "uid": "uid-fresh"}
    )

    async def make_anew() -> None:
        await bus.delete(OBJECT, **key._asdict())
        await bus.compare_and_set(OBJECT, fresh, 0, **key._asdict())

    interrupted = interrupted_bus(bus, make_anew)
    nobody: Any = None
    evictor = Evictor(runtime_on(interrupted), state, nobody, queue_on(runtime_on(interrupted)))
    await evictor._mark_pod(key, "uid-victim", Reason(code="evicted", message="hot"))

    entry = await bus.get(OBJECT, **key._asdict())
    assert entry is not None
    assert entry.value == fresh


class OneNode:
    """A node of eight GPUs with its topology, one replica's copy of the world, and its keeper of
    claims.
    """

    def __init__(self, bus: Bus, topology: WatchedTopology, state: StandaloneState) -> None:
        self.bus = bus
        self.topology = topology
        self.state = state

    @classmethod
    async def start(cls, bus: Bus, topologies: AsyncExitStack) -> OneNode:
        """Publish the node and run its topology service."""
        topology, state = await start_node(bus, topologies)
        return cls(bus, topology, state)

    def granted(self) -> Attempt:
        """An attempt at the node's first GPU."""
        granted = GrantedDevice(request="r", driver="topobus.dev", pool="demo-node", device="gpu-0")
        return Attempt(
            number=1, node="demo-node", allocation=AllocationResult(devices=DevicesAllocated(results=(granted,)))
        )

    async def place(self, claim: ApiObject) -> None:
        """Have the node hold the attempt's GPU for a claim, and show the replica the ledger."""
        request = lifecycle.placement_request(claim, self.granted().allocation, "demo-node")
        assert request is not None
        reply = await self.bus.ask(
            PLACE, PlaceRequest(op_id=f"allocate-{request.owner.uid}-1", pod=request), node="demo-node"
        )
        assert isinstance(reply.result, Placement)
        self.state.put_ledger(self.topology.ledger)

    async def reconcile(self) -> None:
        """Run one round of the keeper of claims."""
        runtime, settings = runtime_on(self.bus), ControllerSettings()
        metrics = ControllerMetrics(runtime.registry)
        allocator = Allocator(settings, runtime, self.state, CelCompiler(), metrics)
        await claims_of(runtime, self.state, allocator, metrics).reconcile_all()

    async def taken_back(self, *, node_name: str) -> tuple[ObjectKey, ObjectKey]:
        """Store a pod and its allocated claim, which is marked to be taken back."""
        pod = read(POD.replace("NAME", "user"))
        pod_key = await store(self.bus, self.state, with_node(pod, node_name, now=NOW) if node_name else pod)
        allocated = lifecycle.with_allocation(
            attempts.with_attempt(read(CLAIM), self.granted()), self.granted().allocation, now=NOW
        )
        user = {"resource": "pods", "name": "user", "uid": "uid-user"}
        reserved = msgspec.structs.replace(allocated, status={**allocated.status, "reservedFor": [user]})
        await self.place(reserved)
        return await store(
            self.bus, self.state, lifecycle.with_deallocation(reserved, why="it fits on no node")
        ), pod_key


async def test_claim_is_kept_when_its_pod_was_bound_before_it_could_be_taken_back(
    bus: Bus, topologies: AsyncExitStack
) -> None:
    """A replica bound the pod while another marked its claim: the mark is taken off, and the node
    keeps the devices.
    """
    node = await OneNode.start(bus, topologies)
    key, _ = await node.taken_back(node_name="demo-node")

    await node.reconcile()

    entry = await bus.get(OBJECT, **key._asdict())
    assert entry is not None
    assert Claim(entry.value).deallocation == ""
    assert entry.value.status["allocation"]
    assert list(node.topology.ledger.allocations) == [lifecycle.owner_of(entry.value).key]


async def test_stale_replica_cannot_bind_a_pod_whose_claim_is_taken_back(bus: Bus, topologies: AsyncExitStack) -> None:
    """Whoever read the pod before its claim was marked loses the write that would bind it, also
    when the replica that marked the claim died at once.
    """
    node = await OneNode.start(bus, topologies)
    key, pod_key = await node.taken_back(node_name="")
    stale = node.state.objects[pod_key]

    await node.reconcile()

    bound = with_node(stale.value, "demo-node", now=NOW)
    assert not isinstance(await bus.compare_and_set(OBJECT, bound, stale.revision, **pod_key._asdict()), Written)
    entry = await bus.get(OBJECT, **key._asdict())
    assert entry is not None
    assert "allocation" not in entry.value.status
    assert node.topology.ledger.allocations == {}


async def test_delayed_claim_lets_go_of_a_placement_that_came_after_its_attempt_was_dropped(
    bus: Bus, topologies: AsyncExitStack
) -> None:
    """No pod waits for the claim and it has no attempt: what a node placed for it late goes back to
    everybody.
    """
    node = await OneNode.start(bus, topologies)
    delayed = read(CLAIM)
    noted = {**delayed.metadata, "annotations": {"topobus.dev/allocation-mode": "WaitForFirstConsumer"}}
    claim = msgspec.structs.replace(delayed, metadata=noted)
    await store(bus, node.state, claim)
    await node.place(attempts.with_attempt(claim, node.granted()))
    assert len(node.topology.ledger.allocations) == 1

    await node.reconcile()

    assert node.topology.ledger.allocations == {}


@pytest.mark.parametrize(("bound", "held"), [("elsewhere", 0), ("demo-node", 1)])
async def test_pod_that_is_bound_elsewhere_holds_nothing_here(
    bus: Bus, topologies: AsyncExitStack, bound: str, held: int
) -> None:
    """A pod's node never changes, so what another node's ledger has for it is let go.

    At its own node it keeps what it has.
    """
    node = await OneNode.start(bus, topologies)
    key = await store(bus, node.state, with_node(read(POD.replace("NAME", "user")), bound, now=NOW))
    owner = Owner(kind=OwnerKind.POD, name="user", uid="uid-user")
    asked = PodRequest(
        owner=owner, containers=(ContainerRequest(name="main", devices=(DeviceRequest(device_class="gpu", count=1),)),)
    )
    await bus.ask(PLACE, PlaceRequest(op_id="schedule-1", pod=asked), node="demo-node")
    node.state.put_ledger(node.topology.ledger)

    ledgers = NodeLedgers(bus, node.state, ControllerSettings().ask_timeout_s)
    leaver = PodCleanup(node.state, NatsStore(bus, node.state), ledgers)
    await leaver.leave_other_nodes(key, node.state.objects[key])

    assert len(node.topology.ledger.allocations) == held


async def test_claim_says_that_its_node_failed_when_the_node_answers_what_nobody_can_read(bus: Bus) -> None:
    """The attempt stays, for it may be done.

    Whoever waits for the claim reads in it why nothing goes on.
    """
    machine, inventories = dgx_facts()
    state = StandaloneState()
    state.put_machine(machine)
    state.put_inventory(inventories["gpu"])
    granted = GrantedDevice(
        request="r", driver="topobus.dev", pool=machine.node, device=inventories["gpu"].devices[0].name
    )
    attempt = Attempt(
        number=1, node=machine.node, allocation=AllocationResult(devices=DevicesAllocated(results=(granted,)))
    )
    key = await store(bus, state, attempts.with_attempt(read(CLAIM), attempt))

    async def fail(_request: PlaceRequest, *_: Any) -> Any:
        raise ContractError("the ledger of this node is malformed")

    await bus.answer(PLACE, fail, node=machine.node)
    runtime = runtime_on(bus)
    metrics = ControllerMetrics(runtime.registry)
    allocator = Allocator(ControllerSettings(), runtime, state, CelCompiler(), metrics)
    queue = queue_on(runtime)
    await claims_of(runtime, state, allocator, metrics, queue=queue).reconcile_all()

    entry = await bus.get(OBJECT, **key._asdict())
    assert queue.wait_s() is not None
    assert entry is not None
    assert attempts.attempt_of(entry.value) == attempt
    assert [condition["reason"] for condition in entry.value.status["conditions"]] == ["NodeFailed"]
