"""Opens the scheduling gates of pods: advances each pod by one write until its claims are allocated
and its gate is gone, or a condition gives the reason why not.

The order of writes is: intents and finalizers into all claims, the node's ledger, allocation and
reservation into each status, the gate off the pod. A replica may crash after any of them. The
claims show which writes are done.

A pod that needs a long search is queued behind all others (`WorkQueue.behind`). Such searches run
one at a time beside the rest, so a pod with a cheap claim never waits for one. Devices that were
taken meanwhile are detected when the intent is committed, as with another replica.

A pod whose gate is already removed is also advanced as long as it has no node and one of its
allocations from here was taken back: that claim is allocated elsewhere.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal

from topobus.controller.cluster.allocated_condition import AllocatedCondition
from topobus.controller.cluster.allocation_intents import Intents
from topobus.controller.cluster.gated_pod_queue import GatedPodQueue, PodVersions
from topobus.controller.cluster.node_choice import NoNodeFits
from topobus.controller.commit.commit_allocations import Draft, Progress
from topobus.controller.commit.deallocate_claims import ClusterDeallocation
from topobus.controller.commit.replica_turns import Stage
from topobus.controller.config import ClusterSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.cluster.api_server_state import ApiServerState, Key
from topobus.engine.allocation.values import NoFit
from topobus.engine.claims.gate import version_of
from topobus.engine.claims.objects import Claim
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.scheduling.aligned_allocation import read_alignment_request
from topobus.engine.scheduling.decisions import (
    Blocked,
    NodeFit,
    PodPlan,
    TakeBack,
    post_filter,
    pre_filter,
)
from topobus.engine.scheduling.kube_rules.rule_misses import explain_choice
from topobus.process.work_queue import Again, Behind, Done, Result
from topobus.values.errors import HardwareError, PeerUnavailable
from topobus.values.outcome import Reason, Refusal

__all__ = ["GatedPodReconciler"]

# Writes that one pod may need in a row. A pod with very many claims continues in the next round.
_MOST_STEPS = 8
_WAITING = "WaitingForClaims"
# A pod for which there is no room is looked at again after so long, beside each time that pods
# move: what is intended for other pods takes room as well, and its end moves no pod.
_LONGEST_LOOK_S = 60.0
# Answers of the API server that need a person: a right is missing, or it finds our write invalid.
_REFUSALS = (400, 403, 422)

_Step = Result | Literal[Progress.ON]
"""The outcome of a step: the next one follows, or the pod is due as the result defines."""


class GatedPodReconciler:
    """Reconciles gated pods, several at a time."""

    def __init__(
        self,
        settings: ClusterSettings,
        state: ApiServerState,
        queue: GatedPodQueue,
        intents: Intents,
        deallocation: ClusterDeallocation,
        condition: AllocatedCondition,
        metrics: ControllerMetrics,
        changed: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._state = state
        self._queue = queue
        self._intents = intents
        self._deallocation = deallocation
        self._condition = condition
        self._metrics = metrics
        self._changed = changed
        self._is_searching = False
        """Whether a costly search is running."""
        self._planning = asyncio.Lock()
        self._slots = asyncio.Semaphore(settings.parallel_pods)

    def start_all(self, group: asyncio.TaskGroup) -> float | None:
        """Begin to work on every pod that may advance.

        Returns after how many seconds a pod is due by time alone.
        """
        keys = self._queue.pending_pods()
        self._intents.keep(keys)
        self._metrics.waiting.set(len(keys))
        for key in self._queue.take_ready():
            group.create_task(self._work(key, is_cheap=True))
        turn = None if self._is_searching else self._queue.take_costly()
        if turn is not None:
            self._is_searching = True
            group.create_task(self._work(turn, is_cheap=False))
        return self._queue.wait_s()

    async def _work(self, key: Key, *, is_cheap: bool) -> None:
        """Advance one pod as far as possible now: with short searches, or with a long one, which
        runs alone and takes no slot from the others.
        """
        try:
            # All of it in one slot, including its reports: a thousand pods in trouble at once must
            # not take the connections from the others.
            async with self._slots if is_cheap else nullcontext():
                walk, report = partial(self._walk, key, is_cheap=is_cheap), partial(self._report_malformed, key)
                await self._queue.run(key, walk, report, is_costly=not is_cheap)
        finally:
            self._is_searching = self._is_searching and is_cheap
            self._queue.release(key)
            # The state or the time when this pod is due may have changed: run a round.
            self._changed()

    async def _walk(self, key: Key, *, is_cheap: bool) -> Result:
        """Take steps until there is nothing to do now.

        Errors: raises PeerUnavailable and HardwareError of a peer, after which the same is tried
        again.
        """
        try:
            for number in range(_MOST_STEPS):
                pod = self._state.pods.get(key)
                if pod is None or not self._queue.needs_work(key, pod):
                    return None
                step = await self._step(key, pod, is_first=not number, is_cheap=is_cheap)
                if step is not Progress.ON:
                    return step
        except (PeerUnavailable, HardwareError) as err:
            pod = self._state.pods.get(key)
            if pod is not None and err.facts.get("code") in _REFUSALS:
                await self._condition.tell_refused(pod, str(err))
            raise
        return self._queue.later(key)

    async def _step(self, key: Key, pod: Stored, *, is_first: bool, is_cheap: bool) -> _Step:
        """Take one step, the first of this walk or a later one.

        Returns when the pod is due if there is nothing to do now.
        """
        versions = self._queue.versions_of(key)
        plan = pre_filter(pod.pod, lambda name: self._claim((key[0], name)), has_own_notes=False)
        if isinstance(plan, Blocked):
            return await self._wait_for_claims(key, pod, versions, plan.reasons)
        self._queue.has_come(key, _WAITING)
        plan = self._with_class_alignment(plan)
        if plan.is_reserved:
            # The replica that made the earlier writes will also make this one.
            return (self._left(pod, Stage.FINISH, versions) if is_first else None) or await self._open(key, pod)
        if not plan.pending:
            return await self._reserve(key, pod, plan, versions)
        intents = self._intents.find(plan)
        for intent in intents:
            if intent.attempt.pod != plan.pod.uid:
                if self._queue.is_live(key, intent.attempt):
                    return Done(versions)  # the other pod that shares the claim advances it
                await self._intents.withdraw(plan, (intent,), is_final=True)
                return Progress.ON
        if not intents:
            return (self._left(pod, Stage.PLAN, versions) if is_first else None) or await self._begin(
                key, pod, plan, versions, is_cheap=is_cheap
            )
        if self._intents.are_anothers(intents) and not self._queue.has_waited(key, versions):
            # A living replica gets time to commit them, or to write the missing ones, before
            # another replica continues.
            return Again(version=versions.own_versions)
        if len(intents) < len(plan.pending) or len({intent.attempt.node for intent in intents}) > 1:
            # A crash came between two intents of one pod: they are made again, together.
            await self._intents.withdraw(plan, intents)
            return Progress.ON
        done = await self._intents.commit(plan, intents, is_cheap=is_cheap)
        if isinstance(done, Refusal):
            await self._report(key, pod, "RefusedByNode", done.reasons)
        elif done is Progress.LATER:
            return self._queue.later(key)
        elif done is Progress.COSTLY:
            return self._queue.behind_others(key)
        return Progress.ON

    async def _wait_for_claims(
        self, key: Key, pod: Stored, versions: PodVersions, reasons: tuple[Reason, ...]
    ) -> Result:
        """Wait until the claims are there and as they have to be. Report the wait after a while."""
        if self._queue.waits_briefly(key, _WAITING):
            # Claims and pods come by different watches, and claims made from templates come later,
            # so a missing one is no fault yet.
            return self._queue.later(key)
        return Done(replace(versions, pod=await self._report(key, pod, _WAITING, reasons)))

    def _left(self, pod: Stored, stage: Stage, versions: PodVersions) -> Again | None:
        """Leave a pod to another replica for a moment.

        It is due after that, or when its versions change.
        """
        wait_s = self._intents.leave_s(pod, stage)
        return Again(wait_s, versions) if wait_s > 0 else None

    async def _begin(self, key: Key, pod: Stored, plan: PodPlan, versions: PodVersions, *, is_cheap: bool) -> _Step:
        """Choose a node and devices, and write the intents."""
        if not await self._intents.clear(plan):
            return self._queue.later(key)
        refused = self._intents.refused_nodes(pod, plan)
        if refused.names and self._queue.may_begin_round(key):
            refused = refused.next_round()
        freedoms = self._queue.freedoms() if not is_cheap else None
        again_s = self._queue.silence_s(key)
        # A costly pod has its own pauses, so its reason is reported each time.
        is_brief = is_cheap and again_s > 0 and not plan.allocated
        intents: list[Draft] = []
        if is_cheap:
            async with self._planning:
                chosen = await self._intents.choose(pod, plan, refused, is_brief=is_brief, is_cheap=True)
                if isinstance(chosen, NodeFit):
                    intents = self._intents.begin(plan, chosen, refused)
        else:
            # Others plan meanwhile.
            chosen = await self._intents.choose(pod, plan, refused, is_brief=False, is_cheap=False)
            async with self._planning:
                if key not in self._state.pods or self._queue.versions_of(key).own_versions != versions.own_versions:
                    # The pod or its claims changed during the search. A pod that changes all the
                    # time waits behind the others each time.
                    return self._queue.behind_others(key)
                if isinstance(chosen, NodeFit):
                    intents = self._intents.begin(plan, chosen, refused)
        if isinstance(chosen, NodeFit):
            # Beside the writes of other pods: the intended devices count as taken already.
            await self._intents.write(intents)
            return Progress.ON
        if chosen is None:
            # While the pod waits for its turn, an old note must not keep its devices from other
            # pods.
            await self._intents.withdraw(plan, refused=refused)
            return self._queue.behind_others(key)
        # There is no intent any more, and an old note must not keep its devices from other pods.
        await self._intents.withdraw(plan, refused=refused)
        refused_s = (
            self._queue.refused_wait_s(key, self._settings.unschedulable_s, refused.rounds)
            if refused.names
            else math.inf
        )
        if is_brief:
            # Explaining costs many searches: a recent reason is renewed after a while, not at each
            # change of the cluster.
            return Again(min(again_s, refused_s), versions)
        if await self._make_room(key, pod, plan, chosen):
            return Progress.ON
        return await self._explain(key, pod, versions, chosen, refused_s=refused_s, freedoms=freedoms)

    async def _explain(
        self,
        key: Key,
        pod: Stored,
        versions: PodVersions,
        chosen: NoNodeFits,
        *,
        refused_s: float,
        freedoms: Hashable,
    ) -> Result:
        """Tell a pod why it fits nowhere.

        Gives when it is due.

        Shapes: refused_s — seconds until nodes that kube-scheduler refused are tried again,
        infinite without such nodes; freedoms — what was free before a long search, None after a
        short one.
        """
        if freedoms is not None and key in self._state.pods:
            # The claims as they are without their notes: it was just us who wrote them.
            versions = replace(versions, claims=self._queue.versions_of(key).claims)
        self._queue.silence(key)
        reason, reasons = explain_choice(chosen.misses)
        self._metrics.decisions.labels("refused").inc()
        versions = replace(versions, pod=await self._report(key, pod, reason, (*reasons, *chosen.advice)))
        # A long search costs too much to be repeated at each change until then.
        version: Hashable = versions.own_versions if freedoms is not None and refused_s < math.inf else versions
        wait_s = min(self._intents.excluded_s(pod), refused_s)
        outcomes = [miss.outcome for miss in chosen.misses]
        if any(
            isinstance(outcome, NoFit) and any(why.code == "no-room" for why in outcome.reasons) for outcome in outcomes
        ):
            wait_s, version = min(wait_s, _LONGEST_LOOK_S), versions.with_moves
        if wait_s < math.inf:
            return Again(wait_s, version)
        # What is free as it was before a long search, so that nothing freed meanwhile is missed.
        return Done(versions) if freedoms is None else Behind(versions.own_versions, freedoms)

    async def _make_room(self, key: Key, pod: Stored, plan: PodPlan, chosen: NoNodeFits) -> bool:
        """Deallocate a claim of ours that keeps the pod's other claims from fitting. Behind the
        pod's gate no scheduler relies on it.
        """
        outcome = post_filter(plan, chosen.misses)
        if not isinstance(outcome, TakeBack) or not pod.pod.has_gate:
            return False
        claim_key = (key[0], outcome.claim.name)
        claim = self._state.claims.get(claim_key)
        if claim is None or self._state.gated_pods.note(claim_key) is None or not claim.claim.is_allocated:
            return False
        await self._deallocation.deallocate(claim_key, claim, f"pod {plan.pod}: {outcome.why}")
        return True

    async def _reserve(self, key: Key, pod: Stored, plan: PodPlan, versions: PodVersions) -> _Step:
        """Reserve claims that are allocated already, such as shared ones."""
        planned = [
            (
                ObjectKey("resourceclaim", key[0], pod_claim.name),
                Stored(version_of(pod_claim.claim.object), pod_claim.claim.object),
            )
            for pod_claim in plan.allocated
        ]
        reserved = await self._intents.committer.reserve(plan.pod, planned)
        if isinstance(reserved, Reason):
            return Done(replace(versions, pod=await self._report(key, pod, _WAITING, (reserved,))))
        return Progress.ON

    async def _open(self, key: Key, pod: Stored) -> _Step:
        """Open the gate, as all that the pod waited for is there."""
        if not pod.pod.has_gate:
            return None
        await self._condition.open_gate(key, pod)
        return Progress.ON

    async def _report(self, key: Key, pod: Stored, reason: str, reasons: tuple[Reason, ...]) -> int:
        """Report why a pod waits.

        Returns its revision afterwards: our own write must not make the pod due again, other
        changes must.
        """
        written = await self._condition.tell_waiting(key, pod, reason, reasons)
        return pod.revision if written is None else written.revision

    async def _report_malformed(self, key: Key, reason: Reason) -> None:
        """Report that a pod is set aside."""
        self._metrics.malformed.inc()
        pod = self._state.pods.get(key)
        if pod is not None:
            await self._report(key, pod, "Malformed", (reason,))

    def _claim(self, key: Key) -> Claim | None:
        claim = self._state.claims.get(key)
        return claim.claim if claim is not None else None

    def _with_class_alignment(self, plan: PodPlan) -> PodPlan:
        """Apply the classes' alignment requests to claims that have none of their own.

        Errors: raises ContractError for a class that cannot be read, and for classes that disagree.
        """
        classes = self._state.classes
        wished = tuple(
            replace(claim, wishes=read_alignment_request(claim.spec, claim.claim.shown, classes))
            for claim in plan.claims
        )
        return replace(plan, claims=wished)
