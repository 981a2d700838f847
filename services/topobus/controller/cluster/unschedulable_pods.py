"""Deallocates claims of pods that kube-scheduler cannot place on their devices' node, and resolves
devices that were allocated twice at one moment.

kube-scheduler binds a pod whose claims are reserved without writing to them, so a binding may be in
progress. Hence there are two stages. First the reservation is removed, so that any later scheduling
has to write to the claim, and one of the two writers fails by the resource version. Then, after
`settle_s`, the pod is read, and the devices are deallocated only while it has no node. A pod that
was bound meanwhile gets its reservation back, and one that was bound later gets devices on that
node. After a crash the objects show the stage that was reached. A pod behind its gate is not being
scheduled, so its allocation is removed at once. The reconciler of gated pods then allocates
elsewhere. Allocations of kube-scheduler are never changed.

Most of kube-scheduler's rules are not checked before devices are allocated, so its refusal is what
tells that a node was wrong. The condition of a pod shows its words until the pod has a node.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

from topobus.controller.cluster.allocated_condition import ALLOCATED, AllocatedCondition
from topobus.controller.commit.deallocate_claims import ClusterDeallocation
from topobus.controller.config import ClusterSettings
from topobus.controller.state.cluster.api_server_state import ApiServerState, Key
from topobus.controller.store.cluster_events import EventRecorder
from topobus.controller.store.protocol import ObjectStore
from topobus.engine.allocation.values import DeviceId
from topobus.engine.claims.attempts import Attempt
from topobus.engine.claims.gate import REFUSED_BY_SCHEDULER, allocated_reason
from topobus.engine.claims.reservations import with_reservation, without_reservations
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.scheduling.kube_rules.scheduler_reasons import (
    is_preempting,
    is_unschedulable,
    scheduled_message,
)
from topobus.formats.messages.messages import ApiObject
from topobus.process.logging import get_logger
from topobus.process.work_queue import Again, Result, WorkQueue
from topobus.values.outcome import Reason

__all__ = ["UnschedulablePods"]

# How long kube-scheduler may evict other pods for this one. They end within 30 s by default
# (terminationGracePeriodSeconds).
_PREEMPTION_S = 60.0
# The longest pause after which kube-scheduler tries a pod again that something woke
# (podMaxBackoffSeconds). Until then its words may be about the node before.
_SCHEDULER_BACKOFF_S = 10.0


@dataclass(frozen=True)
class _OwnAllocation:
    """A claim that we allocated for a pod."""

    key: Key
    claim: Stored
    note: Attempt
    users: frozenset[str]


class UnschedulablePods:
    """Reconciles pods that have their devices and no node."""

    def __init__(
        self,
        settings: ClusterSettings,
        state: ApiServerState,
        store: ObjectStore,
        deallocation: ClusterDeallocation,
        condition: AllocatedCondition,
        events: EventRecorder,
        queue: WorkQueue,
    ) -> None:
        self._settings = settings
        self._state = state
        self._store = store
        self._deallocation = deallocation
        self._events = events
        self._condition = condition
        self._queue = queue
        self._log = get_logger()

    async def reconcile_all(self) -> None:
        """Check every pod."""
        doubles = self._yielding()
        looked_at: set[Hashable] = set()
        for key in sorted(self._state.gated_pods.placeless() | self._users_of(doubles)):
            pod = self._state.pods.get(key)
            if pod is None:
                continue
            looked_at.add(("pod", key))
            await self._queue.run(
                ("pod", key),
                self._versions(key, pod),
                partial(self._check_pod, key, pod, doubles, looked_at),
                name=pod.shown,
                report=partial(self._report, pod),
            )
        await self._report_doubles(looked_at)
        for key, before in tuple(self._state.unreleased.items()):
            looked_at.add(("let-go", key))
            version = (before.revision, self._state.is_taken_back(key))
            await self._queue.run(
                ("let-go", key), version, partial(self._deallocation.release, key, before), name=before.shown
            )
        self._queue.keep(looked_at)

    def _users_of(self, claims: frozenset[Key]) -> frozenset[Key]:
        """Name the pods for which we allocated these claims."""
        notes = (self._state.gated_pods.note(claim) for claim in claims)
        pods = (self._state.gated_pods.pod_of(note.pod) for note in notes if note is not None)
        return frozenset(pod for pod in pods if pod is not None)

    def _versions(self, key: Key, pod: Stored) -> Hashable:
        """Return the versions of a pod and its claims."""
        claims = [self._state.claims.get(claim_key) for claim_key in self._state.claims_of(key)]
        return pod.revision, tuple(claim.revision for claim in claims if claim is not None)

    async def _report(self, pod: Stored, reason: Reason) -> None:
        await self._events.warn(pod, "Malformed", reason.message)

    async def _check_pod(self, key: Key, pod: Stored, doubles: frozenset[Key], looked_at: set[Hashable]) -> Result:
        """Look at one pod that has its devices and no node, or that has not reserved them."""
        allocated = self._allocated_for(key, pod)
        if not allocated or pod.pod.is_over:
            return None
        await self._tell_refusal(key, pod, allocated)
        if pod.pod.node:
            await self._reserve_again(pod, [claim for claim in allocated if pod.uid not in claim.users])
            return None
        return await self._advance(
            key, pod, allocated, looked_at, is_double=bool(doubles & {claim.key for claim in allocated})
        )

    async def _tell_refusal(self, key: Key, pod: Stored, allocated: list[_OwnAllocation]) -> None:
        """Report in the pod's condition that kube-scheduler keeps it off its node, and remove that
        when it no longer does.
        """
        if not pod.pod.node and not pod.pod.has_gate and is_unschedulable(pod.value):
            is_shared = all(owned.users - {pod.uid} for owned in allocated)
            then = (
                "they stay there, because other pods use them"
                if is_shared
                else f"unless it does within {self._patience_s(pod, allocated):g} s, they are allocated elsewhere"
            )
            message = (
                f"its claims are allocated on node {allocated[0].note.node}, and kube-scheduler has not placed it "
                f"there: {scheduled_message(pod.value)}; {then}"
            )
            await self._condition.write(key, pod, is_true=True, reason=REFUSED_BY_SCHEDULER, message=message)
        elif allocated_reason(pod.value) == REFUSED_BY_SCHEDULER:
            await self._condition.write(key, pod, is_true=True, reason="Allocated", message=ALLOCATED)

    def _patience_s(self, pod: Stored, allocated: list[_OwnAllocation]) -> float:
        """Return for how long kube-scheduler may report a pod as unschedulable on this node."""
        if is_preempting(pod.value):
            return max(_PREEMPTION_S, self._settings.unschedulable_s)
        was_refused = any(owned.note.refused or owned.note.rounds for owned in allocated)
        return self._settings.unschedulable_s + (_SCHEDULER_BACKOFF_S if was_refused else 0.0)

    async def _advance(
        self,
        key: Key,
        pod: Stored,
        allocated: list[_OwnAllocation],
        looked_at: set[Hashable],
        *,
        is_double: bool,
    ) -> Result:
        """Advance the deallocation of one pod's claims."""
        uid = pod.uid
        number = max(owned.note.number for owned in allocated)
        ours = [owned for owned in allocated if owned.users <= {uid}]
        if pod.pod.has_gate:
            if is_double and len(ours) == len(allocated):
                await self._deallocate(pod, allocated, "a device was given to another claim as well")
            return None
        if not ours:
            return None  # other pods use them as well: they stay
        left = [owned for owned in ours if not owned.users]
        if left:
            if self._has_waited(("left", uid, number), self._settings.settle_s, looked_at):
                await self._second(key, pod, left)
            return None
        if is_double:
            await self._first(pod, ours, "a device was given to another claim as well")
            return Again(self._settings.settle_s)
        patience_s = self._patience_s(pod, allocated)
        wait = ("preempting" if is_preempting(pod.value) else "unschedulable", uid, number)
        if not is_unschedulable(pod.value) or not self._has_waited(wait, patience_s, looked_at):
            return None
        await self._first(
            pod, ours, f"kube-scheduler could not place the pod for {patience_s:g} s: {scheduled_message(pod.value)}"
        )
        return Again(self._settings.settle_s)

    def _has_waited(self, wait: tuple[str, str, int], for_s: float, looked_at: set[Hashable]) -> bool:
        """Say whether this has been so for long enough, as far as we have watched: a replica that
        has just started waits the whole time again.
        """
        looked_at.add(wait)
        if not self._queue.has_waited(wait, wait):
            self._queue.put(wait, Again(for_s, wait))
        return self._queue.is_due(wait)

    async def _first(self, pod: Stored, ours: list[_OwnAllocation], why: str) -> None:
        """Remove the reservations."""
        uid = pod.uid
        self._log.info("claim.unreserved", pod=pod.shown, claims=[owned.key[1] for owned in ours], why=why)
        for owned in ours:
            await self._write(owned, without_reservations(owned.claim.value, (uid,)))
        await self._events.warn(
            pod, "AllocationTakenBack", f"its devices are taken back, to be allocated elsewhere: {why}"
        )

    async def _second(self, key: Key, pod: Stored, left: list[_OwnAllocation]) -> None:
        """Take the devices back, or the reservation if the pod was bound after all."""
        now = await self._store.read(ObjectKey("pod", *key))
        if now is not None and now.uid == pod.uid and now.pod.node:
            await self._reserve_again(now, left)
        else:
            await self._deallocate(pod, left, "the pod has no node")

    async def _reserve_again(self, pod: Stored, left: list[_OwnAllocation]) -> None:
        """Reserve the claims of a bound pod again: its binding was in progress when the
        reservations were removed, and succeeded.
        """
        for owned in left:
            self._log.info("claim.reserved-again", claim=owned.claim.shown, pod=pod.shown, node=pod.pod.node)
            reserved = with_reservation(owned.claim.value, pod.pod.ref)
            if isinstance(reserved, Reason):
                await self._events.warn(pod, "ClaimFull", reserved.message)
                continue
            await self._write(owned, reserved)

    async def _write(self, owned: _OwnAllocation, value: ApiObject) -> None:
        await self._store.write(ObjectKey("resourceclaim", *owned.key), owned.claim.revision, value)

    async def _deallocate(self, pod: Stored, ours: list[_OwnAllocation], why: str) -> None:
        for owned in ours:
            await self._deallocation.deallocate(owned.key, owned.claim, f"{pod.shown}: {why}")

    def _allocated_for(self, key: Key, pod: Stored) -> list[_OwnAllocation]:
        """List the claims of a pod that we allocated for it."""
        uid = pod.uid
        claims = [self._own_allocation(claim) for claim in self._state.claims_of(key)]
        return [owned for owned in claims if owned is not None and owned.note.pod == uid]

    def _own_allocation(self, key: Key) -> _OwnAllocation | None:
        """Return a claim that we allocated. None for any other claim."""
        claim, note, users = (
            self._state.claims.get(key),
            self._state.gated_pods.note(key),
            self._state.gated_pods.users_of_ours(key),
        )
        if claim is None or note is None or users is None or claim.claim.is_deleting:
            return None
        return _OwnAllocation(key, claim, note, users)

    def _yielding(self) -> frozenset[Key]:
        """Of each device that two claims have, name the claims that must yield: ours to another
        component's, and of two of ours the later one.
        """
        yielding: set[Key] = set()
        for _, keys in self._state.doubles():
            ours = {key: claim for key in keys if (claim := self._own_allocation(key)) is not None}
            if len(ours) == len(keys):
                first = min(ours, key=lambda key: (_allocated_at(ours[key].claim), key))
                del ours[first]
            yielding |= ours.keys()
        return frozenset(yielding)

    async def _report_doubles(self, looked_at: set[Hashable]) -> None:
        """Report the claims that have one device together, in events on them. Where both pods run
        already, the node's ledger lets only the first one prepare.
        """
        for device, keys in self._state.doubles():
            looked_at.add(("double", device))
            await self._queue.run(
                ("double", device), keys, partial(self._report_double, device, keys), name=f"device {device}"
            )

    async def _report_double(self, device: DeviceId, keys: tuple[Key, ...]) -> None:
        message = (
            f"device {device} is allocated to {' and '.join(f'{namespace}/{name}' for namespace, name in keys)} at once"
        )
        for key in keys:
            claim = self._state.claims.get(key)
            if claim is not None:
                await self._events.warn(claim, "DoubleAllocation", message)


def _allocated_at(claim: Stored) -> str:
    allocation = claim.value.status.get("allocation")
    return str(allocation.get("allocationTimestamp") or "") if isinstance(allocation, dict) else ""
