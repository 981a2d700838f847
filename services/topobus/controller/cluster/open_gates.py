"""Opens the scheduling gates of pods: advances each pod by one write until its claims are allocated and its gate is gone, or a condition says why not.

The order of writes is: intents and finalizers into all claims, the node's ledger, allocation and reservation into each status, the gate off the pod.
A replica may crash after any of them; the claims show how far it came.

A pod that needs a long search is queued behind all others (`CostlyWork`). Such searches run one at a time beside the rest, so a pod with a cheap
claim never waits for one. Devices that were taken meanwhile are detected when the intent is committed, as with another replica.

A pod whose gate is already removed is also advanced as long as it has no node and one of its allocations from here was taken back: that claim is
allocated elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace

from topobus.controller.cluster.allocated_condition import ALLOCATED, AllocatedCondition
from topobus.controller.cluster.allocation_intents import Intents
from topobus.controller.cluster.gated_pod_queue import Due, GatedPodQueue, PodVersions
from topobus.controller.cluster.node_choice import NodeChooser, NoNodeFits
from topobus.controller.cluster.waiting_pods import WaitingPods
from topobus.controller.commit.commit_allocations import Draft, Progress
from topobus.controller.commit.deallocate_claims import ClusterDeallocation
from topobus.controller.commit.replica_turns import ReplicaTurns, Stage
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.cluster.api_server_state import ApiServerState, Key
from topobus.controller.store.cluster_events import EventRecorder
from topobus.controller.store.object_writer import ObjectWriter
from topobus.engine.allocation.values import NoFit
from topobus.engine.claims.gate import has_allocated_condition, version_of, without_gate
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
from topobus.engine.scheduling.kube_rules.placement_rules import PLACEMENT_CODES
from topobus.engine.scheduling.kube_rules.rule_misses import explain_choice
from topobus.engine.scheduling.kube_rules.volume_rules import VOLUME_IN_USE
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.errors import HardwareError, InvariantError, PeerUnavailable
from topobus.values.outcome import Reason, Refusal

__all__ = ["GatedPodReconciler"]

# Writes that one pod may need in a row: intents, statuses and the gate of a pod with very many claims come back in the next round.
_MOST_STEPS = 8
_WAITING = "WaitingForClaims"
# Answers of the API server that a person must do something about: a right is missing, or it finds what we write invalid.
_REFUSALS = (400, 403, 422)
# Times `cluster.retry_s` for which a pod may wait for its claims before it is told so, and between the first two explanations of why it does not fit.
_PATIENCE = 5


class GatedPodReconciler:
    """Reconciles gated pods, several at a time."""

    def __init__(
        self,
        settings: ControllerSettings,
        clock: Clock,
        state: ApiServerState,
        writer: ObjectWriter,
        intents: Intents,
        deallocation: ClusterDeallocation,
        chooser: NodeChooser,
        events: EventRecorder,
        metrics: ControllerMetrics,
        changed: Callable[[], None],
        turns: ReplicaTurns,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._state = state
        self._writer = writer
        self._intents = intents
        self._deallocation = deallocation
        self._chooser = chooser
        self._condition = AllocatedCondition(clock, state, writer, events)
        self._events = events
        self._metrics = metrics
        self._changed = changed
        self._turns = turns
        self._queue = GatedPodQueue(clock, state, settings.cluster.retry_s)
        self._waiting = WaitingPods(state, self._condition, metrics, self._queue)
        self._is_searching = False
        """Whether a costly search is under way."""
        self._planning = asyncio.Lock()
        self._slots = asyncio.Semaphore(settings.cluster.parallel_pods)
        self._log = get_logger()

    def start_all(self, group: asyncio.TaskGroup) -> float | None:
        """Begin to work on every pod that may be brought further; gives after how many seconds a pod waits for time and not for a change."""
        keys = self._queue.pending_pods()
        self._expire_refusals(keys)
        if self._intents.drop_gone():
            self._turns.see_another()
        self._metrics.waiting.set(len(keys))
        waits = [self._settings.cluster.retry_s] if self._intents.refusals.is_waiting else []
        ready, wait_s = self._queue.take_ready()
        for key in ready:
            group.create_task(self._work(key))
        if wait_s is not None:
            waits.append(wait_s)
        turn, is_pausing = self._queue.take_costly(is_searching=self._is_searching)
        if turn is not None:
            self._is_searching = True
            group.create_task(self._work_costly(turn))
        if is_pausing:
            waits.append(self._settings.cluster.retry_s)
        return min(waits, default=None)

    async def _work(self, key: Key) -> None:
        """Bring one pod as far as it goes now with short searches."""
        try:
            # All of it in one slot, what it is told included: a thousand pods in trouble at once must not take the connections from those that are in none.
            async with self._slots:
                await self._go(key, is_cheap=True)
        finally:
            self._queue.release(key)
            # Whatever was done or learned, and when this pod is due: it is looked at anew.
            self._changed()

    async def _work_costly(self, key: Key) -> None:
        """Bring one pod as far as it goes now, whatever it costs; only one at a time does so, and it takes no slot from the others."""
        turn = self._queue.costly.turn_of(key)
        try:
            await self._go(key, is_cheap=False)
        finally:
            if self._queue.costly.turn_of(key) == turn:
                self._queue.costly.drop(key)  # it has what it wanted, or waits for something else
            self._is_searching = False
            self._queue.release(key)
            self._changed()

    async def _go(self, key: Key, *, is_cheap: bool) -> None:
        """Take steps for a pod; after a peer's failure the same is tried again after a while."""
        self._queue.due.pop(key, None)
        try:
            await self._walk_guarded(key, is_cheap=is_cheap)
            self._queue.failures.pop(key, None)
        except (PeerUnavailable, HardwareError) as err:
            self._log.warning("pod.peer-silent", pod=f"{key[0]}/{key[1]}", error=str(err))
            self._queue.failures[key] = self._queue.failures.get(key, 0) + 1
            self._queue.wait(key)
            pod = self._state.pods.get(key)
            if pod is not None and err.facts.get("code") in _REFUSALS:
                await self._events.warn(pod, "WriteRefused", str(err))

    async def _walk_guarded(self, key: Key, *, is_cheap: bool) -> None:
        """Take steps; what is wrong with this pod or its claims concerns no other.

        Errors: raises PeerUnavailable and HardwareError of a peer, after which the same is tried again.
        """
        try:
            await self._walk(key, is_cheap=is_cheap)
        except (PeerUnavailable, HardwareError, InvariantError):
            raise
        except Exception as err:  # noqa: BLE001 - boundary: one pod; its neighbours' gates are opened whatever is wrong with it
            # Telling is a write, too, and may fail as any other.
            await self._waiting.set_aside(key, err)

    async def _walk(self, key: Key, *, is_cheap: bool) -> None:
        """Take steps until there is nothing to do now."""
        for number in range(_MOST_STEPS):
            pod = self._state.pods.get(key)
            if (
                pod is None
                or not self._queue.needs_work(key, pod)
                or not await self._step(key, pod, is_first=not number, is_cheap=is_cheap)
            ):
                return
        self._queue.wait(key)

    async def _step(self, key: Key, pod: Stored, *, is_first: bool, is_cheap: bool) -> bool:
        """Do one step, the first of this walk or a later one; False when there is nothing to do now."""
        versions = self._queue.versions_of(key)
        plan = pre_filter(pod.pod, lambda name: self._claim((key[0], name)), has_own_notes=False)
        if isinstance(plan, Blocked):
            await self._wait_for_objects(self._queue.blocked, key, pod, versions, _WAITING, plan.reasons)
            return False
        self._queue.blocked.pop(pod.uid, None)
        plan = self._with_class_alignment(plan)
        if plan.is_reserved:
            # Who made the writes before is about to make this one.
            return not (is_first and self._is_left(key, pod, Stage.FINISH)) and await self._open(key, pod)
        if not plan.pending:
            return await self._reserve(key, pod, plan)
        intents = self._intents.find(plan)
        for intent in intents:
            if intent.attempt.pod != plan.pod.uid:
                if self._queue.is_live(key, intent.attempt):
                    self._queue.seen[plan.pod.uid] = versions  # the other pod that shares the claim brings it further
                    return False
                await self._intents.withdraw(plan, (intent,), is_final=True)
                return True
        if not intents:
            if is_first and self._is_left(key, pod, Stage.PLAN):
                return False
            return await self._begin(key, pod, plan, versions, is_cheap=is_cheap)
        if len(intents) < len(plan.pending) or len({intent.attempt.node for intent in intents}) > 1:
            if self._intents.are_anothers(intents):
                # Or a living replica is between two of its writes: it gets its moment, as one does whose intents are whole.
                self._queue.wait(key)
                return False
            # A crash came between two intents of one pod: they are made anew, together.
            await self._intents.withdraw(plan, intents)
            return True
        done = await self._intents.commit(plan, intents, is_cheap=is_cheap)
        if isinstance(done, Refusal):
            await self._waiting.report(key, pod, "RefusedByNode", done.reasons)
        elif done is Progress.LATER:
            self._queue.wait(key)
        elif done is Progress.COSTLY:
            self._queue.put_behind(key)
        return done not in (Progress.LATER, Progress.COSTLY)

    async def _wait_for_objects(
        self, since: dict[str, float], key: Key, pod: Stored, versions: PodVersions, reason: str, reasons: tuple[Reason, ...]
    ) -> None:
        """Wait until an object is there, or is as it has to be, and tell so after a while.

        Shapes: since — by a pod's uid since when it waits for the like.
        """
        since_s = since.setdefault(pod.uid, self._clock.monotonic())
        if self._clock.monotonic() - since_s < _PATIENCE * self._settings.cluster.retry_s:
            # Claims, volumes and pods come by different watches, and claims made from templates come later: that is no trouble yet.
            self._queue.wait(key)
            return
        self._queue.seen[pod.uid] = versions
        await self._waiting.report(key, pod, reason, reasons)

    def _is_left(self, key: Key, pod: Stored, stage: Stage) -> bool:
        """Say whether a pod is left to another replica for a moment; it is looked at again after that, or when something about it changes."""
        wait_s = self._turns.wait_s(pod.uid, stage)
        if wait_s > 0:
            self._queue.due[key] = Due(self._clock.monotonic() + wait_s, self._queue.versions_of(key))
        return wait_s > 0

    async def _begin(self, key: Key, pod: Stored, plan: PodPlan, versions: PodVersions, *, is_cheap: bool) -> bool:
        """Choose a node and devices, and write the intents."""
        if not await self._intents.clear(plan):
            self._queue.wait(key)
            return False
        refused = self._intents.refused_nodes(pod, plan)
        room = self._state.room.changes
        freedoms = self._queue.freedoms() if not is_cheap else None
        again_s = self._queue.silence_s(plan.pod.uid)
        # A costly pod has its own pauses, so it is told each time.
        is_brief = is_cheap and again_s > 0 and not plan.allocated and not refused
        intents: list[Draft] = []
        if is_cheap:
            async with self._planning:
                chosen = await self._choose(pod, plan, refused, is_brief=is_brief, is_cheap=True)
                if isinstance(chosen, NodeFit):
                    intents = self._intents.begin(plan, chosen, refused)
        else:
            # Others plan meanwhile.
            chosen = await self._choose(pod, plan, refused, is_brief=False, is_cheap=False)
            async with self._planning:
                if key not in self._state.pods or self._queue.versions_of(key).own_versions != versions.own_versions:
                    # What was searched for is another by now; who changes a pod all the time has its turn behind the others each time.
                    self._queue.put_behind(key)
                    return False
                if isinstance(chosen, NodeFit):
                    intents = self._intents.begin(plan, chosen, refused)
        if isinstance(chosen, NodeFit):
            # Beside the writes of others: what is intended counts as taken already.
            await self._intents.write(intents)
            return True
        if chosen is None:
            # What a note says of the past must keep nobody from the devices while the pod waits for its turn.
            await self._intents.withdraw(plan, refused=refused)
            self._queue.put_behind(key)
            return False
        # Nothing is intended any more: what a note says of the past must keep nobody from the devices.
        await self._intents.withdraw(plan)
        if chosen.blockers:
            await self._wait_for_objects(self._queue.volumeless, key, pod, versions, "WaitingForVolumes", chosen.blockers)
            if any(blocker.code == VOLUME_IN_USE for blocker in chosen.blockers) and pod.uid in self._queue.seen:
                self._queue.wait_for_pods(key, self._queue.seen[pod.uid], room, self._settings.cluster.unschedulable_s, _PATIENCE)
            return False
        self._queue.volumeless.pop(pod.uid, None)
        if is_brief:
            # Explaining costs many searches: a pod that was told a moment ago is told again after a while, not at each change of the cluster.
            self._queue.seen[plan.pod.uid] = versions
            self._queue.due[key] = Due(self._clock.monotonic() + again_s, versions)
            return False
        if await self._make_room(key, pod, plan, chosen):
            return True
        self._queue.tell(plan.pod.uid, _PATIENCE * self._settings.cluster.retry_s)
        if not is_cheap and key in self._state.pods:
            # The claims as they are without their notes: it was just us who wrote them.
            versions = replace(versions, claims=self._queue.versions_of(key).claims)
        self._queue.seen[plan.pod.uid] = versions
        if refused:
            # Every other node was tried: those that the scheduler refused are worth another look later.
            self._queue.due[key] = Due(self._clock.monotonic() + self._settings.cluster.unschedulable_s, None)
        elif any(
            isinstance(miss.outcome, NoFit) and any(why.code in PLACEMENT_CODES for why in miss.outcome.reasons) for miss in chosen.misses
        ):
            self._queue.wait_for_pods(key, versions, room, self._settings.cluster.unschedulable_s, _PATIENCE)
        reason, reasons = explain_choice(chosen.misses)
        self._metrics.decisions.labels("refused").inc()
        await self._waiting.report(key, pod, reason, (*reasons, *chosen.advice))
        if not is_cheap:
            # The pod as it is now that it has been told; what is free as it was before the search, so that nothing freed meanwhile is missed.
            self._queue.costly.tried(
                key, self._queue.seen.get(plan.pod.uid, versions).own_versions, freedoms, now_s=self._clock.monotonic()
            )
        return False

    async def _choose(
        self, pod: Stored, plan: PodPlan, refused: tuple[str, ...], *, is_brief: bool, is_cheap: bool
    ) -> NodeFit | NoNodeFits | None:
        excluded = self._intents.refusals.refused(plan.pod.uid)
        return await self._chooser.choose(pod.pod, plan, refused=refused, excluded=excluded, is_brief=is_brief, is_cheap=is_cheap)

    async def _make_room(self, key: Key, pod: Stored, plan: PodPlan, chosen: NoNodeFits) -> bool:
        """Take back an allocation of ours that keeps the pod's other claims from fitting: behind its gate no scheduler counts on it."""
        outcome = post_filter(plan, chosen.misses)
        if not isinstance(outcome, TakeBack) or not pod.pod.has_gate:
            return False
        claim_key = (key[0], outcome.claim.name)
        claim = self._state.claims.get(claim_key)
        if claim is None or self._state.gated_pods.note(claim_key) is None or not claim.claim.is_allocated:
            return False
        await self._deallocation.deallocate(claim_key, claim, f"pod {plan.pod}: {outcome.why}")
        return True

    async def _reserve(self, key: Key, pod: Stored, plan: PodPlan) -> bool:
        """Reserve claims that somebody allocated before: shared ones."""
        planned = [
            (ObjectKey("resourceclaim", key[0], pod_claim.name), Stored(version_of(pod_claim.claim.object), pod_claim.claim.object))
            for pod_claim in plan.allocated
        ]
        reserved = await self._intents.committer.reserve(plan.pod, planned)
        if isinstance(reserved, Reason):
            self._queue.seen[pod.uid] = self._queue.versions_of(key)
            await self._waiting.report(key, pod, _WAITING, (reserved,))
            return False
        return True

    async def _open(self, key: Key, pod: Stored) -> bool:
        """Open the gate: all that the pod waited for is there."""
        if not pod.pod.has_gate:
            return False
        is_told = has_allocated_condition(pod.value)
        if is_told and await self._condition.write(key, pod, is_true=True, reason="Allocated", message=ALLOCATED) is not None:
            return True
        if await self._writer.write(ObjectKey("pod", *key), pod.revision, without_gate(pod.value)) is not None:
            self._log.info("gate.opened", pod=f"{key[0]}/{key[1]}")
        return True

    def _claim(self, key: Key) -> Claim | None:
        claim = self._state.claims.get(key)
        return claim.claim if claim is not None else None

    def _with_class_alignment(self, plan: PodPlan) -> PodPlan:
        """Let classes wish for claims that say nothing of their alignment themselves.

        Errors: raises ContractError for a class that nobody can read, and for classes that disagree.
        """
        classes = self._state.classes
        wished = tuple(replace(claim, wishes=read_alignment_request(claim.spec, claim.claim.shown, classes)) for claim in plan.claims)
        return replace(plan, claims=wished)

    def _expire_refusals(self, pending: Collection[Key]) -> None:
        for uid in self._intents.refusals.expire(
            now_s=self._clock.monotonic(), is_done=lambda uid: self._state.gated_pods.pod_of(str(uid)) not in pending
        ):
            self._queue.seen.pop(str(uid), None)
            pod = self._state.gated_pods.pod_of(str(uid))
            if pod is not None:
                self._queue.costly.drop(pod)
                self._queue.touch(pod)
