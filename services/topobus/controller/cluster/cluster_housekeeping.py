"""Ends unused claims that this controller allocated in a cluster, and creates claims where no other
controller does.

kube-controller-manager's resourceclaim controller makes claims from templates, prunes reservations
of ended pods, deallocates unused claims and deletes those made for a pod. Where it runs
(`cluster.housekeeping = "cluster"`), this module only withdraws intents of deleted pods, which that
controller cannot see. With `own` it does all of this for gated pods and for the claims that this
controller allocated, and for no others. Each write is conditional on a version, so two controllers
may do the same without harm.

Source: k8s.io/kubernetes pkg/controller/resourceclaim, 1.36.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from functools import partial

from topobus.controller.commit.deallocate_claims import ClusterDeallocation
from topobus.controller.commit.make_claims import GatedPodClaims
from topobus.controller.state.cluster.api_server_state import ApiServerState, Key
from topobus.controller.store.cluster_events import EventRecorder
from topobus.controller.store.protocol import ObjectStore
from topobus.engine.claims import attempts, lifecycle
from topobus.engine.claims.attempts import Attempt
from topobus.engine.claims.reservations import Consumer, without_reservations
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.claims.templates import owner_pod_uid
from topobus.formats.kubernetes.objects import DELETE_PROTECTION
from topobus.formats.messages.messages import ApiObject
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.process.work_queue import Again, Result, WorkQueue
from topobus.values.errors import ContractError
from topobus.values.outcome import Reason

__all__ = ["ClaimHousekeeping"]

# How long an intent's pod must be unknown before the intent is withdrawn: our copy of the pods may
# be a moment behind that of the claims.
_ORPHAN_S = 10.0


class ClaimHousekeeping:
    """Reconciles claims whose pods are deleted, and pods whose claims are not made yet."""

    def __init__(
        self,
        clock: Clock,
        state: ApiServerState,
        store: ObjectStore,
        deallocation: ClusterDeallocation,
        events: EventRecorder,
        queue: WorkQueue,
        *,
        is_own: bool,
    ) -> None:
        self._clock = clock
        self._state = state
        self._store = store
        self._deallocation = deallocation
        self._gated_pod_claims = GatedPodClaims(clock, state, store)
        self._events = events
        self._queue = queue
        self._is_own = is_own
        self._orphans: dict[str, float] = {}
        self._log = get_logger()

    async def reconcile_all(self) -> None:
        """Reconcile every claim."""
        orphans: dict[str, float] = {}
        looked_at: set[Hashable] = set()
        for key in self._state.gated_pods.noted() if self._is_own else self._state.gated_pods.unallocated():
            claim, note = self._state.claims.get(key), self._state.gated_pods.note(key)
            if claim is not None and note is not None:
                await self._guard(
                    "end", key, claim, partial(self._reconcile_claim, key, claim, note, orphans), looked_at
                )
        self._orphans = orphans
        if self._is_own:
            for key, pod in sorted(self._state.pods.items()):
                if pod.pod.has_gate and not pod.pod.is_over:
                    await self._guard("make", key, pod, partial(self._gated_pod_claims.make, key, pod), looked_at)
            for key, claim in sorted(self._state.claims.items()):
                await self._guard("finish", key, claim, partial(self._finish, key, claim), looked_at)
        self._queue.keep(looked_at)

    async def _guard(
        self, what: str, key: Key, guarded: Stored, work: Callable[[], Awaitable[Result]], looked_at: set[Hashable]
    ) -> None:
        """Do one piece of work for a claim or a pod, so that its failure does not affect the
        others.
        """

        async def report(reason: Reason) -> None:
            await self._events.warn(guarded, "Malformed", reason.message)

        looked_at.add((what, key))
        await self._queue.run((what, key), guarded.revision, work, name=guarded.shown, report=report)

    async def _reconcile_claim(self, key: Key, claim: Stored, note: Attempt, orphans: dict[str, float]) -> Result:
        """Withdraw an intent whose pod is gone.

        With housekeeping `own`, also end a claim that no pod uses any more.
        """
        other = self._state.gated_pods.pod_of(note.pod)
        pod = self._state.pods.get(other) if other is not None else None
        if not claim.claim.is_allocated and (pod is None or pod.pod.is_over):
            uid = claim.uid
            orphans[uid] = self._orphans.get(uid, self._clock.monotonic())
            is_late = self._clock.monotonic() - orphans[uid] >= _ORPHAN_S
            if is_late or pod is not None or self._state.is_taken_back(key):
                self._log.info("claim.withdrawn", claim=claim.shown, why="its pod is gone")
                await self._write(key, claim, attempts.without_attempt(claim.value))
            return Again()
        if self._is_own:
            await self._end(key, claim)
        return None

    async def _end(self, key: Key, claim: Stored) -> None:
        """Prune reservations of pods that ended. When none is left, deallocate the claim."""
        users = claim.claim.consumers
        gone = frozenset([user.uid for user in users if await self._has_ended(key[0], user)])
        is_unused = len(gone) == len(users) and (bool(gone) or claim.claim.is_deleting)
        if is_unused:
            await self._deallocation.deallocate(key, claim, "its pods have ended" if gone else "it is being deleted")
        elif gone:
            await self._write(key, claim, without_reservations(claim.value, gone))

    async def _has_ended(self, namespace: str, user: Consumer) -> bool:
        """Say whether a user of a claim is a pod that has ended.

        A pod that our copy lacks is read from the server.
        """
        if user.resource != "pods" or user.api_group:
            return False
        key = self._state.gated_pods.pod_of(user.uid)
        pod = self._state.pods.get(key) if key is not None else None
        if pod is None:
            try:
                pod = await self._store.read(ObjectKey("pod", namespace, user.name))
            except ContractError:
                return False  # it exists but cannot be read: its reservation stays
        return pod is None or pod.uid != user.uid or pod.pod.is_over

    async def _finish(self, key: Key, claim: Stored) -> None:
        """Delete a claim made for a pod that has ended, and remove the finalizer of a deleted one
        that holds nothing.
        """
        metadata = claim.metadata
        if metadata.deletion_timestamp:
            if (
                DELETE_PROTECTION in metadata.finalizers
                and not claim.claim.is_allocated
                and attempts.was_attempted(claim.value)
            ):
                await self._write(key, claim, lifecycle.without_protection(claim.value))
            return
        owner = owner_pod_uid(claim.value)
        if owner is None or not attempts.was_attempted(claim.value):
            return
        name = next(
            (str(reference.get("name")) for reference in metadata.owner_references if reference.get("uid") == owner), ""
        )
        has_ended = await self._has_ended(key[0], Consumer("pods", name, owner))
        if has_ended and await self._store.delete(ObjectKey("resourceclaim", *key), claim.revision):
            self._log.info("claim.deleted", claim=claim.shown, why="the pod that it was made for has ended")

    async def _write(self, key: Key, claim: Stored, value: ApiObject) -> None:
        await self._store.write(ObjectKey("resourceclaim", *key), claim.revision, value)
