"""Deallocates claims: `ClaimDeallocation` in the stand-alone home, `ClusterDeallocation` in a
cluster.

Other modules decide when: an eviction, a failed binding, a pod that fits nowhere, an unused or
deleted claim, or (in a cluster) a pod that kube-scheduler cannot place. The order of writes differs
with the component that binds. Stand-alone pods are bound by this controller: first a mark in the
claim, then a write of each pod that makes a concurrent binding fail, then the node's ledger, and
the status last. Until then no other claim gets the devices. In a cluster kube-scheduler binds
without writing to the claim, so the status is cleared first, by compare-and-set, and the ledgers
follow from the copy.

After a crash the object shows the steps already taken, and any replica continues with the rest.
"""

from __future__ import annotations

from enum import Enum

from topobus.controller.commit.ledger_releases import UnderWay
from topobus.controller.commit.node_ledgers import NodeLedgers
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.cluster.api_server_state import ApiServerState, Key
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.protocol import ObjectStore
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.claims import attempts, lifecycle
from topobus.engine.claims.objects import Pod
from topobus.engine.claims.reservations import with_retreat, without_allocation
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.resource import AllocationResult
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.process.work_queue import Again, Result
from topobus.values.dra_names import node_of_pool
from topobus.values.errors import ContractError
from topobus.values.timestamps import rfc3339

__all__ = ["ClaimDeallocation", "ClusterDeallocation"]


class _Fence(Enum):
    """Whether the pods of a claim can still be bound while it loses its devices."""

    CLOSED = "closed"
    """They can no longer be bound."""
    KEPT = "kept"
    """A pod was bound already: the claim keeps its allocation."""
    LOST = "lost"
    """A pod changed meanwhile: try again."""


class ClaimDeallocation:
    """Deallocates claims of the stand-alone home, and removes those that are deleted."""

    def __init__(
        self,
        clock: Clock,
        state: StandaloneState,
        store: ObjectStore,
        ledgers: NodeLedgers,
        metrics: ControllerMetrics,
    ) -> None:
        self._clock = clock
        self._state = state
        self._store = store
        self._ledgers = ledgers
        self._metrics = metrics
        self._fenced: dict[ObjectKey, tuple[int, frozenset[str]]] = {}
        """Uids of the pods that can no longer be bound to a claim that loses its devices, with the
        number of the claim's attempt."""
        self._log = get_logger()

    def keep(self) -> None:
        """Drop the notes about claims that no longer exist. Called once each round."""
        self._fenced = {key: fence for key, fence in self._fenced.items() if key in self._state.objects}

    async def begin(self, key: ObjectKey, stored: Stored, why: str) -> bool:
        """Mark a claim for deallocation. False when another writer was first.

        `finish` does the rest.
        """
        self._log.info("claim.taken-back", claim=stored.shown, why=why)
        return (
            await self._store.write(key, stored.revision, lifecycle.with_deallocation(stored.value, why=why))
            is not None
        )

    async def finish(self, key: ObjectKey, stored: Stored) -> Result:
        """Deallocate a marked claim: the node releases first, then the status is cleared.

        Errors: raises PeerUnavailable.
        """
        fence = await self._fence(key, stored)
        if fence is not _Fence.CLOSED or not await self._release(key, stored):
            return Again() if fence is _Fence.LOST else None
        self._fenced.pop(key, None)
        now = rfc3339(self._clock.now())
        freed = without_allocation(stored.value, why=stored.claim.deallocation, now=now)
        if await self._store.write(key, stored.revision, freed) is not None:
            self._metrics.decisions.labels("taken-back").inc()
        return None

    async def delete(self, key: ObjectKey, stored: Stored) -> None:
        """Release a claim that is to be deleted: first its devices, then the finalizer, then the
        object.

        Errors: raises PeerUnavailable.
        """
        claim = stored.value
        users = tuple(str(consumer) for consumer in stored.known_consumers)
        if users:
            message = f"it is reserved for {', '.join(users)}: it goes when no pod uses it any more"
            await self._wait_for_release(key, stored, "InUse", message)
            return
        if not await self._release(key, stored):
            return
        freed = lifecycle.without_protection(claim)
        if not lifecycle.is_finished(freed):
            if freed != claim:
                await self._store.write(key, stored.revision, freed)
            return
        last = stored if freed == claim else await self._store.write(key, stored.revision, freed)
        if last is None or not await self._store.delete(key, last.revision):
            return
        self._metrics.decisions.labels("released").inc()
        self._log.info("claim.released", claim=stored.shown)

    async def release_leftovers(self, key: ObjectKey, stored: Stored) -> None:
        """Release what nodes hold for a claim besides its allocation: a placement arrived after its
        attempt was dropped.

        Errors: raises PeerUnavailable.
        """
        owner = stored.claim.owner
        holding = self._state.stock.nodes_holding(owner.key)
        if not holding:
            return
        kept = _nodes_of(stored.claim.status.allocation)
        for node in holding:
            if node in kept:
                continue
            ledger = await self._ledgers.read(node)
            newest = await self._store.read(key)
            if (
                ledger is None
                or owner.key not in ledger.allocations
                or newest is None
                or newest.revision != stored.revision
            ):
                continue  # another replica continued: the devices held may be its next attempt's
            # An attempt is written before it is placed, and the claim has none: no attempt owns
            # what this decision placed.
            decision_id = ledger.allocations[owner.key].decision_id
            self._log.info("claim.left-node", claim=stored.shown, node=node)
            await self._ledgers.release_on(
                node, owner, f"release-{owner.uid}-left-{ledger.sequence}", decision_id=decision_id
            )

    async def _fence(self, key: ObjectKey, stored: Stored) -> _Fence:
        """Make sure that no pod can be bound to the devices that the claim is about to lose.

        A replica that read the claim before the mark may be about to bind the pod. A write of the
        pod makes that binding's write fail. A replica that reads the pod after this write has read
        the mark before, for both are in one stream. A bound pod that is not being deleted keeps its
        claim, and the mark is removed.
        """
        claim = stored.value
        number, fence = attempts.number_of(claim), self._fenced.get(key)
        fenced = fence[1] if fence is not None and fence[0] == number else frozenset()
        for user in stored.known_pods:
            pod_key = ObjectKey("pod", key.namespace, user.name)
            try:
                entry = await self._store.read(pod_key)
            except ContractError:
                continue  # no pod can be read there, so none is bound
            pod = Pod(entry.value) if entry is not None else None
            if entry is None or pod is None or pod.uid != user.uid or pod.is_deleting:
                continue
            if pod.is_bound:
                why = "the pod was bound before the claim could be taken back"
                self._log.info("claim.kept", claim=stored.shown, pod=pod.shown, why=why)
                await self._store.write(key, stored.revision, lifecycle.without_deallocation(claim))
                return _Fence.KEPT
            if user.uid not in fenced:
                if await self._store.write(pod_key, entry.revision, with_retreat(entry.value)) is None:
                    return _Fence.LOST
                fenced |= {user.uid}
        self._fenced[key] = (number, fenced)
        return _Fence.CLOSED

    async def _release(self, key: ObjectKey, stored: Stored) -> bool:
        """Release the claim's devices on every node.

        False while a node has not released them. If the node refused, the claim's condition gives
        the reason.

        Errors: raises PeerUnavailable.
        """
        owner = stored.claim.owner
        nodes = set(self._state.stock.nodes_holding(owner.key))
        try:
            attempt = stored.claim.attempt
            allocation = stored.claim.status.allocation
        except ContractError:
            attempt, allocation = (
                None,
                None,
            )  # a claim that cannot be read must be deletable; the ledgers record what it holds
        if attempt is not None:
            nodes.add(attempt.node)
        nodes |= _nodes_of(allocation) & set(self._state.nodes())
        # The revision makes a later release another operation, as another replica may have placed
        # in between. All nodes are asked: one that does not answer must not delay one that does.
        op_id = f"release-{owner.uid}-{stored.revision}"
        refusals = {node: await self._ledgers.release_on(node, owner, op_id) for node in sorted(nodes)}
        for node, refusal in refusals.items():
            if isinstance(refusal, UnderWay):
                return False
            if refusal is not None:
                await self._wait_for_release(key, stored, "Prepared", f"node {node}: {summarize(refusal.reasons)}")
                return False
        return True

    async def _wait_for_release(self, key: ObjectKey, stored: Stored, reason: str, message: str) -> None:
        """Write into the claim's condition why it still exists."""
        now = rfc3339(self._clock.now())
        api_object = lifecycle.with_condition(
            stored.value, is_true=False, reason=reason, message=message, now=now, kind=lifecycle.RELEASED
        )
        if api_object is not stored.value:
            self._log.info("claim.release-waiting", claim=stored.shown, why=message)
            await self._store.write(key, stored.revision, api_object)


class ClusterDeallocation:
    """Deallocates claims that were allocated here in a cluster, and releases ledgers of allocations
    that are gone.
    """

    def __init__(
        self, state: ApiServerState, store: ObjectStore, ledgers: NodeLedgers, metrics: ControllerMetrics
    ) -> None:
        self._state = state
        self._store = store
        self._ledgers = ledgers
        self._metrics = metrics
        self._log = get_logger()

    async def deallocate(self, key: Key, claim: Stored, why: str) -> bool:
        """Clear a claim's allocation and reservations. False when another writer was first.

        `release` updates the ledgers afterwards.

        Errors: raises PeerUnavailable.
        """
        freed = await self._store.write(
            ObjectKey("resourceclaim", *key), claim.revision, lifecycle.without_result(claim.value)
        )
        if freed is None or freed.claim.is_allocated:
            return False
        self._metrics.decisions.labels("taken-back").inc()
        self._log.info("claim.taken-back", claim=claim.shown, why=why)
        return True

    async def release(self, key: Key, before: Stored) -> Result:
        """Release the ledgers of an allocation that is gone, no matter which component removed it.

        Due again while a node has not answered.

        Shapes: before — the claim as it was when it lost the allocation.
        Errors: raises PeerUnavailable when a node was silent.
        """
        now = self._state.claims.get(key)
        is_same = now is not None and now.uid == before.uid
        is_served = now is not None and (
            now.claim.is_allocated or (self._state.gated_pods.is_pending(key) and not self._state.is_taken_back(key))
        )
        if not (is_same and is_served):
            # A claim that is allocated again, or soon will be, keeps what it holds. A node that has
            # the devices prepared keeps them until its gateway has unprepared the claim.
            answer = await self._ledgers.release(before.claim, f"over-{before.revision}")
            if isinstance(answer, UnderWay):
                return Again()
        self._state.unreleased.pop(key, None)
        return None


def _nodes_of(allocation: AllocationResult | None) -> set[str]:
    """Name the nodes whose devices an allocation has. Our pools name their nodes."""
    results = allocation.devices.results if allocation is not None else ()
    return {node_of_pool(granted_device.pool) for granted_device in results}
