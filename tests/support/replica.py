"""One replica of the stand-alone controller without its loop: tests show it objects, and run its
reconcilers round by round.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from support.alignment_nodes import dgx_facts
from support.controllers import NOW
from support.real_topology import WatchedTopology, real_topology
from topobus.bus.bus import Bus, Written
from topobus.controller.commit.allocator import Allocator
from topobus.controller.commit.commit_allocations import AllocationCommitter
from topobus.controller.commit.deallocate_claims import ClaimDeallocation
from topobus.controller.commit.decision_publisher import DecisionPublisher
from topobus.controller.commit.node_ledgers import NodeLedgers
from topobus.controller.commit.replica_turns import ReplicaTurns
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.standalone.allocate_claims import ClaimReconciler
from topobus.controller.standalone.claim_commits import ClaimCommits
from topobus.controller.standalone.claim_conditions import ClaimConditions
from topobus.controller.standalone.claim_queue import ClaimQueue
from topobus.controller.standalone.commit_tasks import CommitTasks
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.nats_store import NatsStore
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes import admit, object_parts, parse_manifest
from topobus.formats.messages.catalogue import OBJECT
from topobus.formats.messages.messages import ApiObject
from topobus.process.service import Runtime
from topobus.process.work_queue import WorkQueue

__all__ = ["claims_of", "queue_on", "read", "start_node", "store"]


async def start_node(bus: Bus, topologies: AsyncExitStack) -> tuple[WatchedTopology, StandaloneState]:
    """Run the topology service of a node of eight GPUs.

    Gives it with a replica's copy that knows the node.
    """
    machine, inventories = dgx_facts()
    topology = await topologies.enter_async_context(real_topology(bus, machine, [inventories["gpu"]]))
    state = StandaloneState()
    state.put_machine(machine)
    state.put_inventory(inventories["gpu"])
    return topology, state


def queue_on(runtime: Runtime) -> WorkQueue:
    """Give a queue for one of a replica's loops."""
    return WorkQueue("tested", runtime.clock, ControllerSettings().retry_s)


def claims_of(
    runtime: Runtime,
    state: StandaloneState,
    allocator: Allocator,
    metrics: ControllerMetrics,
    turns: ReplicaTurns | None = None,
    queue: WorkQueue | None = None,
) -> ClaimReconciler:
    """Give a replica's reconciler of claims, put together as the service does."""
    settings, clock = ControllerSettings(), runtime.clock
    objects = NatsStore(runtime.bus, state)
    ledgers = NodeLedgers(runtime.bus, state, settings.ask_timeout_s)
    decisions = DecisionPublisher(runtime.bus, clock)
    conditions = ClaimConditions(clock, objects, decisions, metrics)
    claim_queue = ClaimQueue(state, conditions, queue or queue_on(runtime))
    commits = ClaimCommits(
        state,
        objects,
        allocator.refusals,
        conditions,
        AllocationCommitter(clock, objects, ledgers, decisions, metrics),
        turns or ReplicaTurns(clock, settings.retry_s),
        CommitTasks(settings.parallel_asks),
        claim_queue,
    )
    deallocation = ClaimDeallocation(clock, state, objects, ledgers, metrics)
    return ClaimReconciler(settings.claim_allocation, state, allocator, deallocation, conditions, commits, claim_queue)


def read(manifest: str) -> ApiObject:
    """Read one object as the CLI admits it."""
    (api_object,) = parse_manifest(manifest, where="test.yaml")
    return admit(api_object, uid=f"uid-{api_object.metadata['name']}", now=NOW)


async def store(bus: Bus, state: StandaloneState, api_object: ApiObject) -> ObjectKey:
    """Store an object, and show it to a replica as its watch does."""
    key = ObjectKey(**object_parts(api_object))
    written = await bus.compare_and_set(OBJECT, api_object, 0, **key._asdict())
    assert isinstance(written, Written)
    state.put_object(key, Stored(written.revision, api_object))
    return key
