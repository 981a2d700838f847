"""Records in the ledger which pod uses an Allocate result, and which container uses it or a prepared
claim, as soon as kubelet lists that pod.

Kubelet lists a pod a moment after it has allocated for it, so the first queries follow quickly and
later ones with the period of the reconciliation. While every allocation has its pod, and every pod
of a prepared claim was listed, kubelet is not queried.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

from topobus.gateway.asks import NodeAsks
from topobus.gateway.device_plugins.pod_resources import Listing
from topobus.gateway.node_state import NodeState
from topobus.gateway.reconcile.pod_usage import PodLook
from topobus.gateway.reconcile.rules.users import nameless, pod_of, unnamed_users, users_of_claims, without_uid
from topobus.process.backoff import full_jitter
from topobus.process.logging import get_logger
from topobus.values.errors import TopobusError
from topobus.values.ledger import Allocation, Holders
from topobus.values.request import Owner, OwnerKind

__all__ = ["UserNaming"]

# Seconds before the first query after an allocation, doubled for each next one: kubelet lists a pod
# when all its containers are admitted.
_FIRST_LOOK_S = 0.1
# The API's limit on reservations of a claim (resource.k8s.io/v1, ResourceClaimReservedForMaxSize).
_MOST_PODS = 256


class UserNaming:
    """Records the users of what one node's owners hold."""

    def __init__(self, usage: PodLook, state: NodeState, asks: NodeAsks, longest_pause_s: float) -> None:
        self._usage = usage
        self._state = state
        self._asks = asks
        self._longest_pause_s = longest_pause_s
        self.on_listing: Callable[[Listing], object] = lambda _: None
        """Called with each list that kubelet gave here, before any pod is recorded."""
        self._listed: dict[str, frozenset[Owner]] = {}
        """By claim, the pods that kubelet has listed once."""
        self._listed_whole: dict[str, tuple[str, tuple[Owner, ...]]] = {}
        """By claim: the decision and its pods, when kubelet listed all of them."""
        self._sent: dict[str, tuple[Owner, str, int, str, int, int]] = {}
        """By allocation: what was sent, and the ledger at that time. If the ledger has changed
        since and lacks it, it was recorded for an earlier allocation."""

    async def run(self) -> None:
        """Query until cancelled, while there is an allocation whose pod or container is not known."""
        attempt = 0
        seen: set[str] = set()
        while True:
            ticket = self._state.ledger_changed.ticket()
            waiting = {allocation.decision_id for allocation in (*nameless(self._state.ledger), *self._unlisted())}
            if not waiting:
                seen, attempt = set(), 0
                await ticket.wait()
                continue
            if waiting - seen:
                seen, attempt = waiting, 0
            await asyncio.sleep(full_jitter(attempt, least_s=_FIRST_LOOK_S, most_s=self._longest_pause_s))
            attempt += 1
            listing = await self._usage.listing()
            if not isinstance(listing, str):
                self.on_listing(listing)
                await self.name(listing)

    def _unlisted(self) -> list[Allocation]:
        """List the prepared claims with a pod that kubelet has not listed for this decision."""
        return [
            allocation
            for key, allocation in (self._state.ledger.allocations.items() if self._state.ledger else ())
            if allocation.owner.kind is OwnerKind.CLAIM
            and allocation.is_prepared
            and self._listed_whole.get(key) != (allocation.decision_id, allocation.pods)
        ]

    async def name(self, listing: Listing) -> None:
        """Record the pods of one listing in the ledger. What fails is sent again next time."""
        ledger = self._state.ledger
        if ledger is None:
            return
        self._sent = {key: sent for key, sent in self._sent.items() if key in ledger.allocations}
        for allocation, user, container in unnamed_users(ledger, listing.uses):
            message = (
                user,
                container,
                self._state.times_handed_out(allocation.owner),
                allocation.decision_id,
                ledger.epoch,
                ledger.sequence,
            )
            if self._sent.get(allocation.owner.key) != message:
                self._sent[allocation.owner.key] = message
                if (
                    not await self._is_told(allocation, user, container)
                    and self._sent.get(allocation.owner.key) == message
                ):
                    # This loop and the reconciliation record pods at the same time. The other one
                    # may have recorded more, or found the owner gone, meanwhile.
                    del self._sent[allocation.owner.key]
        await self._name_users_of_claims(ledger, listing)

    async def _name_users_of_claims(self, ledger: Holders, listing: Listing) -> None:
        present = users_of_claims(ledger, listing.uses, self._listed)
        listed_whole: dict[str, tuple[str, tuple[Owner, ...]]] = {}
        for key, users in present.items():
            allocation, pods = ledger.allocations[key], users.pods[:_MOST_PODS]
            if pods and (pods, users.container) != (allocation.pods, allocation.container):
                op_id = f"name-{uuid.uuid4().hex}"
                try:
                    await self._asks.name_pods(
                        op_id,
                        allocation.owner,
                        decision_id=allocation.decision_id,
                        pods=pods,
                        container=users.container,
                    )
                except TopobusError as err:
                    get_logger().warning("pods.untold", owner=key, error=str(err))
                    continue
            if users.is_listed:
                listed_whole[key] = (allocation.decision_id, pods)
        self._listed_whole = listed_whole
        # Stored without uids: a pod that kubelet has listed once and no longer lists has ended.
        named = {key: frozenset(map(without_uid, users.pods)) for key, users in present.items()}
        listed = {
            key: frozenset(pod for use in listing.uses if use.claim for pod in [pod_of(use)]) & pods
            for key, pods in named.items()
        }
        self._listed = {key: self._listed.get(key, frozenset()) | pods for key, pods in listed.items()}

    async def _is_told(self, allocation: Allocation, user: Owner, container: str) -> bool:
        owner = allocation.owner
        try:
            await self._asks.name_pods(
                f"name-{uuid.uuid4().hex}",
                owner,
                decision_id=allocation.decision_id,
                pods=(user,),
                container=container,
            )
        except TopobusError as err:
            get_logger().warning("user.untold", owner=owner.key, pod=f"{user.namespace}/{user.name}", error=str(err))
            return False
        get_logger().info(
            "user.named", owner=owner.key, pod=f"{user.namespace}/{user.name}", decision_id=allocation.decision_id
        )
        return True
