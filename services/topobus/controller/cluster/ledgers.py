"""The ledgers of nodes that run Topobus, asked before a claim's status says what it has, and told when an allocation is taken back.

Flows in: claims with what they are to get. Flows out: asks to the node's topology over NATS. Operation ids are made of the claim's uid and the attempt's number, so
any replica that goes on repeats the very same operation. Devices of others' drivers have no ledger: for them the API server alone stands.
"""

from __future__ import annotations

from topobus.contracts import catalogue
from topobus.contracts.messages import ApiObject, DecisionEvent, PlaceRequest, ReleaseRequest
from topobus.controller.config import ControllerSettings
from topobus.controller.core.claims import devices_of, owner_of, placement_request
from topobus.controller.core.cluster_world import ClusterWorld
from topobus.controller.core.gated import GateAttempt
from topobus.controller.core.inventory import holders_from_ledger
from topobus.domain.errors import PeerUnavailable
from topobus.domain.outcome import Placement, Reason, Refusal
from topobus.domain.request import Owner
from topobus.runtime.bus import Bus
from topobus.runtime.clock import Clock, rfc3339
from topobus.runtime.logging import get_logger

__all__ = ["Ledgers"]


class Ledgers:
    """Asks nodes."""

    def __init__(self, settings: ControllerSettings, bus: Bus, clock: Clock, world: ClusterWorld) -> None:
        self._clock = clock
        self._timeout_s = settings.ask_timeout_s
        self._bus = bus
        self._world = world

    async def hold(self, claim: ApiObject, attempt: GateAttempt) -> Placement | Refusal | None:
        """Have the node hold what a claim is to get; None when it does already, or has no say.

        Errors: raises PeerUnavailable when the node does not answer: neither done nor undone.
        """
        request = placement_request(claim, attempt.allocation, attempt.node, attempt.wishes)
        if request is None:
            return None
        op_id = f"allocate-{owner_of(claim).uid}-{attempt.number}"
        reply = await self._bus.ask(catalogue.PLACE, PlaceRequest(op_id=op_id, pod=request), timeout_s=self._timeout_s, node=attempt.node)
        if isinstance(reply.result, Refusal) and await self._holds_already(claim, attempt):
            return None
        return reply.result

    async def announce(self, claim: ApiObject, attempt: GateAttempt, outcome: Placement | None) -> None:
        """Publish that a claim was allocated; the claim itself is the truth, so an event that cannot be published is only logged."""
        op_id = f"allocate-{owner_of(claim).uid}-{attempt.number}"
        event = DecisionEvent(
            id=op_id,
            verb="allocate",
            node=attempt.node,
            op_id=op_id,
            time=rfc3339(self._clock.now()),
            owner=owner_of(claim),
            outcome=outcome,
        )
        try:
            await self._bus.publish(catalogue.DECISION, event, event_id=op_id, node=attempt.node)
        except PeerUnavailable as err:
            get_logger().warning("decision.unpublished", op_id=op_id, error=str(err))

    async def release(self, claim: ApiObject, why: str) -> Refusal | None:
        """Have every node let go of what it holds for a claim; a node refuses while containers may be using the devices.

        Errors: raises PeerUnavailable.
        """
        owner = owner_of(claim)
        for node in self._world.supply.nodes_holding(owner.key):
            ledger = self._world.ledgers.get(node)
            held = ledger.allocations.get(owner.key) if ledger is not None else None
            if ledger is None or held is None:
                continue
            if held.is_prepared:
                return Refusal(reasons=(Reason(code="prepared", message=f"node {node}: {owner} is prepared"),))
            refusal = await self._release(owner, node, f"release-{owner.uid}-{why}-{ledger.sequence}")
            if refusal is not None:
                return refusal
        return None

    async def _release(self, owner: Owner, node: str, op_id: str) -> Refusal | None:
        request = ReleaseRequest(op_id=op_id, owner=owner)
        refusal = (await self._bus.ask(catalogue.RELEASE, request, timeout_s=self._timeout_s, node=node)).refusal
        get_logger().info("ledger.released", claim=str(owner), node=node, is_refused=refusal is not None)
        return refusal

    async def _holds_already(self, claim: ApiObject, attempt: GateAttempt) -> bool:
        """Say whether the ledger shows this very attempt as done: a node keeps only the newest operations, the ledger keeps what is held.

        What the claim holds otherwise, from an attempt that nobody remembers, is let go.
        """
        owner = owner_of(claim)
        entry = await self._bus.get(catalogue.LEDGER, node=attempt.node)
        if entry is None or owner.key not in entry.value.allocations:
            return False
        held = {one for one, holder in holders_from_ledger(entry.value, self._world.cpu_devices(attempt.node)).items() if holder == owner}
        if held == set(devices_of(attempt.allocation, attempt.node)):
            return True
        try:
            await self._release(owner, attempt.node, f"release-{owner.uid}-stale-{entry.value.sequence}")
        except PeerUnavailable as err:
            get_logger().warning("ledger.silent", node=attempt.node, error=str(err))
        return False
