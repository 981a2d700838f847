"""Opens the gates of pods: brings each pod one write further until its claims are allocated and reserved and its gate is open, or it is told why not.

The order of writes is: intents and finalizers into all claims, the node's ledger, allocation and reservation into each status, the gate off the pod. Any of them may be
the last that a replica does: whoever finds the pod reads from its claims how far it came.

A pod that needs more than a short search is put behind all others (`CostlyWork`). Such searches are made one at a time, beside the rest: they hold neither the order of
planning nor a slot, so a pod with a cheap claim never waits for one. What others took meanwhile is found out when the intent is made true, as with another replica.

A pod whose gate is open already is brought further too as long as it has no node and a claim of ours was taken back: then the claim is allocated elsewhere.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

from topobus.controller.claims import gated_claims
from topobus.controller.claims.gate import has_gate, version_of
from topobus.controller.claims.objects import Claim
from topobus.controller.claims.stored import Stored
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.reconcilers.allocation_intents import Intents, Progress
from topobus.controller.reconcilers.deallocate_claims import ClusterDeallocation
from topobus.controller.reconcilers.gated_pod_queue import Due, GatedPodQueue, Sight
from topobus.controller.reconcilers.node_choice import NodeChooser, NoNodeFits
from topobus.controller.scheduling.aligned_allocation import read_wishes
from topobus.controller.scheduling.decisions import (
    Blocked,
    NodeFit,
    PodPlan,
    TakeBack,
    explain_misses,
    post_filter,
    pre_filter,
)
from topobus.controller.state.api_server_state import ApiServerState, Key
from topobus.controller.store.api_server_store import ApiServerWriter
from topobus.controller.store.cluster_events import EventRecorder
from topobus.domain.errors import ContractError, HardwareError, InvariantError, PeerUnavailable
from topobus.domain.outcome import Reason, Refusal
from topobus.kubernetes.api.objects import metadata_of
from topobus.runtime.clock import Clock
from topobus.runtime.logging import get_logger

__all__ = ["GatedPodReconciler"]

# Writes that one pod may need in a row: intents, statuses and the gate of a pod with very many claims come back in the next round.
_MOST_STEPS = 8
_WAITING = "WaitingForClaims"
# Answers of the API server that a person must do something about: a right is missing, or it finds what we write invalid.
_REFUSALS = (400, 403, 422)
# Times `cluster.retry_s` for which a pod may wait for its claims before it is told so, and between two explanations of why it does not fit.
_PATIENCE = 5


class GatedPodReconciler:
    """Reconciles gated pods, several at a time."""

    def __init__(
        self,
        settings: ControllerSettings,
        clock: Clock,
        world: ApiServerState,
        writer: ApiServerWriter,
        intents: Intents,
        deallocation: ClusterDeallocation,
        chooser: NodeChooser,
        events: EventRecorder,
        metrics: ControllerMetrics,
        changed: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._world = world
        self._writer = writer
        self._intents = intents
        self._deallocation = deallocation
        self._chooser = chooser
        self._events = events
        self._metrics = metrics
        self._changed = changed
        self._queue = GatedPodQueue(clock, world, settings.cluster.retry_s)
        self._is_searching = False
        """Whether a costly search is under way."""
        self._planning = asyncio.Lock()
        self._slots = asyncio.Semaphore(settings.cluster.parallel_pods)
        self._log = get_logger()

    def start_all(self, group: asyncio.TaskGroup) -> float | None:
        """Begin to work on every pod that may be brought further; gives after how many seconds a pod waits for time and not for a change."""
        self._forgive()
        self._intents.forget()
        keys = self._queue.ours()
        self._metrics.waiting.set(len(keys))
        waits = [self._settings.cluster.retry_s] if self._intents.refusals.is_waiting else []
        ready, wait_s = self._queue.take_ready(keys)
        for key in ready:
            group.create_task(self._work(key))
        if wait_s is not None:
            waits.append(wait_s)
        turn, is_pausing = self._queue.take_costly(set(keys), is_searching=self._is_searching)
        if turn is not None:
            self._is_searching = True
            group.create_task(self._work_costly(turn))
        if is_pausing:
            waits.append(self._settings.cluster.retry_s)
        self._queue.keep(keys)
        return min(waits, default=None)

    async def _work(self, key: Key) -> None:
        """Bring one pod as far as it goes now with short searches."""
        try:
            # All of it in one slot, what it is told included: a thousand pods in trouble at once must not take the connections from those that are in none.
            async with self._slots:
                await self._go(key, is_cheap=True)
        finally:
            self._queue.busy.discard(key)
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
            self._queue.busy.discard(key)
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
            pod = self._world.pods.get(key)
            if pod is not None and err.facts.get("code") in _REFUSALS:
                await self._events.warn(pod.value, "WriteRefused", str(err))

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
            await self._tell_malformed(key, err)

    async def _walk(self, key: Key, *, is_cheap: bool) -> None:
        """Take steps until there is nothing to do now."""
        for _ in range(_MOST_STEPS):
            pod = self._world.pods.get(key)
            if pod is None or not self._queue.is_ours(key, pod) or not await self._step(key, pod, is_cheap=is_cheap):
                return
        self._queue.wait(key)

    async def _tell_malformed(self, key: Key, err: Exception) -> None:
        """Set a pod aside until something about it changes, and tell it why; one that cannot even be told is only logged."""
        name = f"{key[0]}/{key[1]}"
        if isinstance(err, ContractError):
            message = str(err)
            self._log.warning("pod.set-aside", pod=name, error=message)
        else:
            message = f"the controller cannot work with pod {name} and its claims ({type(err).__name__}: {err}); it is set aside until one of them changes"
            self._log.error("pod.set-aside", pod=name, error=message, exc_info=err)
        self._metrics.malformed.inc()
        self._metrics.set_aside.labels("gated-pods").inc()
        pod = self._world.pods.get(key)
        if pod is None:
            return
        self._queue.seen[pod.uid] = self._queue.sight(key)
        try:
            await self._tell(key, pod, "Malformed", (Reason(code="malformed", message=message),))
        except ContractError as untold:
            # What the server keeps of it cannot be read: the next version of it is looked at again.
            self._log.warning("pod.untold", pod=name, error=str(untold))

    async def _step(self, key: Key, pod: Stored, *, is_cheap: bool) -> bool:
        """Do one step; False when there is nothing to do now."""
        sight = self._queue.sight(key)
        plan = pre_filter(pod.pod, lambda name: self._bare((key[0], name)))
        if isinstance(plan, Blocked):
            self._queue.seen[pod.uid] = sight
            since_s = self._queue.blocked.setdefault(pod.uid, self._clock.monotonic())
            if self._clock.monotonic() - since_s < _PATIENCE * self._settings.cluster.retry_s:
                # Claims and pods come by different watches, and claims made from templates come later: that is no trouble yet.
                del self._queue.seen[pod.uid]
                self._queue.wait(key)
            else:
                await self._tell(key, pod, _WAITING, plan.reasons)
            return False
        self._queue.blocked.pop(pod.uid, None)
        plan = self._with_wishes(plan)
        if plan.is_reserved:
            return await self._open(key, pod)
        if not plan.pending:
            return await self._reserve(key, pod, plan)
        intents = self._intents.find(plan)
        for pod_claim, note in intents:
            if note.pod != plan.pod.uid:
                if self._queue.is_alive(key, note):
                    self._queue.seen[plan.pod.uid] = sight  # the other pod that shares the claim brings it further
                    return False
                await self._intents.withdraw(plan, (pod_claim,), is_final=True)
                return True
        if not intents:
            return await self._begin(key, pod, plan, sight, is_cheap=is_cheap)
        if len(intents) < len(plan.pending) or len({note.node for _, note in intents}) > 1:
            if self._intents.are_anothers(intents):
                # Or a living replica is between two of its writes: it gets its moment, as one does whose intents are whole.
                self._queue.wait(key)
                return False
            # A crash came between two intents of one pod: they are made anew, together.
            await self._intents.withdraw(plan, tuple(pod_claim for pod_claim, _ in intents))
            return True
        done = await self._intents.commit(plan, intents, is_cheap=is_cheap)
        if isinstance(done, Refusal):
            await self._tell(key, pod, "RefusedByNode", done.reasons)
        elif done is Progress.LATER:
            self._queue.wait(key)
        elif done is Progress.COSTLY:
            self._queue.put_behind(key)
        return done not in (Progress.LATER, Progress.COSTLY)

    async def _begin(self, key: Key, pod: Stored, plan: PodPlan, sight: Sight, *, is_cheap: bool) -> bool:
        """Choose a node and devices, and write the intents."""
        if not await self._intents.clear(plan):
            self._queue.wait(key)
            return False
        refused = self._intents.refused_nodes(pod, plan)
        freedoms = self._queue.freedoms() if not is_cheap else None
        again_s = self._queue.told.get(plan.pod.uid, -math.inf) + _PATIENCE * self._settings.cluster.retry_s - self._clock.monotonic()
        # A costly pod has its own pauses, so it is told each time.
        is_brief = is_cheap and again_s > 0 and not plan.allocated and not refused
        if is_cheap:
            async with self._planning:
                chosen = await self._choose(pod, plan, refused, is_brief=is_brief, is_cheap=True)
                if isinstance(chosen, NodeFit):
                    await self._intents.write(plan, chosen, refused)
        else:
            # Others plan meanwhile.
            chosen = await self._choose(pod, plan, refused, is_brief=False, is_cheap=False)
            async with self._planning:
                if key not in self._world.pods or self._queue.sight(key).own != sight.own:
                    # What was searched for is another by now; who changes a pod all the time has its turn behind the others each time.
                    self._queue.put_behind(key)
                    return False
                if isinstance(chosen, NodeFit):
                    await self._intents.write(plan, chosen, refused)
        if isinstance(chosen, NodeFit):
            return True
        if chosen is None:
            # What a note says of the past must keep nobody from the devices while the pod waits for its turn.
            await self._intents.withdraw(plan, plan.pending, refused=refused)
            self._queue.put_behind(key)
            return False
        # Nothing is intended any more: what a note says of the past must keep nobody from the devices.
        await self._intents.withdraw(plan, plan.pending)
        if is_brief:
            # Explaining costs many searches: a pod that was told a moment ago is told again after a while, not at each change of the cluster.
            self._queue.seen[plan.pod.uid] = sight
            self._queue.due[key] = Due(self._clock.monotonic() + again_s, sight)
            return False
        if await self._make_room(key, pod, plan, chosen):
            return True
        self._queue.told[plan.pod.uid] = self._clock.monotonic()
        if not is_cheap and key in self._world.pods:
            # The claims as they are without their notes: it was just us who wrote them.
            sight = replace(sight, claims=self._queue.sight(key).claims)
        self._queue.seen[plan.pod.uid] = sight
        if refused:
            # Every other node was tried: those that the scheduler refused are worth another look later.
            self._queue.due[key] = Due(self._clock.monotonic() + self._settings.cluster.unschedulable_s, None)
        reason, reasons = explain_misses(chosen.misses)
        self._metrics.decisions.labels("refused").inc()
        await self._tell(key, pod, reason, (*reasons, *chosen.advice))
        if not is_cheap:
            # The pod as it is now that it has been told; what is free as it was before the search, so that nothing freed meanwhile is missed.
            self._queue.costly.tried(key, self._queue.seen.get(plan.pod.uid, sight).own, freedoms, now_s=self._clock.monotonic())
        return False

    async def _choose(
        self, pod: Stored, plan: PodPlan, refused: tuple[str, ...], *, is_brief: bool, is_cheap: bool
    ) -> NodeFit | NoNodeFits | None:
        excluded = self._intents.refusals.refused(plan.pod.uid)
        return await self._chooser.choose(pod.value, plan, refused=refused, excluded=excluded, is_brief=is_brief, is_cheap=is_cheap)

    async def _make_room(self, key: Key, pod: Stored, plan: PodPlan, chosen: NoNodeFits) -> bool:
        """Take back an allocation of ours that keeps the pod's other claims from fitting: behind its gate no scheduler counts on it."""
        found = post_filter(plan, chosen.misses)
        claim = self._world.claims.get((key[0], found.claim.name)) if isinstance(found, TakeBack) else None
        if (
            claim is None
            or not has_gate(pod.value)
            or self._world.book.note((key[0], metadata_of(claim).name)) is None
            or not claim.status.get("allocation")
        ):
            return False
        why = found.why if isinstance(found, TakeBack) else ""
        await self._deallocation.deallocate((key[0], metadata_of(claim).name), claim, f"pod {plan.pod}: {why}")
        return True

    async def _reserve(self, key: Key, pod: Stored, plan: PodPlan) -> bool:
        """Reserve claims that somebody allocated before: shared ones."""
        for pod_claim in plan.allocated:
            claim = self._world.claims.get((key[0], pod_claim.name))
            if claim is None or any(user.uid == plan.pod.uid for user in pod_claim.consumers):
                continue
            patch = gated_claims.reservation_patch(claim, plan.pod)
            if isinstance(patch, Reason):
                self._queue.seen[pod.uid] = self._queue.sight(key)
                await self._tell(key, pod, _WAITING, (patch,))
                return False
            if await self._writer.claim((key[0], pod_claim.name), patch, part="status") is None:
                return True
        return True

    async def _open(self, key: Key, pod: Stored) -> bool:
        """Open the gate: all that the pod waited for is there."""
        if not has_gate(pod.value):
            return False
        condition_patch = gated_claims.condition_patch(
            pod.value, is_true=True, reason="Allocated", message="its claims are allocated and reserved", now=self._now()
        )
        if condition_patch is not None and gated_claims.has_condition(pod.value):
            await self._writer.pod(key, condition_patch, part="status")
            return True
        if await self._writer.pod(key, gated_claims.gate_patch(pod.value)) is not None:
            self._log.info("gate.opened", pod=f"{key[0]}/{key[1]}")
        return True

    async def _tell(self, key: Key, pod: Stored, reason: str, reasons: tuple[Reason, ...]) -> None:
        """Tell why a pod waits: a condition of the pod, and events of the pod and its claims; each once."""
        message = "; ".join(each_reason.message for each_reason in reasons)
        self._log.info("pod.waiting", pod=f"{key[0]}/{key[1]}", reason=reason, why=message)
        patch = gated_claims.condition_patch(pod.value, is_true=False, reason=reason, message=message, now=self._now())
        api_object = await self._writer.pod(key, patch, part="status") if patch is not None else None
        if api_object is not None and pod.uid in self._queue.seen:
            # Only our own write is no news; what came meanwhile is.
            self._queue.seen[pod.uid] = replace(self._queue.seen[pod.uid], pod=version_of(api_object))
        await self._events.warn(pod.value, reason, message)
        for other_claim in self._world.claims_of(key):
            claim = self._world.claims.get(other_claim)
            if claim is not None and not claim.status.get("allocation"):
                await self._events.warn(claim, reason, message)

    def _bare(self, key: Key) -> Claim | None:
        """Show a claim without our note and without the wish for another mode, which the cluster does not know."""
        claim = self._world.claims.get(key)
        return Claim(gated_claims.without_note(claim)) if claim is not None else None

    def _with_wishes(self, plan: PodPlan) -> PodPlan:
        """Let classes wish for claims that say nothing of their alignment themselves.

        Errors: raises ContractError for a class that nobody can read, and for classes that disagree.
        """
        classes = self._world.classes
        wished = tuple(replace(claim, wishes=read_wishes(claim.spec, claim.claim.shown, classes)) for claim in plan.claims)
        return replace(plan, claims=wished)

    def _forgive(self) -> None:
        living = {self._world.pods[key].uid for key in self._queue.ours()}
        for uid in self._intents.refusals.forgive(now_s=self._clock.monotonic(), is_done=lambda key: key not in living):
            self._queue.seen.pop(str(uid), None)
            pod = self._world.book.pod_of(str(uid))
            if pod is not None:
                self._queue.costly.drop(pod)

    def _now(self) -> str:
        return self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")
