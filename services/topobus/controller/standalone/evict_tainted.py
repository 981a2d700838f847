"""Evicts claims from tainted devices: deallocates claims whose devices carry a taint that they do
not tolerate, and marks their pods for deletion.

Taints come from drivers and from rules. An eviction publishes an event that names the pods, marks
the pods for deletion with the condition of Kubernetes' device taint eviction, and marks the claim
for deallocation. Each rule's condition shows the progress. A service that does not answer evicts
nothing. Every step may be repeated: the event's id is derived from the claim's allocation, and the
marks are in the objects.
"""

from __future__ import annotations

from collections.abc import Hashable
from datetime import datetime
from functools import partial

from topobus.controller.classic.rules import classic_lifecycle
from topobus.controller.commit.deallocate_claims import ClaimDeallocation
from topobus.controller.commit.decision_publisher import DecisionPublisher
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.nats_store import NatsStore
from topobus.engine.allocation.tolerations import TaintRule
from topobus.engine.allocation.values import DeviceId
from topobus.engine.claims import attempts, lifecycle
from topobus.engine.claims.eviction import (
    Eviction,
    next_eviction,
    reason_of,
    rule_condition,
)
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.shapes.shape_parts import without_shapes
from topobus.formats.kubernetes.classic.classic import is_classic
from topobus.formats.kubernetes.objects import ask_deletion
from topobus.formats.kubernetes.resource import AllocationResult, Taint
from topobus.formats.messages.nouns import CLUSTER
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.process.work_queue import Again, Result, WorkQueue
from topobus.values.dra_names import node_of_pool
from topobus.values.errors import ContractError
from topobus.values.outcome import Reason, Refusal
from topobus.values.timestamps import moment_of, rfc3339

__all__ = ["Evictor"]

_DISRUPTION = "DisruptionTarget"
_BY_TAINT = "DeletionByDeviceTaintManager"
_IN_PROGRESS = "EvictionInProgress"

_Mark = tuple[DeviceId, str, str, str]
"""A taint on a device: key, value and effect."""


class Evictor:
    """Checks all allocated claims while any device carries a taint that evicts."""

    def __init__(
        self, runtime: Runtime, state: StandaloneState, deallocation: ClaimDeallocation, queue: WorkQueue
    ) -> None:
        self._queue = queue
        self._runtime = runtime
        self._state = state
        self._deallocation = deallocation
        self._store = NatsStore(runtime.bus, state)
        self._first_seen: dict[_Mark, datetime] = {}
        self._seen_before: dict[_Mark, datetime] = {}
        self._decisions = DecisionPublisher(runtime.bus, runtime.clock)
        self._log = get_logger()

    async def reconcile_all(self) -> None:
        """Evict what is due."""
        rules = self._state.taints.rules
        if not rules and not self._state.taints.may_evict:
            self._first_seen = {}
            self._queue.keep(frozenset())
            return
        # A taint that is not seen in this round is gone. If it returns, its time starts again.
        self._seen_before, self._first_seen = self._first_seen, {}
        held = [
            (key, stored, allocation)
            for key, stored in self._claims()
            if (allocation := _allocation(stored)) is not None
        ]
        pending: dict[str, int] = {}
        for key, stored, allocation in held:
            work = partial(self._reconcile, key, stored, allocation, pending)
            await self._queue.run(key, self._version(stored), work, name=stored.shown)
        for rule_key, rule in tuple(rules.items()):
            write_status = partial(self._write_rule_status, rule_key, rule, pending.get(rule.name, 0), held)
            await self._queue.run(
                rule_key,
                (rule, len(held), pending.get(rule.name, 0)),
                write_status,
                name=f"DeviceTaintRule {rule.name}",
            )
        self._queue.keep({*(key for key, _, _ in held), *rules})

    def _claims(self) -> tuple[tuple[ObjectKey, Stored], ...]:
        """List all claims that may hold devices, including classic ones."""
        return (*self._state.claims(), *self._state.classic_claims())

    def _version(self, stored: Stored) -> Hashable:
        return stored.revision, self._state.supply, self._state.shared_epoch

    async def _reconcile(
        self, key: ObjectKey, stored: Stored, allocation: AllocationResult, pending: dict[str, int]
    ) -> Result:
        """Evict one claim when it is due."""
        eviction = next_eviction(allocation, self._state.taints.evicting, self._since)
        if eviction is None:
            return None
        if eviction.due > self._runtime.clock.now():
            return Again()
        if eviction.rule:
            pending[eviction.rule] = pending.get(eviction.rule, 0) + 1
        await self._evict(key, stored, eviction)
        return None

    def _since(self, device: DeviceId, taint: Taint) -> datetime:
        """Return since when a taint is there. A taint without a time counts from when it was first
        seen here.
        """
        written = moment_of(taint.time_added)
        if written is not None:
            return written
        key = (device, taint.key, taint.value, taint.effect)
        seen = self._seen_before.get(key) or self._runtime.clock.now()
        return self._first_seen.setdefault(key, seen)

    async def _evict(self, key: ObjectKey, stored: Stored, eviction: Eviction) -> None:
        """Publish the event, then mark the pods, then the claim: after a crash in between, the
        claim is still found.
        """
        claim = stored.value
        if stored.claim.deallocation or claim.status.get("deallocationRequested") or stored.metadata.deletion_timestamp:
            return
        users = stored.known_pods
        reason = reason_of(
            eviction, f"{key.namespace}/{key.name}", [f"pod {key.namespace}/{user.name}" for user in users]
        )
        await self._announce(stored, eviction, reason)
        for user in users:
            await self._mark_pod(ObjectKey("pod", key.namespace, user.name), user.uid, reason)
        self._log.warning(
            "claim.evicted", claim=stored.shown, device=str(eviction.device), rule=eviction.rule, why=reason.message
        )
        if is_classic(claim):
            # Its driver deallocates it when its pods, which are being deleted now, are gone.
            await self._store.write(key, stored.revision, classic_lifecycle.with_deallocation_request(claim))
        else:
            await self._deallocation.begin(key, stored, reason.message)

    async def _mark_pod(self, key: ObjectKey, uid: str, reason: Reason) -> None:
        stored = self._state.objects.get(key)
        if stored is None or stored.uid != uid or stored.metadata.deletion_timestamp:
            return
        now = rfc3339(self._runtime.clock.now())
        api_object = lifecycle.with_condition(
            stored.value, is_true=True, reason=_BY_TAINT, message=reason.message, now=now, kind=_DISRUPTION
        )
        marked = ask_deletion(api_object, now=now)
        if marked is not None:
            await self._store.write(key, stored.revision, marked)
            return
        written = await self._store.write(key, stored.revision, api_object)
        if written is not None:
            # Nothing holds it, so it is deleted at once at this revision. A pod that a user creates
            # meanwhile under its name stays.
            await self._store.delete(key, written.revision)

    async def _announce(self, stored: Stored, eviction: Eviction, reason: Reason) -> None:
        claim = stored.value
        number = classic_lifecycle.attempt_of(claim).number if is_classic(claim) else attempts.number_of(claim)
        op_id = f"evict-{stored.uid}-{number}"
        pool_node = node_of_pool(eviction.device.pool)
        node = pool_node if pool_node in self._state.nodes() else CLUSTER
        await self._decisions.publish("evict", stored.claim.owner, Refusal(reasons=(reason,)), op_id=op_id, node=node)

    async def _write_rule_status(
        self, key: Hashable, rule: TaintRule, pending: int, held: list[tuple[ObjectKey, Stored, AllocationResult]]
    ) -> None:
        """Write the progress of a rule's evictions into its status, when that changed."""
        stored = self._state.objects.get(key) if isinstance(key, ObjectKey) else None
        if stored is None or not isinstance(key, ObjectKey):
            return
        allocations = [
            (
                without_shapes(allocation, self._state.taints.parts),
                [f"{at.namespace}/{user.name}" for user in claim.known_pods],
            )
            for at, claim, allocation in held
        ]
        published = self._state.taints.count(rule)
        is_true, reason, message = rule_condition(rule, published=published, pending=pending, allocations=allocations)
        now = rfc3339(self._runtime.clock.now())
        api_object = lifecycle.with_condition(
            stored.value, is_true=is_true, reason=reason, message=message, now=now, kind=_IN_PROGRESS
        )
        if api_object is not stored.value:
            await self._store.write(key, stored.revision, api_object)


def _allocation(claim: Stored) -> AllocationResult | None:
    try:
        return claim.structured.allocation
    except ContractError:
        return None  # reported by the reconciler of claims
