"""Schedules stored pods: chooses a node for each, allocates and reserves its claims, and reserves
its own devices and CPUs there.

The decisions are in `scheduling.decisions`. Order of writes: the pod's finalizer; an attempt in
each pending claim, which `ClaimReconciler` commits; the reservation in each claim; the node's
ledger for what the pod itself requests; the pod's node and condition. The objects show which of
these were done, so any replica continues with the next.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import partial

from topobus.controller.classic.scheduler import ClassicScheduler
from topobus.controller.commit.allocator import Allocator
from topobus.controller.commit.claim_users import ClaimUsers
from topobus.controller.commit.deallocate_claims import ClaimDeallocation
from topobus.controller.commit.decision_publisher import DecisionPublisher
from topobus.controller.commit.node_ledgers import NodeLedgers
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.planner import Planner
from topobus.controller.standalone.allocate_claims import ClaimReconciler
from topobus.controller.standalone.binding_conditions import BindingConditions
from topobus.controller.standalone.clean_up_pods import PodCleanup, own_request
from topobus.controller.standalone.node_filter import NodeFilter, is_held
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.nats_store import NatsStore
from topobus.controller.store.object_writer import ObjectWriter
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.claims.lifecycle import with_finalizer
from topobus.engine.claims.reservations import PodRef, with_node, with_pod_condition, with_retreat
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.scheduling.decisions import (
    Blocked,
    NodeFit,
    NodeMiss,
    PodPlan,
    TakeBack,
    explain_misses,
    post_filter,
    pre_filter,
)
from topobus.engine.scheduling.node_trials import refusal_of
from topobus.engine.scheduling.pod_alignment import with_claims
from topobus.formats.kubernetes.classic.classic import is_classic
from topobus.formats.kubernetes.objects import PLACEMENT_PROTECTION
from topobus.formats.messages import catalogue
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.process.work_queue import Again, Behind, Done, Result, WorkQueue
from topobus.values.errors import ContractError
from topobus.values.outcome import Placement, Reason, Refusal
from topobus.values.request import Owner, OwnerKind, PodRequest
from topobus.values.timestamps import rfc3339

__all__ = ["PodScheduler"]

# Steps of costly searches in one round, as for claims.
_ROUND_STEPS = 20_000


class PodScheduler:
    """Schedules pods, one at a time, oldest first."""

    def __init__(
        self,
        runtime: Runtime,
        state: StandaloneState,
        allocator: Allocator,
        consumers: ClaimUsers,
        claims: ClaimReconciler,
        deallocation: ClaimDeallocation,
        planner: Planner,
        nodes: NodeFilter,
        classic: ClassicScheduler,
        metrics: ControllerMetrics,
        binder: BindingConditions,
        ledgers: NodeLedgers,
        queue: WorkQueue,
    ) -> None:
        self._queue = queue
        self._binding = binder
        self._classic = classic
        self._runtime = runtime
        self._bus = runtime.bus
        self._state = state
        self._allocator = allocator
        self._consumers = consumers
        self._claims = claims
        self._deallocation = deallocation
        self._writer = ObjectWriter(NatsStore(runtime.bus, state))
        self._cleanup = PodCleanup(state, self._writer, ledgers)
        self._planner = planner
        self._metrics = metrics
        self._nodes = nodes
        self._decisions = DecisionPublisher(runtime.bus, runtime.clock)
        self._log = get_logger()

    async def reconcile_all(self) -> None:
        """Advance every pod as far as possible now."""
        self._nodes.refused.drop(self._is_done)
        looked_at: set[Hashable] = set()
        for key, stored in self._state.claims_with_gone_users():
            looked_at.add(("users", key))
            drop = partial(self._cleanup.drop_gone_users, key, stored)
            await self._queue.run(("users", key), stored.revision, drop, name=stored.shown)
        for key, _ in self._consumers.pods:
            looked_at.add(key)
            await self._bounded(key, is_cheap=True)
        self._queue.keep(looked_at)

    async def reconcile_costly(self) -> bool:
        """Search nodes for pods whose claims need more than a short search, within one round's
        budget.

        True when more of them are due at once.
        """
        spent = self._allocator.spent
        for key in self._queue.behind([key for key, _ in self._consumers.pods], self._read):
            if self._allocator.spent - spent > _ROUND_STEPS:
                return True
            await self._bounded(key, is_cheap=False)
        return False

    async def _bounded(self, key: ObjectKey, *, is_cheap: bool) -> None:
        """Advance one pod, so that its failure does not affect other pods."""
        pod = self._state.objects.get(key)
        if pod is not None:
            await self._queue.run(
                key,
                (pod.revision, self._world(key)),
                partial(self._reconcile, key, pod, is_cheap=is_cheap),
                name=pod.shown,
                report=partial(self._report, key, pod),
                narrow=(pod.revision,),
                is_costly=not is_cheap,
            )

    def _read(self, key: ObjectKey) -> Hashable:
        """Return the version of what a search for a pod's claims reads. While it is the same, the
        search has the same result.
        """
        return self._claim_revisions(key), self._freedoms()

    def _freedoms(self) -> Hashable:
        """Return the version of what may become free, and of what all claims refer to."""
        state = self._state
        return state.shared_epoch, state.class_epoch, tuple(state.freedom_of(node) for node in state.nodes())

    def _world(self, key: ObjectKey) -> Hashable:
        """Return the version of what a pod's next step depends on besides the pod: its claims, what
        they refer to, and the free devices.
        """
        return self._claim_revisions(key), self._state.shared_epoch, self._state.supply

    async def _report(self, key: ObjectKey, stored: Stored, reason: Reason) -> None:
        """Write into a pod's condition that it is set aside."""
        await self._report_waiting(key, stored, "Malformed", (reason,))

    def _is_done(self, key: Hashable) -> bool:
        stored = self._state.objects.get(key) if isinstance(key, ObjectKey) else None
        return stored is None or stored.pod.is_bound

    async def _reconcile(self, key: ObjectKey, stored: Stored, *, is_cheap: bool) -> Result:
        if not stored.uid:
            return None
        if stored.metadata.deletion_timestamp:
            await self._cleanup.finish(key, stored)
            return None
        if stored.pod.is_bound:
            await self._cleanup.leave_other_nodes(key, stored)
            return None
        try:
            return await self._schedule(key, stored, is_cheap=is_cheap)
        except ContractError as err:
            await self._report_waiting(key, stored, "Malformed", (Reason(code="malformed", message=err.message),))
            return None

    async def _schedule(self, key: ObjectKey, stored: Stored, *, is_cheap: bool) -> Result:
        pod = stored.value
        gates = pod.spec.get("schedulingGates")
        if isinstance(gates, list) and gates:
            names = ", ".join(str(gate.get("name")) if isinstance(gate, dict) else str(gate) for gate in gates)
            await self._report_waiting(
                key,
                stored,
                "SchedulingGated",
                (Reason(code="gated", message=f"waits behind scheduling gates: {names}"),),
            )
            return None
        waiting = self._classic.waits(key)
        if waiting:
            await self._report_waiting(key, stored, "Unschedulable", waiting)
            return None
        claims, world = self._claims_of(key), self._world(key)
        # An immediate claim that is still unallocated when its pod arrives is best allocated where
        # the pod fits.
        plan = pre_filter(
            stored.pod, lambda name: claims[name].structured if name in claims else None, waits_for_immediate=False
        )
        if isinstance(plan, Blocked):
            version = (stored.revision, world)
            if all(reason.code == "claim-taken-back" for reason in plan.reasons) and not self._queue.has_waited(
                key, version
            ):
                return Again(version=version)  # waits only until a node has released: too short to report
            reported = await self._report_waiting(key, stored, "Unschedulable", plan.reasons)
            return Done((reported.revision, world))
        wanted = with_claims(
            own_request(stored.pod),
            stored.pod,
            {pod_claim.entry: pod_claim.claim.owner.key for pod_claim in plan.allocated},
        )
        placed = self._nodes.node_of(wanted.owner) if wanted is not None else None
        if placed is not None and plan.is_reserved:
            return await self._bind(key, stored, placed)
        freedoms = self._freedoms()
        looked = await self._nodes.filter_nodes(key, plan, stored.pod, wanted, placed, is_cheap=is_cheap)
        if looked is None:
            return Behind(stored.revision)
        fits, misses, is_silent = looked
        if not fits:
            reported = await self._no_fit(key, stored, plan, misses)
            if is_silent:
                return Again(version=(reported.revision, world))
            excluded_s = min(
                self._nodes.refused.wait_s([key]), self._allocator.refusals.wait_s(self._claim_keys(key).values())
            )
            if excluded_s < math.inf:
                return Again(excluded_s, (reported.revision, world))
            # The claims' revisions are taken after their conditions were written. Those of the free
            # devices are taken before a long search, so that no device freed meanwhile is missed.
            return (
                Done((reported.revision, world))
                if is_cheap
                else Behind(reported.revision, (self._claim_revisions(key), freedoms))
            )
        return await self._take(key, stored, plan, fits, misses, wanted) or (Again() if is_silent else None)

    async def _take(
        self,
        key: ObjectKey,
        stored: Stored,
        plan: PodPlan,
        fits: Mapping[str, tuple[NodeFit, Placement | None]],
        misses: list[NodeMiss],
        wanted: PodRequest | None,
    ) -> Result:
        """Use the best node: allocate, or, when all claims are allocated, reserve, place and
        bind.
        """
        if plan.claims or wanted is not None:
            protected = await self._protect(key, stored)
            if protected is None:
                return None
            stored = protected
        if plan.pending:
            fit, _ = next(iter(fits.values()))
            await self._claims.committer.attempt(fit.node, self._nodes.members(plan), fit.results)
            return None
        if not await self._reserve(key, stored, plan):
            return None
        for node in fits:
            if wanted is None:
                return await self._bind(key, stored, node)
            answer = await self._place(stored, node, wanted)
            if answer is None:
                return Again()  # neither done nor undone: only that node knows
            if not isinstance(answer, Refusal):
                return await self._bind(key, stored, node)
            why = summarize(answer.reasons)
            self._log.info("pod.refused", pod=stored.shown, node=node, why=why)
            self._nodes.refused.add(key, [node], why)
            misses.append(refusal_of(node, answer))
        retreated = await self._retreat(key, stored)
        if retreated is None:
            return None
        await self._unreserve(plan.pod, key)
        await self._no_fit(key, retreated, plan, misses)
        return None

    async def _reserve(self, key: ObjectKey, stored: Stored, plan: PodPlan) -> bool:
        """Write the pod into each claim's reservedFor.

        False when a claim is full or another writer was first.
        """
        planned: list[tuple[ObjectKey, Stored]] = []
        for pod_claim in plan.claims:
            claim_key = ObjectKey("resourceclaim", key.namespace, pod_claim.name)
            claim = self._state.objects.get(claim_key)
            if claim is not None and is_classic(claim.value):
                continue  # reserved already, or the pod would still wait for it
            if claim is None or claim.value is not pod_claim.claim.object:
                return False
            planned.append((claim_key, claim))
        reserved = await self._claims.committer.reserve(plan.pod, planned)
        if isinstance(reserved, Reason):
            await self._unreserve(plan.pod, key)
            await self._report_waiting(key, stored, "Unschedulable", (reserved,))
            return False
        return reserved

    async def _unreserve(self, pod: PodRef, key: ObjectKey) -> None:
        claims = [
            (ObjectKey("resourceclaim", key.namespace, name), claim) for name, claim in self._claims_of(key).items()
        ]
        await self._claims.committer.unreserve(
            (pod.uid,), [(at, claim) for at, claim in claims if not is_classic(claim.value)]
        )

    async def _place(self, stored: Stored, node: str, wanted: PodRequest) -> Placement | Refusal | None:
        """Place what the pod itself requests in the node's ledger.

        None when the node does not answer.
        """
        ledger = self._state.ledgers.get(node)
        # A refusal raises the ledger's sequence, so a later try is another operation. After a crash
        # the same operation is repeated, or the ledger shows the pod.
        op_id = f"schedule-{wanted.owner.uid}-{stored.revision}-{ledger.sequence if ledger is not None else 0}"
        reply = await self._planner.ask_node(node, op_id, wanted, is_dry_run=False)
        if reply is None:
            return None
        if isinstance(reply.result, Refusal) and is_held(reply.result):
            entry = await self._bus.get(catalogue.LEDGER, node=node)
            if entry is not None and wanted.owner.key in entry.value.allocations:
                return Placement(containers=())
        return reply.result

    async def _no_fit(self, key: ObjectKey, stored: Stored, plan: PodPlan, misses: Sequence[NodeMiss]) -> Stored:
        """Take one allocation back where that may help.

        Otherwise write into the pod's and its claims' conditions why the pod waits. Returns the pod
        as it is then.
        """
        answer = post_filter(plan, misses)
        if isinstance(answer, TakeBack):
            claim_key = ObjectKey("resourceclaim", key.namespace, answer.claim.name)
            claim = self._state.objects.get(claim_key)
            if claim is not None and is_classic(claim.value):
                if await self._retreat(key, stored) is not None:
                    await self._classic.take_back(claim_key)
            elif claim is not None:
                # The mark comes first: both objects are in one stream, so a replica that has the
                # pod's next version has seen the mark. The reconciler of claims keeps others from
                # binding the pod.
                await self._deallocation.begin(claim_key, claim, answer.why)
            return stored
        condition, reasons = explain_misses(misses)
        reported = await self._report_waiting(key, stored, "Unschedulable", reasons)
        members = self._nodes.members(plan)
        nodes, outcomes = [miss.node for miss in misses], [miss.outcome for miss in misses]
        for pod_claim in plan.pending:
            claim_key = ObjectKey("resourceclaim", key.namespace, pod_claim.name)
            claim = self._state.objects.get(claim_key)
            if claim is not None:
                await self._claims.set_condition(
                    claim_key,
                    claim,
                    condition,
                    reasons,
                    lambda: self._allocator.advise_members(nodes, outcomes, members),
                )
        return reported

    async def _retreat(self, key: ObjectKey, stored: Stored) -> Stored | None:
        """Make sure that no other replica binds the pod to the devices that it is about to lose.

        None when the pod was bound or changed meanwhile.
        """
        return await self._writer.write(key, stored.revision, with_retreat(stored.value))

    async def _bind(self, key: ObjectKey, stored: Stored, node: str) -> Result:
        unready = self._binding.wait_for(tuple(self._claim_keys(key).values()))
        if unready is not None:
            await self._report_waiting(key, stored, "WaitsForBinding", (unready,))
            return Again()
        if await self._writer.write(key, stored.revision, with_node(stored.value, node, now=self._now())) is not None:
            self._metrics.pods.labels("scheduled").inc()
            self._log.info("pod.scheduled", pod=stored.shown, node=node)
        return None

    async def _protect(self, key: ObjectKey, stored: Stored) -> Stored | None:
        protected = with_finalizer(stored.value, PLACEMENT_PROTECTION)
        return stored if protected is stored.value else await self._writer.write(key, stored.revision, protected)

    async def _report_waiting(self, key: ObjectKey, stored: Stored, reason: str, reasons: Sequence[Reason]) -> Stored:
        """Write the reasons into the pod's condition and into an event, once.

        Returns the pod with them, or as it was when another writer was first.
        """
        message = "; ".join(each_reason.message for each_reason in reasons)
        api_object = with_pod_condition(stored.value, is_true=False, reason=reason, message=message, now=self._now())
        if api_object.status == stored.value.status:
            return stored
        written = await self._writer.write(key, stored.revision, api_object)
        if written is None:
            return stored
        self._metrics.pods.labels("waiting").inc()
        self._log.info("pod.waiting", pod=stored.shown, reason=reason, why=message)
        metadata = stored.metadata
        op_id = f"schedule-{metadata.uid}-{written.revision}"
        owner = Owner(kind=OwnerKind.POD, namespace=key.namespace, name=key.name, uid=metadata.uid)
        await self._decisions.publish("schedule", owner, Refusal(reasons=tuple(reasons)), op_id=op_id)
        return written

    def _claim_keys(self, key: ObjectKey) -> dict[str, ObjectKey]:
        return {name: ObjectKey("resourceclaim", key.namespace, name) for name in self._consumers.claims(key)}

    def _claims_of(self, key: ObjectKey) -> dict[str, Stored]:
        """Map the stored claims of a pod by name."""
        objects = self._state.objects
        return {name: objects[claim_key] for name, claim_key in self._claim_keys(key).items() if claim_key in objects}

    def _claim_revisions(self, key: ObjectKey) -> tuple[int, ...]:
        """Return the revisions of a pod's claims."""
        objects = self._state.objects
        return tuple(
            objects[claim_key].revision if claim_key in objects else 0 for claim_key in self._claim_keys(key).values()
        )

    def _now(self) -> str:
        return rfc3339(self._runtime.clock.now())
