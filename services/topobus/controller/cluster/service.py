"""The controller in a cluster: keeps copies of the objects of the API server and of NATS, and
reconciles whenever one of them changed.

Any number of replicas may run, all of them active: every write is conditional on a version, the API
server orders allocation intents, and devices of Topobus nodes are reserved at the nodes. There is
no leader, so there is no election to wait for.
"""

from __future__ import annotations

import asyncio

from topobus.controller.bus_copies import BusCopies
from topobus.controller.cluster.allocated_condition import AllocatedCondition
from topobus.controller.cluster.allocation_intents import Intents
from topobus.controller.cluster.cluster_housekeeping import ClaimHousekeeping
from topobus.controller.cluster.gated_pod_queue import GatedPodQueue
from topobus.controller.cluster.node_choice import NodeChooser
from topobus.controller.cluster.open_gates import GatedPodReconciler
from topobus.controller.cluster.unschedulable_pods import UnschedulablePods
from topobus.controller.cluster_metrics import ClusterMetrics
from topobus.controller.commit.commit_allocations import AllocationCommitter
from topobus.controller.commit.deallocate_claims import ClusterDeallocation
from topobus.controller.commit.decision_publisher import DecisionPublisher
from topobus.controller.commit.ledger_releases import LedgerReleases
from topobus.controller.commit.node_ledgers import NodeLedgers
from topobus.controller.commit.replica_turns import ReplicaTurns
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.node_removal import NodeRemoval
from topobus.controller.planner import Planner
from topobus.controller.repairs import Repairs
from topobus.controller.state.cluster.api_server_state import ApiServerState
from topobus.controller.store.api import CLAIMS, WATCHED
from topobus.controller.store.api_server_store import ApiServerStore
from topobus.controller.store.cluster_events import EventRecorder
from topobus.controller.store.kubernetes_api import KubernetesApi
from topobus.engine.cel.selector import CelCompiler
from topobus.kubernetes.informers import Informer
from topobus.process.clock import is_set_within
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.process.work_queue import WorkQueue

__all__ = ["ClusterController", "serve_cluster"]

_LONGEST_PAUSE_S = 0.5


async def serve_cluster(settings: ControllerSettings, runtime: Runtime) -> None:
    """Serve until cancelled.

    Errors: raises ConfigError when the cluster cannot be reached with these settings at all.
    """
    api = KubernetesApi.open(settings.cluster)
    try:
        await ClusterController(settings, runtime, api).run()
    finally:
        await api.close()


class ClusterController:
    """One replica. Tests replace `api` by an API server that fails."""

    def __init__(self, settings: ControllerSettings, runtime: Runtime, api: KubernetesApi) -> None:
        self._settings = settings
        self._runtime = runtime
        self._state = ApiServerState()
        self._changed = asyncio.Event()
        self._queues: list[WorkQueue] = []
        self._is_ready = False
        metrics = ControllerMetrics(runtime.registry)
        self._set_aside = metrics.set_aside
        cluster = settings.cluster
        self._informers = {
            kind: Informer(
                api,
                kind,
                self._state,
                clock=runtime.clock,
                resync_s=cluster.resync_s,
                retry_s=cluster.retry_s,
                changed=self._changed.set,
                refused=metrics.count_refused,
            )
            for kind in WATCHED
        }
        compiler = CelCompiler()
        self._metrics = ClusterMetrics(runtime.registry)
        self._copies = BusCopies(runtime, self._state, self._queue("node-state"), self._wake, metrics.remarked)
        self._repairs = Repairs(runtime, self._state, settings, metrics, lambda: self._copies.is_whole)
        store = ApiServerStore(api, self._state, self._metrics)
        self._releases = LedgerReleases(runtime.bus, settings.ask_timeout_s, self._changed.set)
        ledgers = NodeLedgers(runtime.bus, self._state, settings.ask_timeout_s, self._releases)
        deallocation = ClusterDeallocation(self._state, store, ledgers, metrics)
        events = EventRecorder(api, runtime.clock, f"{runtime.name}-{runtime.node}")
        self._events = events
        self._told_foreign: dict[str, str] = {}
        condition = AllocatedCondition(runtime.clock, self._state, store, events)
        decisions = DecisionPublisher(runtime.bus, runtime.clock)
        intents = Intents(
            cluster,
            self._state,
            store,
            self._informers[CLAIMS],
            ledgers,
            NodeChooser(settings, self._state, runtime.clock, compiler, metrics),
            AllocationCommitter(runtime.clock, store, ledgers, decisions, metrics),
            ReplicaTurns(runtime.clock, cluster.retry_s),
        )
        self._gates = GatedPodReconciler(
            cluster,
            self._state,
            GatedPodQueue(runtime.clock, self._state, cluster.retry_s, metrics.set_aside),
            intents,
            deallocation,
            condition,
            metrics,
            self._changed.set,
        )
        self._unschedulable = UnschedulablePods(
            cluster, self._state, store, deallocation, condition, events, self._queue("deallocation")
        )
        self._housekeeping = ClaimHousekeeping(
            runtime.clock,
            self._state,
            store,
            deallocation,
            events,
            self._queue("housekeeping"),
            is_own=cluster.housekeeping == "own",
        )
        self._planner = Planner(settings, runtime, self._state, metrics, lambda: self._copies.is_whole)
        self._removal = NodeRemoval(runtime.bus, runtime.clock)
        runtime.readiness.set("cluster", is_ready=False, why="no snapshot yet")

    async def run(self) -> None:
        """Follow all copies and reconcile their changes."""
        async with asyncio.TaskGroup() as group:
            self._copies.start(group)
            group.create_task(self._releases.run())
            group.create_task(self._repairs.run())
            for informer in self._informers.values():
                group.create_task(informer.run())
            await self._reconcile(group)

    def _wake(self) -> None:
        """Wake the loops that read what nodes publish."""
        self._changed.set()
        self._repairs.wake()

    def _queue(self, loop: str) -> WorkQueue:
        queue = WorkQueue(loop, self._runtime.clock, self._settings.cluster.retry_s, failures=self._set_aside)
        self._queues.append(queue)
        return queue

    async def _reconcile(self, group: asyncio.TaskGroup) -> None:
        """Run a round after each change, and when something is due by time."""
        wait_s: float | None = None
        is_planning = False
        spent_s = 0.0
        while True:
            await is_set_within(self._changed, self._runtime.clock.timeout(wait_s))
            # A round costs as much as many pods wait. It takes at most half of the time, and a
            # burst of changes causes one round.
            await self._runtime.clock.sleep(min(spent_s, _LONGEST_PAUSE_S))
            started_s = self._runtime.clock.monotonic()
            self._changed.clear()
            self._report_readiness()
            if not self._copies.is_whole:
                continue
            if not is_planning:
                await self._planner.begin()
                await self._removal.begin()
                is_planning = True
            if not all(informer.is_whole for informer in self._informers.values()):
                continue
            await self._report_foreign_slices()
            gates_s = self._gates.start_all(group)
            await self._unschedulable.reconcile_all()
            await self._housekeeping.reconcile_all()
            dues = (
                gates_s,
                await self._events.write_counts(),
                *(queue.wait_s() for queue in self._queues),
            )
            wait_s = min((due_s for due_s in dues if due_s is not None), default=None)
            spent_s = self._runtime.clock.monotonic() - started_s

    async def _report_foreign_slices(self) -> None:
        """Report slices in our pools that our nodes did not publish, once each: in the log, and as
        an event on the node.
        """
        foreign = dict(self._state.foreign)
        self._metrics.foreign.set(len(foreign))
        for name, why in sorted(foreign.items()):
            if self._told_foreign.get(name) == why:
                continue
            get_logger().warning(
                "slice.foreign",
                slice=name,
                why=why,
                next_step=f"find out who made it: kubectl get resourceslice {name} -o yaml",
            )
            node = self._state.node_objects.get(self._state.pool_node(name))
            if node is not None:
                await self._events.warn(node, "ForeignResourceSlice", f"ResourceSlice {name} does not count: {why}")
        self._told_foreign = foreign

    def _report_readiness(self) -> None:
        """Update the readiness part: ready once all lists have arrived.

        Later trouble is only a remark, for the copies stay usable.
        """
        waiting = [kind.plural for kind, informer in self._informers.items() if not informer.is_whole]
        remarks = sorted({informer.trouble for informer in self._informers.values() if informer.trouble})
        remarks += [f"ResourceSlice {name} does not count: {why}" for name, why in sorted(self._told_foreign.items())]
        why = "; ".join([f"no list yet of {', '.join(waiting)}"] * bool(waiting) + remarks)
        self._runtime.readiness.set("cluster", is_ready=not waiting, why=why)
        for kind, informer in self._informers.items():
            self._metrics.troubled.labels(kind.name).set(bool(informer.trouble))
            self._metrics.objects.labels(kind.name).set(self._state.count(kind.name))
        if not waiting and not self._is_ready:
            self._is_ready = True
            get_logger().info(
                "controller.ready",
                nodes=len(self._state.node_facts),
                claims=len(self._state.claims),
                pods=len(self._state.pods),
            )
