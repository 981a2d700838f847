"""The scheduler's part of classic DRA in the stand-alone home: scheduling contexts of pods,
reservations, and requests for deallocation.

It does not bind pods. The pod scheduler does, once `waits` reports that a pod's classic claims are
ready. The decisions are made in `negotiation`.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Hashable
from functools import partial

from topobus.controller.classic.rules import classic_lifecycle, negotiation
from topobus.controller.classic.rules.negotiation import (
    Negotiate,
    PodClaimView,
    Ready,
    TakeBack,
    Wait,
)
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.nats_store import NatsStore
from topobus.engine.claims.reservations import ClaimUse, claim_uses
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.claims.templates import owner_pod_uid
from topobus.formats.kubernetes.classic import classic
from topobus.formats.kubernetes.classic.classic_limits import MAX_RESERVED
from topobus.formats.kubernetes.objects import admit, metadata_of, name_of
from topobus.formats.messages.messages import ApiObject
from topobus.formats.messages.nouns import CLUSTER
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.process.work_queue import Again, WorkQueue
from topobus.values.errors import ContractError
from topobus.values.outcome import Reason
from topobus.values.timestamps import rfc3339

__all__ = ["ClassicScheduler", "LookWithout"]

LookWithout = Callable[[ObjectKey, Collection[str]], Awaitable[tuple[tuple[str, ...], tuple[Reason, ...]]]]
"""On which nodes a pod could run without these of its `resourceClaims` entries, best first, and why
when there are none."""

# How long a waiting pod is left alone while no visible change happens.
_LOOK_AGAIN_S = 5.0
_ENDED = ("Succeeded", "Failed")


class ClassicScheduler:
    """Negotiates for pods with classic claims."""

    def __init__(self, runtime: Runtime, state: StandaloneState, nodes_without: LookWithout, queue: WorkQueue) -> None:
        self._queue = queue
        self._look_without = nodes_without
        self._clock = runtime.clock
        self._state = state
        self._store = NatsStore(runtime.bus, state)
        self._waiting: dict[ObjectKey, tuple[Reason, ...]] = {}
        self._uses: dict[ObjectKey, tuple[int, tuple[ClaimUse, ...]]] = {}
        self._log = get_logger()

    async def reconcile_all(self) -> None:
        """Bring every pod with classic claims one step further."""
        looked_at: set[Hashable] = set()
        for key, stored in self._state.classic_claims():
            drop = partial(self._drop_gone_users, key, stored)
            looked_at.add(("users", key))
            await self._queue.run(("users", key), (stored.revision, self._state.supply), drop, name=stored.shown)
        for key, stored in sorted(self._state.of_kind("podschedulingcontext").items()):
            looked_at.add(key)
            await self._queue.run(key, stored.revision, partial(self._drop_context, key, stored), name=stored.shown)
        pods = self._pods()
        self._waiting = {key: reasons for key, reasons in self._waiting.items() if key in pods}
        for key in pods:
            stored = self._state.objects[key]
            version = (self._seen(key, stored), self._state.shared_epoch)
            work = partial(self._reconcile, key, stored, version)
            looked_at.add(key)
            await self._queue.run(key, version, work, name=stored.shown)
            set_aside = self._queue.reason(key)
            if set_aside is not None:
                self._waiting[key] = (set_aside,)
        self._queue.keep(looked_at)
        self._uses = {key: use for key, use in self._uses.items() if key in self._state.objects}

    async def _reconcile(self, key: ObjectKey, stored: Stored, version: Hashable) -> Again:
        """Bring one pod one step further, and record why it waits."""
        try:
            self._waiting[key] = await self._schedule(key, stored)
        except ContractError as err:
            self._waiting[key] = (Reason(code="malformed", message=err.message),)
            return Again()
        # At the version before the step: a write made meanwhile, by this step or by others, is seen
        # in the next round. What drivers report of nodes may change unseen.
        return Again(_LOOK_AGAIN_S, version)

    def waits(self, pod: ObjectKey) -> tuple[Reason, ...]:
        """Return why a pod's classic claims are not all allocated and reserved for it.

        Empty when they are, or when it has none.

        Errors: raises ContractError for a claim that cannot be read.
        """
        stored = self._state.objects[pod]
        for use in self._uses_of(pod, stored):
            if not self._is_classic(pod, use):
                continue
            claim = self._state.objects.get(ObjectKey("resourceclaim", pod.namespace, use.claim))
            status = classic_lifecycle.status_of(claim.value) if claim is not None else classic.ClaimStatus()
            if (
                status.allocation is None
                or status.deallocation_requested
                or not classic_lifecycle.is_reserved_for(status, stored.value)
            ):
                waiting = Reason(
                    code="waits-for-claims",
                    message=f"its classic claim {use.claim or use.entry} is not allocated to it yet",
                )
                return self._waiting.get(pod) or (waiting,)
        return ()

    async def take_back(self, key: ObjectKey) -> bool:
        """Give up an allocation that no other pod uses, because the pod does not fit where it is.

        False when the write lost its compare-and-set.

        Errors: raises AmbiguousWrite.
        """
        stored = self._state.objects[key]
        uids = frozenset(
            consumer_reference.uid for consumer_reference in classic_lifecycle.status_of(stored.value).reserved_for
        )
        asked = classic_lifecycle.with_deallocation_request(
            classic_lifecycle.without_reservations(stored.value, uids, asks_back=True)
        )
        self._log.info("claim.taken-back", claim=name_of(asked))
        return await self._store.write(key, stored.revision, asked) is not None

    def _seen(self, key: ObjectKey, stored: Stored) -> Hashable:
        """Return the version of what a pod's next step depends on: the pod, its context, its
        claims, and the free devices.
        """
        keys = [ObjectKey("podschedulingcontext", key.namespace, key.name)]
        keys += [ObjectKey("resourceclaim", key.namespace, use.claim) for use in self._uses_of(key, stored)]
        revisions = tuple(
            self._state.objects[object_key].revision if object_key in self._state.objects else 0 for object_key in keys
        )
        return stored.revision, revisions, self._state.supply

    def _uses_of(self, key: ObjectKey, stored: Stored) -> tuple[ClaimUse, ...]:
        """List a pod's claims, parsed once per revision. Empty for a pod that cannot be read."""
        uses = self._uses.get(key)
        if uses is None or uses[0] != stored.revision:
            uses = self._uses[key] = stored.revision, _uses(stored.value)
        return uses[1]

    def _pods(self) -> list[ObjectKey]:
        """List the pods that wait for a node and have a classic claim, oldest first."""
        pods: list[tuple[str, ObjectKey]] = []
        for key, stored in self._state.of_kind("pod").items():
            if stored.pod.is_bound or stored.metadata.deletion_timestamp:
                continue
            if any(self._is_classic(key, use) for use in self._uses_of(key, stored)):
                pods.append((str(stored.value.metadata.get("creationTimestamp") or ""), key))
        return [key for _, key in sorted(pods)]

    def _is_classic(self, pod: ObjectKey, use: ClaimUse) -> bool:
        kind, name = ("resourceclaim", use.claim) if use.claim else ("resourceclaimtemplate", use.template)
        stored = self._state.objects.get(ObjectKey(kind, pod.namespace, name))
        return stored is not None and classic.is_classic(stored.value)

    async def _schedule(self, key: ObjectKey, stored: Stored) -> tuple[Reason, ...]:
        """Take the next step for one pod, and return why it waits."""
        pod = stored.value
        views: list[PodClaimView] = []
        keys: dict[str, ObjectKey] = {}
        for use in stored.pod.uses:
            if not self._is_classic(key, use):
                continue
            claim_key = ObjectKey("resourceclaim", key.namespace, use.claim)
            stored_claim = self._state.objects.get(claim_key)
            if stored_claim is None or stored_claim.metadata.deletion_timestamp:
                return (
                    Reason(
                        code="claim-missing",
                        message=f"claim {use.claim or use.entry} is not there yet, or is being deleted",
                    ),
                )
            if use.is_generated and owner_pod_uid(stored_claim.value) != stored.uid:
                return (Reason(code="claim-of-another", message=f"claim {use.claim} was made for another pod"),)
            views.append(self._view(pod, use, stored_claim.value))
            keys[use.claim] = claim_key
        context_key = ObjectKey("podschedulingcontext", key.namespace, key.name)
        context = self._state.objects.get(context_key)
        if context is not None and owner_pod_uid(context.value) != stored.uid:
            return (
                Reason(
                    code="context-of-another", message="its PodSchedulingContext is that of another pod of its name"
                ),
            )
        spec = negotiation.read_spec(context.value) if context is not None else None
        unsuitable = negotiation.unsuitable_by_claim(context.value) if context is not None else {}
        nodes, why = await self._look_without(key, {view.entry for view in views})
        step = negotiation.next_step(views, nodes, spec, unsuitable, self._rivals(context_key))
        if isinstance(step, Negotiate):
            await self._negotiate(context_key, context, pod, step)
            message = f"its claims are negotiated{f' on {step.selected}' if step.selected else ''}"
            return step.reasons or (Reason(code="negotiating", message=message),)
        if isinstance(step, TakeBack):
            await self.take_back(keys[step.claim])
            return step.reasons
        if isinstance(step, Wait):
            return why or step.reasons
        return await self._reserve(pod, keys, step)

    def _rivals(self, context_key: ObjectKey) -> Counter[str]:
        """Count how many other pods are negotiating for each node."""
        others = (
            stored.value for key, stored in self._state.of_kind("podschedulingcontext").items() if key != context_key
        )
        return Counter(str(node) for api_object in others if (node := api_object.spec.get("selectedNode")))

    def _view(self, pod: ApiObject, use: ClaimUse, claim: ApiObject) -> PodClaimView:
        spec, status = classic_lifecycle.read_claim(claim), classic_lifecycle.status_of(claim)
        if status.allocation is not None:
            nodes = status.allocation.available_on_nodes
        else:
            stored = self._state.objects.get(ObjectKey("resourceclass", CLUSTER, spec.resource_class_name))
            nodes = classic_lifecycle.read_class(stored.value).suitable_nodes if stored is not None else None
        return PodClaimView(
            entry=use.entry,
            name=use.claim,
            is_delayed=classic.mode_of(spec) == classic.WAIT_FOR_FIRST_CONSUMER,
            is_allocated=status.allocation is not None,
            nodes=nodes,
            is_mine=classic_lifecycle.is_reserved_for(status, pod) and not status.deallocation_requested,
            is_free=classic_lifecycle.is_free_for(status, MAX_RESERVED),
            is_used_by_others=any(
                consumer_reference.uid != metadata_of(pod).uid for consumer_reference in status.reserved_for
            ),
        )

    async def _negotiate(self, key: ObjectKey, stored: Stored | None, pod: ApiObject, step: Negotiate) -> None:
        """Write the scheduler's selection into the pod's context."""
        if stored is None:
            # A name made of the pod's uid: two replicas make the same context.
            identity = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{metadata_of(pod).uid}/context"))
            fresh = admit(negotiation.context_for(pod), uid=identity, now=rfc3339(self._clock.now()))
            await self._store.write(key, 0, negotiation.with_spec(fresh, step))
            return
        api_object = negotiation.with_spec(stored.value, step)
        if api_object.spec != stored.value.spec:
            self._log.info("pod.negotiated", pod=name_of(pod), selected=step.selected, potential=len(step.potential))
            await self._store.write(key, stored.revision, api_object)

    async def _reserve(self, pod: ApiObject, keys: dict[str, ObjectKey], step: Ready) -> tuple[Reason, ...]:
        """Reserve all claims for the pod."""
        # All pods reserve in the same order, so none waits for a claim while it keeps a later one.
        for claim_key in sorted(keys.values()):
            stored = self._state.objects[claim_key]
            reserved = classic_lifecycle.with_reservation(stored.value, pod)
            if reserved is not stored.value and await self._store.write(claim_key, stored.revision, reserved) is None:
                return (Reason(code="negotiating", message="its claims are being reserved"),)
        self._log.debug("pod.claims-ready", pod=name_of(pod), nodes=list(step.nodes))
        return ()

    async def _drop_gone_users(self, key: ObjectKey, stored: Stored) -> None:
        """Take pods out of a claim's reservedFor that are gone or have ended.

        A delayed claim without users is requested back.
        """
        if not self._has_gone_users(key, stored.value):
            return
        try:
            users = classic_lifecycle.status_of(stored.value).reserved_for
            gone = frozenset(
                [user.uid for user in users if user.resource == "pods" and await self._is_gone(key.namespace, user)]
            )
            is_delayed = (
                bool(gone)
                and classic.mode_of(classic_lifecycle.read_claim(stored.value)) == classic.WAIT_FOR_FIRST_CONSUMER
            )
        except ContractError:
            return  # its driver's reconciler reports it
        if gone:
            self._log.info("claim.users-dropped", claim=stored.shown, users=sorted(gone))
            await self._store.write(
                key, stored.revision, classic_lifecycle.without_reservations(stored.value, gone, asks_back=is_delayed)
            )

    def _has_gone_users(self, key: ObjectKey, claim: ApiObject) -> bool:
        """Say, without parsing the claim, whether it is reserved for a pod that is not stored or
        has ended.
        """
        users = claim.status.get("reservedFor")
        for user in users if isinstance(users, list) else ():
            pod = (
                self._state.objects.get(ObjectKey("pod", key.namespace, str(user.get("name"))))
                if isinstance(user, dict)
                else None
            )
            if (
                pod is None
                or pod.value.metadata.get("uid") != user.get("uid")
                or pod.value.status.get("phase") in _ENDED
            ):
                return True
        return False

    async def _is_gone(self, namespace: str, user: classic.ConsumerReference) -> bool:
        """Say whether a pod no longer uses its claims: it ended, or the store has no such pod
        either.
        """
        key = ObjectKey("pod", namespace, user.name)
        stored = self._state.objects.get(key)
        if stored is not None and stored.uid == user.uid:
            return stored.value.status.get("phase") in _ENDED
        entry = await self._store.read(key)
        return entry is None or metadata_of(entry.value).uid != user.uid

    async def _drop_context(self, key: ObjectKey, stored: Stored) -> None:
        """Delete a context whose pod is gone or has its node."""
        pod = self._state.objects.get(ObjectKey("pod", key.namespace, key.name))
        is_needed = pod is not None and pod.uid == owner_pod_uid(stored.value) and not pod.pod.is_bound
        if not is_needed and owner_pod_uid(stored.value) is not None:
            await self._store.delete(key, stored.revision)


def _uses(pod: ApiObject) -> tuple[ClaimUse, ...]:
    try:
        return claim_uses(pod)
    except ContractError:
        return ()
