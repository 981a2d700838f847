"""Takes an allocation back, in both homes: `ClaimDeallocation` in the stand-alone home, `ClusterDeallocation` in a cluster.

Who decides it is elsewhere: an eviction, a failed binding, a pod that fits nowhere, a claim that nobody uses or that is deleted, and in a cluster a pod that
kube-scheduler cannot place. The order differs, because the binding does. Stand-alone pods are bound here, so a mark in the claim comes first, then a write of each pod
that makes a binding under way lose, then the node's ledger, and the status last: in between nobody gets the devices. In a cluster kube-scheduler binds without writing to
the claim, so the status goes first, by compare-and-set, and the ledgers hear of it from the copy.

Flows in: claims as stored. Flows out: writes of claims and pods, RELEASE asks. What a crash leaves begun is found in the object and gone on with.
"""

from __future__ import annotations

from enum import Enum

from topobus.contracts.messages import ApiObject
from topobus.controller.allocation.miss_reasons import summarize
from topobus.controller.claims import gated_claims, lifecycle
from topobus.controller.claims.objects import Pod
from topobus.controller.claims.reservations import with_retreat, without_allocation
from topobus.controller.claims.stored import ObjectKey, Stored
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.reconcilers.claim_users import consuming_pods, known_consumers
from topobus.controller.reconcilers.ledger_releases import UnderWay
from topobus.controller.reconcilers.node_ledgers import NodeLedgers
from topobus.controller.state.api_server_state import ApiServerState, Key
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.api_server_store import ApiServerWriter
from topobus.controller.store.object_writer import ObjectWriter
from topobus.domain.errors import ContractError
from topobus.domain.timestamps import rfc3339
from topobus.kubernetes.api.objects import metadata_of, name_of
from topobus.kubernetes.api.resource import AllocationResult
from topobus.runtime.clock import Clock
from topobus.runtime.logging import get_logger

__all__ = ["ClaimDeallocation", "ClusterDeallocation"]


class _Fence(Enum):
    """Whether the pods of a claim can be bound to what it is about to lose."""

    CLOSED = "closed"
    """Nobody can bind them any more."""
    KEPT = "kept"
    """A pod was bound already: the claim keeps its allocation."""
    LOST = "lost"
    """A pod was written by somebody else: look again."""


class ClaimDeallocation:
    """Deallocates claims of the stand-alone home, and ends those that are deleted."""

    def __init__(
        self, clock: Clock, world: StandaloneState, writer: ObjectWriter, ledgers: NodeLedgers, metrics: ControllerMetrics
    ) -> None:
        self._clock = clock
        self._world = world
        self._writer = writer
        self._ledgers = ledgers
        self._metrics = metrics
        self._fenced: dict[ObjectKey, tuple[int, frozenset[str]]] = {}
        """Pods, by uid, that nobody can bind any more to what a claim loses, with the number of the claim's attempt."""
        self._log = get_logger()

    def keep(self) -> None:
        """Forget claims that are gone. Call it once a round."""
        self._fenced = {key: fence for key, fence in self._fenced.items() if key in self._world.objects}

    async def begin(self, key: ObjectKey, stored: Stored, why: str) -> bool:
        """Mark a claim whose allocation is to be taken back; False when somebody else wrote first. What follows happens in the claim's own turn."""
        self._log.info("claim.taken-back", claim=stored.shown, why=why)
        return await self._writer.write(key, stored.revision, lifecycle.with_deallocation(stored.value, why=why)) is not None

    async def finish(self, key: ObjectKey, stored: Stored) -> bool:
        """Take the allocation of a marked claim back: the node lets go first, then the status is cleared. True says that another try is due.

        Errors: raises PeerUnavailable.
        """
        fence = await self._fence(key, stored)
        if fence is not _Fence.CLOSED or not await self._release(key, stored):
            return fence is _Fence.LOST
        self._fenced.pop(key, None)
        now = rfc3339(self._clock.now())
        freed = without_allocation(stored.value, why=stored.claim.deallocation, now=now)
        if await self._writer.write(key, stored.revision, freed) is not None:
            self._metrics.decisions.labels("taken-back").inc()
        return False

    async def delete(self, key: ObjectKey, stored: Stored) -> None:
        """Let go of a claim that is to be deleted: first its devices, then the finalizer, then the object.

        Errors: raises PeerUnavailable.
        """
        claim = stored.value
        users = tuple(str(consumer) for consumer in known_consumers(stored))
        if users:
            message = f"it is reserved for {', '.join(users)}: it goes when no pod uses it any more"
            await self._wait_for_release(key, stored, "InUse", message)
            return
        if not await self._release(key, stored):
            return
        freed = lifecycle.without_protection(claim)
        if not lifecycle.is_finished(freed):
            if freed != claim:
                await self._writer.write(key, stored.revision, freed)
            return
        last = stored if freed == claim else await self._writer.write(key, stored.revision, freed)
        if last is None or not await self._writer.delete(key, last.revision):
            return
        self._metrics.decisions.labels("released").inc()
        self._log.info("claim.released", claim=stored.shown)

    async def release_leftovers(self, key: ObjectKey, stored: Stored) -> None:
        """Have nodes let go of what a claim holds beside its allocation: a placement arrived after its attempt was dropped.

        Errors: raises PeerUnavailable.
        """
        owner = stored.claim.owner
        holding = self._world.stock.nodes_holding(owner.key)
        if not holding:
            return
        kept = _nodes_of(stored.claim.status.allocation)
        for node in holding:
            if node in kept:
                continue
            ledger = await self._ledgers.read(node)
            newest = await self._writer.read(key)
            if ledger is None or owner.key not in ledger.allocations or newest is None or newest.revision != stored.revision:
                continue  # another replica has gone on: what is held may be its next attempt's
            # An attempt is written before it is placed, and the claim has none: what this decision gave is nobody's.
            decision_id = ledger.allocations[owner.key].decision_id
            self._log.info("claim.left-node", claim=stored.shown, node=node)
            await self._ledgers.release_on(node, owner, f"release-{owner.uid}-left-{ledger.sequence}", decision_id=decision_id)

    async def _fence(self, key: ObjectKey, stored: Stored) -> _Fence:
        """Make sure that nobody binds a pod to what is about to be taken from it.

        A replica that read the claim before the mark may be about to bind the pod: a write of the pod makes its write lose. Whoever reads the pod after that has read
        the mark before, for both stand in one stream. A bound pod that is not on its way out keeps its claim: the mark is taken off again.
        """
        claim = stored.value
        number, known = lifecycle.number_of(claim), self._fenced.get(key)
        fenced = known[1] if known is not None and known[0] == number else frozenset()
        for user in consuming_pods(stored):
            pod_key = ObjectKey("pod", key.namespace, user.name)
            try:
                entry = await self._writer.read(pod_key)
            except ContractError:
                continue  # no pod can be read there, so none is bound
            pod = Pod(entry.value) if entry is not None else None
            if entry is None or pod is None or pod.uid != user.uid or pod.is_deleting:
                continue
            if pod.is_bound:
                why = "the pod was bound before the claim could be taken back"
                self._log.info("claim.kept", claim=stored.shown, pod=pod.shown, why=why)
                await self._writer.write(key, stored.revision, lifecycle.without_deallocation(claim))
                return _Fence.KEPT
            if user.uid not in fenced:
                if await self._writer.write(pod_key, entry.revision, with_retreat(entry.value)) is None:
                    return _Fence.LOST
                fenced |= {user.uid}
        self._fenced[key] = (number, fenced)
        return _Fence.CLOSED

    async def _release(self, key: ObjectKey, stored: Stored) -> bool:
        """Have every node let go of the claim's devices; False when one has not, which the claim is told if the node refuses.

        Errors: raises PeerUnavailable.
        """
        owner = stored.claim.owner
        nodes = set(self._world.stock.nodes_holding(owner.key))
        try:
            attempt = stored.claim.attempt
            allocation = stored.claim.status.allocation
        except ContractError:
            attempt, allocation = None, None  # a claim that nobody can read must be deletable; the ledgers say what it holds
        if attempt is not None:
            nodes.add(attempt.node)
        nodes |= _nodes_of(allocation) & set(self._world.nodes())
        # The revision makes a later release another operation: another replica may have placed in between. All of them at once: a node that answers must not
        # wait for one that does not.
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
        """Say in the claim why it is still there."""
        if lifecycle.has_condition(stored.value, reason=reason, message=message, kind=lifecycle.RELEASED):
            return
        self._log.info("claim.release-waiting", claim=stored.shown, why=message)
        now = rfc3339(self._clock.now())
        api_object = lifecycle.with_condition(stored.value, is_true=False, reason=reason, message=message, now=now, kind=lifecycle.RELEASED)
        await self._writer.write(key, stored.revision, api_object)


class ClusterDeallocation:
    """Deallocates claims of a cluster that we allocated, and tells ledgers of allocations that are gone."""

    def __init__(self, world: ApiServerState, writer: ApiServerWriter, ledgers: NodeLedgers, metrics: ControllerMetrics) -> None:
        self._world = world
        self._writer = writer
        self._ledgers = ledgers
        self._metrics = metrics
        self._log = get_logger()

    async def deallocate(self, key: Key, claim: ApiObject, why: str) -> bool:
        """Clear a claim's allocation and reservations; False when somebody else wrote first. The ledgers hear of it in their own turn (`release`).

        Errors: raises PeerUnavailable.
        """
        freed = await self._writer.claim(key, gated_claims.deallocation_patch(claim), part="status")
        if freed is None or freed.status.get("allocation"):
            return False
        self._metrics.decisions.labels("taken-back").inc()
        self._log.info("claim.taken-back", claim=name_of(claim), why=why)
        return True

    async def release(self, key: Key, before: ApiObject) -> bool:
        """Tell ledgers of an allocation that is gone, whoever took it; True: a node was asked and has not answered yet.

        Shapes: before — the claim as it was when it lost the allocation.
        Errors: raises PeerUnavailable when a node was silent.
        """
        now = self._world.claims.get(key)
        is_same = now is not None and metadata_of(now).uid == metadata_of(before).uid
        is_served = now is not None and (
            bool(now.status.get("allocation")) or (gated_claims.is_pending(now) and not self._world.is_taken_back(key))
        )
        if not (is_same and is_served):
            # What has devices again, or is about to, holds them by its own right. A node that has them prepared keeps them until its gateway has undone that.
            answer = await self._ledgers.release(before, f"over-{before.metadata.get('resourceVersion')}")
            if isinstance(answer, UnderWay):
                return True
        self._world.let_go.pop(key, None)
        return False


def _nodes_of(allocation: AllocationResult | None) -> set[str]:
    """Name the nodes whose devices an allocation has: our pools are named like their nodes."""
    return {granted_device.pool for granted_device in allocation.devices.results} if allocation is not None else set()
