"""Cleans up deleted pods: releases their devices and reservations, and removes the object.

A pod's finalizer stays until its nodes have released it, so any replica can continue after a crash.
A pod that was deleted in spite of its finalizer is found through the objects that still name it.
"""

from __future__ import annotations

from topobus.controller.commit.ledger_releases import UnderWay
from topobus.controller.commit.node_ledgers import NodeLedgers
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.protocol import ObjectStore
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.claims.lifecycle import without_finalizer
from topobus.engine.claims.objects import Pod
from topobus.engine.claims.reservations import PodRef, without_reservations
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.scheduling.pod_alignment import own_request
from topobus.formats.kubernetes.classic.classic import is_classic
from topobus.formats.kubernetes.objects import PLACEMENT_PROTECTION, metadata_of
from topobus.process.logging import get_logger
from topobus.values.errors import ContractError
from topobus.values.request import Owner, OwnerKind

__all__ = ["PodCleanup"]


class PodCleanup:
    """Releases what deleted pods held."""

    def __init__(self, state: StandaloneState, store: ObjectStore, ledgers: NodeLedgers) -> None:
        self._ledgers = ledgers
        self._state = state
        self._store = store
        self._log = get_logger()

    async def finish(self, key: ObjectKey, stored: Stored) -> None:
        """Release a pod that is to be deleted: its devices, its reservations, the finalizer, the
        object.
        """
        pod = stored.value
        metadata = stored.metadata
        who = PodRef(key.namespace, metadata.name, metadata.uid)
        if PLACEMENT_PROTECTION in metadata.finalizers:
            owner = Owner(kind=OwnerKind.POD, namespace=who.namespace, name=who.name, uid=who.uid)
            nodes = {node for node, ledger in self._state.ledgers.items() if owner.key in ledger.allocations}
            nodes |= {stored.pod.node} & set(self._state.nodes()) if _asks(stored.pod) else set()
            op_id = f"release-{owner.uid}-{stored.revision}"
            # All nodes are asked: one that does not answer must not delay one that does.
            answers = {node: await self._ledgers.release_on(node, owner, op_id) for node in sorted(nodes)}
            for node, answer in answers.items():
                if isinstance(answer, UnderWay):
                    return
                if answer is not None:
                    self._log.info("pod.release-waiting", pod=stored.shown, node=node, why=summarize(answer.reasons))
                    return
            for claim_key, claim in self._reserved_by(who):
                if (
                    await self._store.write(claim_key, claim.revision, without_reservations(claim.value, (who.uid,)))
                    is None
                ):
                    return
        freed = without_finalizer(pod, PLACEMENT_PROTECTION)
        if metadata_of(freed).finalizers:
            if freed != pod:
                await self._store.write(key, stored.revision, freed)
            return
        last = stored if freed == pod else await self._store.write(key, stored.revision, freed)
        if last is None or not await self._store.delete(key, last.revision):
            return
        self._log.info("pod.released", pod=stored.shown)

    async def leave_other_nodes(self, key: ObjectKey, stored: Stored) -> None:
        """Release a pod's holdings on all nodes but the one that it is bound to: a pod's node never
        changes.
        """
        metadata = stored.metadata
        owner = Owner(kind=OwnerKind.POD, namespace=key.namespace, name=metadata.name, uid=metadata.uid)
        bound = stored.pod.node
        for node in self._state.stock.nodes_holding(owner.key):
            if not bound or node == bound:
                continue
            ledger = await self._ledgers.read(node)
            if ledger is None or owner.key not in ledger.allocations:
                continue
            op_id, decision_id = (
                f"release-{owner.uid}-elsewhere-{ledger.sequence}",
                ledger.allocations[owner.key].decision_id,
            )
            if not isinstance(await self._ledgers.release_on(node, owner, op_id, decision_id=decision_id), UnderWay):
                self._log.info("pod.left-node", pod=stored.shown, node=node, bound=bound)

    async def drop_gone_users(self, key: ObjectKey, stored: Stored) -> None:
        """Remove pods from a claim's reservedFor that were deleted in spite of their finalizer:
        they are missing in the copy and in the store.
        """
        gone: list[str] = []
        for user in stored.known_pods:
            pod_key = ObjectKey("pod", key.namespace, user.name)
            pod = self._state.objects.get(pod_key)
            if pod is not None and pod.uid == user.uid:
                continue
            try:
                entry = await self._store.read(pod_key)
            except ContractError:
                # The store has an object of this key that cannot be read, or no pod can have this
                # name. That is no evidence, and the claim's other users are checked.
                continue
            if entry is None or metadata_of(entry.value).uid != user.uid:
                gone.append(user.uid)
        if gone:
            self._log.info("claim.users-dropped", claim=stored.shown, users=gone)
            await self._store.write(key, stored.revision, without_reservations(stored.value, gone))

    def _reserved_by(self, who: PodRef) -> list[tuple[ObjectKey, Stored]]:
        reserved: list[tuple[ObjectKey, Stored]] = []
        for key, stored in self._state.of_kind("resourceclaim").items():
            if key.namespace != who.namespace or is_classic(stored.value):
                continue  # a classic claim's user is dropped once it is gone, as its driver then deallocates
            if any(user.uid == who.uid for user in stored.known_consumers):
                reserved.append((key, stored))
        return sorted(reserved)


def _asks(pod: Pod) -> bool:
    try:
        return own_request(pod) is not None
    except ContractError:
        return False  # no node: it was never placed
