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

from topobus.controller.standalone.binding_conditions import BindingConditions
from topobus.controller.standalone.clean_up_pods import PodCleanup
from topobus.controller.standalone.node_filter import NodeFilter
from topobus.controller.standalone.pod_writes import PodWrites
from topobus.controller.standalone.scheduled_claims import ScheduledClaims
from topobus.controller.state.standalone_state import StandaloneState
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
from topobus.engine.scheduling.pod_alignment import own_request, with_claims
from topobus.process.work_queue import Again, Behind, Done, Result, WorkQueue
from topobus.values.errors import ContractError
from topobus.values.outcome import Placement, Reason, Refusal
from topobus.values.request import PodRequest

__all__ = ["PodScheduler"]

# Steps of costly searches in one round, as for claims.
_ROUND_STEPS = 20_000


class PodScheduler:
    """Schedules pods, one at a time, oldest first."""

    def __init__(
        self,
        state: StandaloneState,
        nodes: NodeFilter,
        claims: ScheduledClaims,
        pods: PodWrites,
        cleanup: PodCleanup,
        binding: BindingConditions,
        queue: WorkQueue,
    ) -> None:
        self._state = state
        self._nodes = nodes
        self._claims = claims
        self._pods = pods
        self._cleanup = cleanup
        self._binding = binding
        self._queue = queue

    async def reconcile_all(self) -> None:
        """Advance every pod as far as it goes now."""
        self._nodes.drop_refusals(self._is_done)
        looked_at: set[Hashable] = set()
        for key, stored in self._state.claims_with_gone_users():
            looked_at.add(("users", key))
            drop = partial(self._cleanup.drop_gone_users, key, stored)
            await self._queue.run(("users", key), stored.revision, drop, name=stored.shown)
        for key in self._state.users.pods():
            looked_at.add(key)
            await self._bounded(key, is_cheap=True)
        self._queue.keep(looked_at)

    async def reconcile_costly(self) -> bool:
        """Search nodes for pods whose claims need more than a short search, within one round's
        budget.

        True when more of them are due at once.
        """
        spent = self._nodes.spent
        for key in self._queue.behind(self._state.users.pods(), self._read):
            if self._nodes.spent - spent > _ROUND_STEPS:
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
        return self._state.users.revisions(key), self._freedoms()

    def _freedoms(self) -> Hashable:
        """Return the version of what may become free, and of what all claims refer to."""
        state = self._state
        return state.shared_epoch, state.class_epoch, tuple(state.stock.freedom_of(node) for node in state.nodes())

    def _world(self, key: ObjectKey) -> Hashable:
        """Return the version of what a pod's next step depends on besides the pod: its claims, what
        they refer to, and the free devices.
        """
        return self._state.users.revisions(key), self._state.shared_epoch, self._state.supply

    async def _report(self, key: ObjectKey, stored: Stored, reason: Reason) -> None:
        """Say in a pod's condition that it is set aside."""
        await self._pods.report(key, stored, "Malformed", (reason,))

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
            await self._pods.report(key, stored, "Malformed", (Reason(code="malformed", message=err.message),))
            return None

    async def _schedule(self, key: ObjectKey, stored: Stored, *, is_cheap: bool) -> Result:
        pod = stored.value
        gates = pod.spec.get("schedulingGates")
        if isinstance(gates, list) and gates:
            names = ", ".join(str(gate.get("name")) if isinstance(gate, dict) else str(gate) for gate in gates)
            await self._pods.report(
                key,
                stored,
                "SchedulingGated",
                (Reason(code="gated", message=f"waits behind scheduling gates: {names}"),),
            )
            return None
        waiting = self._claims.waits(key)
        if waiting:
            await self._pods.report(key, stored, "Unschedulable", waiting)
            return None
        claims, world = self._state.users.claims(key), self._world(key)
        plan = pre_filter(stored.pod, lambda name: claims[name].structured if name in claims else None)
        if isinstance(plan, Blocked):
            version = (stored.revision, world)
            if all(reason.code == "claim-taken-back" for reason in plan.reasons) and not self._queue.has_waited(
                key, version
            ):
                return Again(version=version)  # the node releases soon: nothing is reported
            reported = await self._pods.report(key, stored, "Unschedulable", plan.reasons)
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
            excluded_s = self._nodes.excluded_s(key)
            if excluded_s < math.inf:
                return Again(excluded_s, (reported.revision, world))
            # The claims' revisions are taken after their conditions were written. Those of the free
            # devices are taken before a long search, so that no device freed meanwhile is missed.
            return (
                Done((reported.revision, world))
                if is_cheap
                else Behind(reported.revision, (self._state.users.revisions(key), freedoms))
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
            protected = await self._pods.protect(key, stored)
            if protected is None:
                return None
            stored = protected
        if plan.pending:
            fit, _ = next(iter(fits.values()))
            await self._claims.attempt(plan, fit)
            return None
        reserved = await self._claims.reserve(key, plan)
        if isinstance(reserved, Reason):
            await self._claims.unreserve(key, plan.pod)
            await self._pods.report(key, stored, "Unschedulable", (reserved,))
        if reserved is not True:
            return None
        for node in fits:
            if wanted is None:
                return await self._bind(key, stored, node)
            answer = await self._nodes.place(key, stored, node, wanted)
            if answer is None:
                return Again()  # neither done nor undone: only that node knows
            if not isinstance(answer, Refusal):
                return await self._bind(key, stored, node)
            misses.append(refusal_of(node, answer))
        retreated = await self._pods.retreat(key, stored)
        if retreated is None:
            return None
        await self._claims.unreserve(key, plan.pod)
        await self._no_fit(key, retreated, plan, misses)
        return None

    async def _no_fit(self, key: ObjectKey, stored: Stored, plan: PodPlan, misses: Sequence[NodeMiss]) -> Stored:
        """Take one allocation back where that may help.

        Otherwise write into the pod's and its claims' conditions why the pod waits. Returns the pod
        as it is then.
        """
        answer = post_filter(plan, misses)
        if isinstance(answer, TakeBack):
            await self._claims.take_back(key, stored, answer)
            return stored
        condition, reasons = explain_misses(misses)
        reported = await self._pods.report(key, stored, "Unschedulable", reasons)
        await self._claims.report(key, plan, misses, condition, reasons)
        return reported

    async def _bind(self, key: ObjectKey, stored: Stored, node: str) -> Result:
        unready = self._binding.wait_for(self._state.users.keys(key))
        if unready is not None:
            await self._pods.report(key, stored, "WaitsForBinding", (unready,))
            return Again()
        await self._pods.bind(key, stored, node)
        return None
