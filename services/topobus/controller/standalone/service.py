"""The stand-alone controller: keeps a copy of the stored objects, allocates claims and plans pods.

Any number of replicas may run. Each plan goes to one of them (queue group). Claims are guarded by
compare-and-set and by operation ids at the nodes.
"""

from __future__ import annotations

import asyncio
import gc

from topobus.controller.bus_copies import BusCopies
from topobus.controller.classic.drivers import ClassicDriverRunner
from topobus.controller.classic.scheduler import ClassicScheduler
from topobus.controller.commit.allocator import Allocator
from topobus.controller.commit.commit_allocations import AllocationCommitter
from topobus.controller.commit.deallocate_claims import ClaimDeallocation
from topobus.controller.commit.decision_publisher import DecisionPublisher
from topobus.controller.commit.ledger_releases import LedgerReleases
from topobus.controller.commit.make_claims import ClaimTemplateReconciler
from topobus.controller.commit.node_ledgers import NodeLedgers
from topobus.controller.commit.replica_turns import ReplicaTurns
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.node_removal import NodeRemoval
from topobus.controller.planner import Planner
from topobus.controller.repairs import Repairs
from topobus.controller.standalone.allocate_claims import ClaimReconciler
from topobus.controller.standalone.binding_conditions import BindingConditions
from topobus.controller.standalone.claim_commits import ClaimCommits
from topobus.controller.standalone.claim_conditions import ClaimConditions
from topobus.controller.standalone.claim_queue import ClaimQueue
from topobus.controller.standalone.clean_up_pods import PodCleanup
from topobus.controller.standalone.commit_tasks import CommitTasks
from topobus.controller.standalone.evict_tainted import Evictor
from topobus.controller.standalone.node_filter import NodeFilter
from topobus.controller.standalone.pod_writes import PodWrites
from topobus.controller.standalone.release_orphans import OrphanedAllocations
from topobus.controller.standalone.schedule_pods import PodScheduler
from topobus.controller.standalone.scheduled_claims import ScheduledClaims
from topobus.controller.standalone.silent_services import SilentServices
from topobus.controller.standalone.validate_classes import ClassReconciler
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.nats_store import NatsStore, NatsWatch
from topobus.engine.cel.selector import CelCompiler
from topobus.process.clock import is_set_within
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.process.work_queue import WorkQueue

__all__ = ["serve"]


async def serve(settings: ControllerSettings, runtime: Runtime) -> None:
    """Serve until cancelled."""
    controller = _Controller(settings, runtime)
    await controller.run()


class _Controller:
    def __init__(self, settings: ControllerSettings, runtime: Runtime) -> None:
        self._settings = settings
        self._runtime = runtime
        self._state = StandaloneState()
        self._changed = asyncio.Event()
        self._beat = runtime.beats.loop("reconcile")
        self._queues: list[WorkQueue] = []
        metrics = ControllerMetrics(runtime.registry)
        self._metrics = metrics
        compiler = CelCompiler()
        self._releases = LedgerReleases(runtime.bus, settings.ask_timeout_s, self._wake)
        self._copies = BusCopies(runtime, self._state, self._queue("intake"), self._wake, metrics.remarked)
        self._classes = ClassReconciler(runtime, self._state, compiler, self._queue("classes"))
        allocator = Allocator(settings, runtime, self._state, compiler, metrics)
        ledgers = NodeLedgers(runtime.bus, self._state, settings.ask_timeout_s, self._releases)
        store = NatsStore(runtime.bus, self._state)
        deallocation = ClaimDeallocation(runtime.clock, self._state, store, ledgers, metrics)
        decisions = DecisionPublisher(runtime.bus, runtime.clock)
        committer = AllocationCommitter(runtime.clock, store, ledgers, decisions, metrics)
        conditions = ClaimConditions(runtime.clock, store, decisions, metrics)
        claim_queue = ClaimQueue(self._state, conditions, self._queue("claims"))
        self._commits = CommitTasks(settings.parallel_asks, self._changed.set)
        commits = ClaimCommits(
            self._state,
            store,
            allocator.refusals,
            conditions,
            committer,
            ReplicaTurns(runtime.clock, settings.retry_s),
            self._commits,
            claim_queue,
        )
        self._claims = ClaimReconciler(
            settings.claim_allocation,
            self._state,
            allocator,
            deallocation,
            conditions,
            commits,
            claim_queue,
        )
        self._evictor = Evictor(runtime, self._state, deallocation, self._queue("evictions"))
        self._binding = BindingConditions(
            settings.binding_timeout_s, runtime, self._state, allocator, deallocation, self._queue("binding")
        )
        self._pods = ClaimTemplateReconciler(runtime, self._state, self._queue("templates"))
        self._planner = Planner(settings, runtime, self._state, metrics, lambda: self._is_whole)
        self._removal = NodeRemoval(runtime.bus, runtime.clock)
        nodes = NodeFilter(settings, runtime, self._state, allocator, self._planner)
        self._classic = ClassicScheduler(runtime, self._state, nodes.nodes_without, self._queue("classic-pods"))
        pods = PodWrites(runtime.clock, store, decisions, metrics)
        self._scheduler = PodScheduler(
            self._state,
            nodes,
            ScheduledClaims(self._state, nodes, committer, conditions, deallocation, self._classic, pods),
            pods,
            PodCleanup(self._state, store, ledgers),
            self._binding,
            self._queue("pods"),
        )
        self._presence = SilentServices(
            settings.silence,
            settings.parallel_asks,
            runtime,
            self._state,
            self._wake,
            is_needed=self._state.has_waiting,
        )
        self._orphans = OrphanedAllocations(
            settings, runtime, self._state, allocator, metrics, ledgers, self._queue("orphans")
        )
        self._objects = NatsWatch(
            runtime.bus,
            self._state,
            runtime.clock,
            changed=self._on_objects,
            refused=metrics.count_refused,
            dropped=self._orphans.note,
            forgotten=self._orphans.clear_conclusions,
        )
        runtime.readiness.set("objects", is_ready=False, why=self._objects.trouble)
        self._drivers = ClassicDriverRunner(settings, runtime, self._state, metrics, lambda: self._is_whole)
        self._repairs = Repairs(runtime, self._state, settings, metrics, lambda: self._copies.is_whole)

    def _queue(self, loop: str) -> WorkQueue:
        """Make the queue of one loop. Each object that it runs counts as a step of the pass."""
        queue = WorkQueue(
            loop,
            self._runtime.clock,
            self._settings.retry_s,
            failures=self._metrics.set_aside,
            progress=self._beat.turn,
        )
        self._queues.append(queue)
        return queue

    async def run(self) -> None:
        """Follow all copies and reconcile their changes."""
        async with asyncio.TaskGroup() as group:
            self._copies.start(group)
            group.create_task(self._objects.run())
            group.create_task(self._releases.run())
            group.create_task(self._commits.run())
            group.create_task(self._reconcile())
            group.create_task(self._drivers.run())
            group.create_task(self._presence.run())
            group.create_task(self._repairs.run())

    def _wake(self) -> None:
        """Wake all loops."""
        self._changed.set()
        self._drivers.wake()
        self._repairs.wake()

    def _on_objects(self) -> None:
        """Wake all loops for changed objects, unless the copy is not complete yet."""
        self._runtime.readiness.set("objects", is_ready=self._objects.is_whole, why=self._objects.trouble)
        self._wake()

    @property
    def _is_whole(self) -> bool:
        """Say whether every copy is complete. Before that no claim is decided on and no pod is
        planned.
        """
        return self._copies.is_whole and self._objects.is_whole

    async def _reconcile(self) -> None:
        """Run a pass after each change, and when an object is due."""
        wait_s: float | None = None
        is_planning = False
        while True:
            self._beat.rest()
            await is_set_within(self._changed, self._runtime.clock.timeout(wait_s))
            self._beat.turn()
            self._changed.clear()
            if not self._is_whole:
                continue
            if not is_planning:
                await self._planner.begin()
                await self._removal.begin()
                is_planning = True
                # The copies of a fleet live as long as the process. Without this the garbage
                # collector would traverse them in each full collection, a second with 1,000 DGX.
                gc.freeze()
                get_logger().info("controller.ready", nodes=len(self._state.nodes()), objects=len(self._state.objects))
            await self._orphans.reconcile_all()
            await self._classes.reconcile_all()
            await self._evictor.reconcile_all()
            await self._binding.reconcile_all()
            await self._pods.reconcile_all()
            await self._classic.reconcile_all()
            await self._scheduler.reconcile_all()
            self._metrics.waiting.set(await self._claims.reconcile_all())
            # Behind all that is cheap, and a part of it a round: what is new meanwhile goes first.
            has_more = await self._scheduler.reconcile_costly()
            has_more = await self._claims.reconcile_costly() or has_more
            if has_more:
                self._changed.set()
            waits = [queue.wait_s() for queue in self._queues]
            wait_s = min((due_s for due_s in waits if due_s is not None), default=None)
