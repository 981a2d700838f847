"""The end of claims that we allocated, and where the cluster has nobody for it, their beginning too.

kube-controller-manager's resourceclaim controller makes claims from templates, prunes reservations of pods that ended, deallocates what nobody uses and deletes what
was made for a pod. Where it runs (`cluster.housekeeping = "cluster"`) all of that is left to it, and only what no one else knows is done here: intents of pods that
are gone are withdrawn. With `own` the same is done here for gated pods and the claims that we allocated, and for no others.

Flows in: the copy of the cluster. Flows out: writes, each bound to a version, so that doing it beside somebody else is no harm.
Source: k8s.io/kubernetes pkg/controller/resourceclaim, 1.36.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from functools import partial

from topobus.contracts.messages import ApiObject
from topobus.controller.claims import gated_claims
from topobus.controller.claims.gate import has_gate, is_over, version_of
from topobus.controller.claims.gated_claims import GateAttempt
from topobus.controller.claims.reservations import (
    Consumer,
    consumers_of,
)
from topobus.controller.claims.stored import ObjectKey
from topobus.controller.claims.templates import owner_pod_uid
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.reconcilers.deallocate_claims import ClusterDeallocation
from topobus.controller.reconcilers.make_claims import GatedPodClaims
from topobus.controller.reconcilers.object_boundary import ObjectBoundary
from topobus.controller.state.api_server_state import ApiServerState, Key
from topobus.controller.store.api import (
    PODS,
)
from topobus.controller.store.api_server_store import ApiServerWriter
from topobus.controller.store.cluster_events import EventRecorder
from topobus.domain.errors import ContractError
from topobus.domain.outcome import Reason
from topobus.kubernetes.api.objects import DELETE_PROTECTION, metadata_of, name_of
from topobus.runtime.clock import Clock
from topobus.runtime.logging import get_logger

__all__ = ["ClaimHousekeeping"]

# How long an intent's pod must be unknown before the intent is withdrawn: our copy of the pods may be a moment behind that of the claims.
_ORPHAN_S = 10.0


class ClaimHousekeeping:
    """Looks after claims whose pods are gone, and after pods whose claims are not made yet."""

    def __init__(
        self,
        clock: Clock,
        world: ApiServerState,
        writer: ApiServerWriter,
        deallocation: ClusterDeallocation,
        events: EventRecorder,
        metrics: ControllerMetrics,
        *,
        is_own: bool,
    ) -> None:
        self._clock = clock
        self._world = world
        self._writer = writer
        self._deallocation = deallocation
        self._gated_pod_claims = GatedPodClaims(clock, world, writer)
        self._events = events
        self._boundary = ObjectBoundary("housekeeping", metrics.set_aside)
        self._is_own = is_own
        self._orphans: dict[str, float] = {}
        self._log = get_logger()

    async def reconcile_all(self) -> float | None:
        """Look at every claim; gives after how many seconds another look is due."""
        orphans: dict[str, float] = {}
        looked_at: set[Hashable] = set()
        is_due = False
        for key in self._world.book.noted() if self._is_own else self._world.book.unallocated():
            claim, note = self._world.claims.get(key), self._world.book.note(key)
            if claim is not None and note is not None:
                is_due = await self._guard("end", key, claim, partial(self._look_at_claim, key, claim, note, orphans), looked_at) or is_due
        self._orphans = orphans
        if self._is_own:
            for key, pod in sorted((key, stored.value) for key, stored in self._world.pods.items()):
                if has_gate(pod) and not is_over(pod):
                    is_due = await self._guard("make", key, pod, partial(self._make, key, pod), looked_at) or is_due
            for key, claim in sorted(self._world.claims.items()):
                is_due = await self._guard("finish", key, claim, partial(self._finish, key, claim), looked_at) or is_due
        self._boundary.keep(looked_at)
        return 1.0 if orphans or is_due else None

    async def _guard(self, what: str, key: Key, guarded: ApiObject, work: Callable[[], Awaitable[bool]], looked_at: set[Hashable]) -> bool:
        """Do one piece of work for a claim or a pod; what goes wrong with it concerns no other."""

        async def report(reason: Reason) -> None:
            await self._events.warn(guarded, "Malformed", reason.message)

        looked_at.add((what, key))
        return await self._boundary.run((what, key), version_of(guarded), work, name=name_of(guarded), report=report)

    async def _look_at_claim(self, key: Key, claim: ApiObject, note: GateAttempt, orphans: dict[str, float]) -> bool:
        """Withdraw an intent whose pod is gone; where nobody else does it, end a claim that nobody uses any more."""
        other = self._world.book.pod_of(note.pod)
        pod = self._world.pods.get(other) if other is not None else None
        if not claim.status.get("allocation") and (pod is None or is_over(pod.value)):
            uid = metadata_of(claim).uid
            orphans[uid] = self._orphans.get(uid, self._clock.monotonic())
            is_late = self._clock.monotonic() - orphans[uid] >= _ORPHAN_S
            if is_late or pod is not None or self._world.is_taken_back(key):
                self._log.info("claim.withdrawn", claim=name_of(claim), why="its pod is gone")
                await self._writer.claim(key, gated_claims.withdrawal_patch(claim))
        elif self._is_own:
            await self._end(key, claim)
        return False

    async def _make(self, key: Key, pod: ApiObject) -> bool:
        """Make the claims of a gated pod."""
        await self._gated_pod_claims.make(key, pod)
        return False

    async def _end(self, key: Key, claim: ApiObject) -> None:
        """Prune reservations of pods that ended; when none is left, take the devices back."""
        users = consumers_of(claim)
        gone = frozenset([user.uid for user in users if await self._has_ended(key[0], user)])
        is_unused = len(gone) == len(users) and (bool(gone) or bool(metadata_of(claim).deletion_timestamp))
        if is_unused:
            await self._deallocation.deallocate(key, claim, "its pods have ended" if gone else "it is being deleted")
        elif gone:
            await self._writer.claim(key, gated_claims.unreservation_patch(claim, gone), part="status")

    async def _has_ended(self, namespace: str, user: Consumer) -> bool:
        """Say whether a user of a claim is a pod that has ended; one that our copy lacks is asked for."""
        if user.resource != "pods" or user.api_group:
            return False
        key = self._world.book.pod_of(user.uid)
        stored = self._world.pods.get(key) if key is not None else None
        api_object = stored.value if stored is not None else None
        if api_object is None:
            try:
                api_object = await self._writer.refresh(PODS, (namespace, user.name))
            except ContractError:
                return False  # nobody can read it, so it is there: what it has reserved stays reserved
        return api_object is None or metadata_of(api_object).uid != user.uid or is_over(api_object)

    async def _finish(self, key: Key, claim: ApiObject) -> bool:
        """Delete a claim made for a pod that has ended, and let go of a deleted one that holds nothing."""
        metadata = metadata_of(claim)
        if metadata.deletion_timestamp:
            if DELETE_PROTECTION in metadata.finalizers and not claim.status.get("allocation") and gated_claims.was_ours(claim):
                await self._writer.claim(key, gated_claims.protection_patch(claim))
            return False
        owner = owner_pod_uid(claim)
        if owner is None or not gated_claims.was_ours(claim):
            return False
        name = next((str(reference.get("name")) for reference in metadata.owner_references if reference.get("uid") == owner), "")
        has_ended = await self._has_ended(key[0], Consumer("pods", name, owner))
        if has_ended and await self._writer.delete(ObjectKey("resourceclaim", *key), version_of(claim)):
            self._log.info("claim.deleted", claim=name_of(claim), why="the pod that it was made for has ended")
        return False
