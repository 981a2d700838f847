"""Allocation intents in a cluster: records what is about to be allocated to a pod's claims, commits
it, or withdraws it.

Two replicas cannot allocate one device twice. An intent is ordered by the version at which it was
written, and it is committed only when the copy shows everything up to that version and the devices
are free of all earlier intents. Of two intents the later one sees the earlier and is withdrawn. The
writes themselves are in `commit_allocations`, as for the stand-alone home. This module adds the
checks that a cluster needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from topobus.controller.cluster.node_choice import NodeChooser, NoNodeFits
from topobus.controller.cluster.node_rules import RefusedNodes
from topobus.controller.commit.allocator import Member
from topobus.controller.commit.commit_allocations import (
    AllocationCommitter,
    Attempted,
    Draft,
    Progress,
    next_attempts,
    refused_devices,
)
from topobus.controller.commit.node_ledgers import NODE_FAILED, NodeLedgers
from topobus.controller.commit.replica_turns import ReplicaTurns, Stage
from topobus.controller.config import ClusterSettings
from topobus.controller.state.cluster.api_server_state import ApiServerState, Key
from topobus.controller.store.protocol import ObjectStore
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.allocation.values import DeviceId, GaveUp
from topobus.engine.claims import attempts
from topobus.engine.claims.attempts import Attempt
from topobus.engine.claims.reservations import with_bound_allocation
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.scheduling.decisions import NodeFit, PodClaim, PodPlan
from topobus.formats.kubernetes.resource import AllocationResult
from topobus.formats.messages.messages import ApiObject
from topobus.kubernetes.informers import Informer
from topobus.process.logging import get_logger
from topobus.values.errors import PeerUnavailable
from topobus.values.outcome import Reason, Refusal, refuse
from topobus.values.timestamps import in_whole_seconds

__all__ = ["Intents"]


class Intents:
    """Writes, commits and withdraws intents."""

    def __init__(
        self,
        settings: ClusterSettings,
        state: ApiServerState,
        store: ObjectStore,
        claims: Informer,
        ledgers: NodeLedgers,
        chooser: NodeChooser,
        committer: AllocationCommitter,
        turns: ReplicaTurns,
    ) -> None:
        self._call_s = settings.call_s
        self._written: set[tuple[str, int]] = set()
        self._writing: set[tuple[str, int]] = set()
        """Intents under way: the watch may bring one before the answer does."""
        self._state = state
        self._store = store
        self._claims = claims
        self._ledgers = ledgers
        self._chooser = chooser
        self._turns = turns
        self.committer = committer
        """Writes intents, allocations and reservations."""
        self._log = get_logger()

    def find(self, plan: PodPlan) -> list[Attempted]:
        """List the pending claims that have an intent which is not committed yet."""
        intents: list[Attempted] = []
        for pod_claim in plan.pending:
            key = _key(plan, pod_claim)
            claim, note = self._state.claims.get(key), self._state.gated_pods.note(key)
            if claim is not None and note is not None and note.node and not self._state.is_taken_back(key):
                intents.append(Attempted(ObjectKey("resourceclaim", *key), claim, note))
        return intents

    async def clear(self, plan: PodPlan) -> bool:
        """Release what nodes still hold for the pending claims from before.

        False when a node refuses.

        Errors: raises PeerUnavailable.
        """
        for pod_claim in plan.pending:
            if await self._ledgers.release(pod_claim.claim, f"before-{pod_claim.claim.number + 1}") is not None:
                return False
        return True

    def begin(self, plan: PodPlan, fit: NodeFit, refused: RefusedNodes) -> list[Draft]:
        """Draft the intent of each pending claim.

        Its devices count as taken until `write` is done. Empty when a claim is gone.
        """
        members: list[Member] = []
        for pod_claim in plan.pending:
            claim = self._state.claims.get(_key(plan, pod_claim))
            if claim is None:
                return []
            members.append(
                Member(ObjectKey("resourceclaim", *_key(plan, pod_claim)), claim, pod_claim.spec, pod_claim.wishes)
            )
        group = next_attempts(
            fit.node, members, fit.results, pod=plan.pod.uid, refused=refused.names, rounds=refused.rounds
        )
        for draft in group:
            intended = Stored(draft.revision, draft.value)
            self._state.under_way.put(
                (draft.key.namespace, draft.key.name), intended, (plan.pod.namespace, plan.pod.name), draft.attempt
            )
        return group

    async def write(self, group: Sequence[Draft]) -> None:
        """Write the intents. Stops at a claim that changed meanwhile.

        Errors: raises PeerUnavailable.
        """
        own = {(_uid(draft), draft.attempt.number) for draft in group}
        self._writing |= own
        try:
            written = await self.committer.write_attempts(group)
        finally:
            self._writing -= own
            for draft in group:
                self._state.settle((draft.key.namespace, draft.key.name))
        self._written |= {(intent.stored.uid, intent.attempt.number) for intent in written}

    async def commit(
        self, plan: PodPlan, intents: Sequence[Attempted], *, is_cheap: bool = False
    ) -> Progress | Refusal:
        """Commit intents: check the earlier ones, place the devices at the node, write the
        statuses.

        A Refusal is the node's.

        Shapes: is_cheap — commit only if a short search shows that the devices are still free.
        """
        return await self.committer.commit(intents, _PodRules(self, plan, is_cheap=is_cheap))

    async def revalidate(
        self, plan: PodPlan, intents: Sequence[Attempted], *, is_cheap: bool
    ) -> Sequence[AllocationResult] | Progress:
        """Check whether a pod's intents may be committed: all earlier intents are known, the pod is
        not bound elsewhere, and the devices are still free.
        """
        newest = max(intent.stored.revision for intent in intents)
        if not await self._claims.reached(newest, self._call_s):
            return Progress.LATER
        node = intents[0].attempt.node
        bound_to = await self._bound_to(plan)
        if bound_to not in ("", node):
            # The pod was bound to another node meanwhile: it can never start with devices of the
            # intended one.
            self._log.info("pod.bound-elsewhere", pod=str(plan.pod), node=bound_to, intended=node)
            await self.withdraw(plan)
            return Progress.ON
        devices = {DeviceId.of(granted) for intent in intents for granted in intent.attempt.allocation.devices.results}
        later = self._state.gated_pods.later_intents(newest) | self._state.under_way.claims()
        fit = await self._chooser.still_fits(plan, node, devices, later, is_cheap=is_cheap)
        if isinstance(fit, GaveUp):
            return Progress.COSTLY
        if fit is None:
            self._log.info("pod.overtaken", pod=str(plan.pod), node=node)
            await self.withdraw(plan)
            return Progress.ON
        return fit.results

    async def _bound_to(self, plan: PodPlan) -> str:
        """Return the pod's node. Empty while it has none.

        A pod behind a gate cannot be bound, so the store is read only when the gate is open.
        """
        key = (plan.pod.namespace, plan.pod.name)
        pod = self._state.pods.get(key)
        if pod is None or not pod.pod.has_gate:
            pod = await self._store.read(ObjectKey("pod", *key))
        return pod.pod.node if pod is not None else ""

    def are_anothers(self, intents: Sequence[Attempted]) -> bool:
        """Say whether another replica wrote one of these."""
        return any((intent.stored.uid, intent.attempt.number) not in self._written for intent in intents)

    def refused_nodes(self, pod: Stored, plan: PodPlan) -> RefusedNodes:
        """List the nodes on which kube-scheduler could not place the pod.

        While the gate is closed it has not tried, and where the pod is bound it could.
        """
        if pod.pod.has_gate or pod.pod.node:
            return RefusedNodes()
        nodes: dict[str, None] = {}
        rounds = 0
        for pod_claim in plan.pending:
            note = self._state.gated_pods.note(_key(plan, pod_claim))
            if note is not None and note.pod == plan.pod.uid:
                nodes |= dict.fromkeys((*note.refused, note.node) if note.node else note.refused)
                rounds = max(rounds, note.rounds)
        return RefusedNodes(tuple(nodes), rounds)

    def keep(self, pods: Collection[Key]) -> None:
        """Remove the notes about intents that no longer exist, and the refusals of other pods."""
        self._chooser.refusals.drop(lambda uid: self._state.gated_pods.pod_of(str(uid)) not in pods)
        living = self._state.gated_pods.pending()
        self._written &= living
        if living - self._written - self._writing:
            self._turns.see_another()

    def leave_s(self, pod: Stored, stage: Stage) -> float:
        """Say for how long a pod is left to another replica; 0 when none is at work."""
        return self._turns.wait_s(pod.uid, stage)

    def excluded_s(self, pod: Stored) -> float:
        """Say after how many seconds a pod may be given a device that it must not get now.

        Infinite where none is excluded.
        """
        return self._chooser.refusals.wait_s([pod.uid])

    async def choose(
        self, pod: Stored, plan: PodPlan, refused: RefusedNodes, *, is_brief: bool, is_cheap: bool
    ) -> NodeFit | NoNodeFits | None:
        """Choose the node and the devices for the next intents, as `NodeChooser.choose`."""
        return await self._chooser.choose(pod.pod, plan, refused=refused, is_brief=is_brief, is_cheap=is_cheap)

    async def withdraw(
        self,
        plan: PodPlan,
        intents: Sequence[Attempted] | None = None,
        *,
        is_final: bool = False,
        refused: RefusedNodes | None = None,
    ) -> None:
        """Withdraw intents.

        The note of a pod whose gate is open stays, without an intent, so that its claims are still
        known as ours.

        Shapes: intents — None means all of the pod; refused — the nodes to record in such a note;
        None means those that it has.
        """
        pod = self._state.pods.get((plan.pod.namespace, plan.pod.name))
        is_open = pod is not None and not pod.pod.has_gate and not is_final
        names = (
            [intent.key.name for intent in intents]
            if intents is not None
            else [pod_claim.name for pod_claim in plan.pending]
        )
        for name in names:
            key = (plan.pod.namespace, name)
            claim, note = self._state.claims.get(key), self._state.gated_pods.note(key)
            if claim is None or note is None or claim.claim.is_allocated:
                continue
            kept = Attempt(
                number=note.number,
                node="",
                allocation=AllocationResult(),
                pod=plan.pod.uid,
                refused=note.refused if refused is None else refused.names,
                rounds=note.rounds if refused is None else refused.rounds,
            )
            if is_open and note == kept:
                continue
            withdrawn = attempts.with_attempt(claim.value, kept) if is_open else attempts.without_attempt(claim.value)
            await self._store.write(ObjectKey("resourceclaim", *key), claim.revision, withdrawn)

    async def on_refused(self, plan: PodPlan, attempt: Attempt, refusal: Refusal) -> None:
        """Withdraw the attempts on a node that refuses, and exclude the devices for a while."""
        refused = refused_devices(attempt, refusal, self._state.devices_of(attempt.node))
        self._chooser.refusals.add(plan.pod.uid, refused, summarize(refusal.reasons))
        await self.withdraw(plan)
        for pod_claim in plan.pending:
            try:
                await self._ledgers.release(pod_claim.claim, f"refused-{attempt.number}")
            except PeerUnavailable as err:
                self._log.warning("ledger.silent", node=attempt.node, error=str(err))


class _PodRules:
    """The cluster home's rules for committing a pod's intents."""

    def __init__(self, intents: Intents, plan: PodPlan, *, is_cheap: bool) -> None:
        self._intents = intents
        self._plan = plan
        self._is_cheap = is_cheap
        self.log_fields = {"pod": str(plan.pod)}

    async def revalidate(self, group: Sequence[Attempted]) -> Sequence[AllocationResult] | Progress:
        return await self._intents.revalidate(self._plan, group, is_cheap=self._is_cheap)

    async def refusal_of(self, attempted: Attempted, error: PeerUnavailable) -> Refusal:
        """Return a refusal, so that the pod is tried elsewhere. The silent node may hold the
        devices by now, but its gateway releases what no claim's status has.
        """
        node = attempted.attempt.node
        code = "node-failed" if error.facts.get("code") == NODE_FAILED else "node-silent"
        message = str(error) if code == NODE_FAILED else f"node {node}: its ledger does not answer: {error}"
        return refuse(code, message, node=node)

    def allocated(self, claim: ApiObject, allocation: AllocationResult, now: datetime) -> ApiObject | Reason:
        return with_bound_allocation(claim, allocation, self._plan.pod, now=in_whole_seconds(now))

    async def on_refused(self, attempted: Attempted, refusal: Refusal) -> None:
        await self._intents.on_refused(self._plan, attempted.attempt, refusal)


def _key(plan: PodPlan, pod_claim: PodClaim) -> Key:
    return plan.pod.namespace, pod_claim.name


def _uid(draft: Draft) -> str:
    return str(draft.value.metadata.get("uid") or "")
