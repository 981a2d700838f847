"""Carries out a pod scheduler's decisions on the pod's claims: attempts, reservations,
deallocations, and the reasons why they wait.

All are compare-and-set writes. A claim that has changed since the plan is not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from topobus.controller.classic.scheduler import ClassicScheduler
from topobus.controller.commit.commit_allocations import AllocationCommitter, next_attempts
from topobus.controller.commit.deallocate_claims import ClaimDeallocation
from topobus.controller.standalone.claim_conditions import ClaimConditions
from topobus.controller.standalone.node_filter import NodeFilter
from topobus.controller.standalone.pod_writes import PodWrites
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.claims.reservations import PodRef
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.scheduling.decisions import NodeFit, NodeMiss, PodPlan, TakeBack
from topobus.formats.kubernetes.classic.classic import is_classic
from topobus.values.outcome import Reason

__all__ = ["ScheduledClaims"]


class ScheduledClaims:
    """The claims of pods that are being scheduled, those of the classic API among them."""

    def __init__(
        self,
        state: StandaloneState,
        nodes: NodeFilter,
        committer: AllocationCommitter,
        conditions: ClaimConditions,
        deallocation: ClaimDeallocation,
        classic: ClassicScheduler,
        pods: PodWrites,
    ) -> None:
        self._state = state
        self._nodes = nodes
        self._committer = committer
        self._conditions = conditions
        self._deallocation = deallocation
        self._classic = classic
        self._pods = pods

    def waits(self, pod: ObjectKey) -> tuple[Reason, ...]:
        """Return why a pod's classic claims are not all allocated and reserved for it, as
        `ClassicScheduler.waits`.
        """
        return self._classic.waits(pod)

    async def attempt(self, plan: PodPlan, fit: NodeFit) -> None:
        """Write an attempt into each pending claim, which `ClaimReconciler` commits."""
        await self._committer.write_attempts(next_attempts(fit.node, self._nodes.members(plan), fit.results))

    async def reserve(self, key: ObjectKey, plan: PodPlan) -> Reason | bool:
        """Write the pod into each claim's reservedFor.

        Returns a Reason when one is full, False when another writer was first.
        """
        planned: list[tuple[ObjectKey, Stored]] = []
        for pod_claim in plan.claims:
            claim_key = ObjectKey("resourceclaim", key.namespace, pod_claim.name)
            claim = self._state.objects.get(claim_key)
            if claim is not None and is_classic(claim.value):
                continue  # reserved already: the pod would wait for it otherwise
            if claim is None or claim.value is not pod_claim.claim.object:
                return False
            planned.append((claim_key, claim))
        return await self._committer.reserve(plan.pod, planned)

    async def unreserve(self, key: ObjectKey, pod: PodRef) -> None:
        """Take the pod off its claims."""
        claims = [
            (ObjectKey("resourceclaim", key.namespace, name), claim)
            for name, claim in self._state.users.claims(key).items()
            if not is_classic(claim.value)
        ]
        await self._committer.unreserve((pod.uid,), claims)

    async def take_back(self, key: ObjectKey, stored: Stored, answer: TakeBack) -> None:
        """Begin to deallocate one of the pod's claims, since another node may serve all of them."""
        claim_key = ObjectKey("resourceclaim", key.namespace, answer.claim.name)
        claim = self._state.objects.get(claim_key)
        if claim is not None and is_classic(claim.value):
            if await self._pods.retreat(key, stored) is not None:
                await self._classic.take_back(claim_key)
        elif claim is not None:
            # The mark is written first. Both are in one stream, so a reader that sees the pod's
            # next version has seen the mark. The reconciler of claims prevents other binds.
            await self._deallocation.begin(claim_key, claim, answer.why)

    async def report(
        self, key: ObjectKey, plan: PodPlan, misses: Sequence[NodeMiss], condition: str, reasons: tuple[Reason, ...]
    ) -> None:
        """Report on the pending claims why they fit nowhere, and what would fit."""
        advise = partial(self._nodes.advise, self._nodes.members(plan), misses)
        for pod_claim in plan.pending:
            claim_key = ObjectKey("resourceclaim", key.namespace, pod_claim.name)
            claim = self._state.objects.get(claim_key)
            if claim is not None:
                await self._conditions.write(claim_key, claim, condition, reasons, advise)
