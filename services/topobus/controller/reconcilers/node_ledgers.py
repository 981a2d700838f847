"""The ledgers of nodes that run Topobus, asked before a claim's status says what it has, and told when an allocation is taken back.

Flows in: claims with what they are to get. Flows out: asks to the node's topology over NATS. Operation ids are made of the claim's uid and the attempt's number, so
any replica that goes on repeats the very same operation. Devices of others' drivers have no ledger: for them the API server alone stands.
A node that answers with an error, or with something that is no answer, is unavailable as a silent one is: it keeps claims from its own devices and from no others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from topobus.contracts import catalogue
from topobus.contracts.messages import ApiObject, PlaceRequest, ReleaseRequest
from topobus.controller.claims.gated_claims import GateAttempt
from topobus.controller.claims.lifecycle import devices_of, owner_of, placement_request
from topobus.controller.config import ControllerSettings
from topobus.controller.reconcilers.held_allocation import Holding, look_at_holding
from topobus.controller.state.api_server_state import ApiServerState
from topobus.domain.errors import ConfigError, ContractError, HardwareError, PeerUnavailable
from topobus.domain.outcome import Placement, Reason, Refusal
from topobus.domain.request import Owner
from topobus.runtime.bus import Bus
from topobus.runtime.logging import get_logger

__all__ = ["NODE_FAILED", "NodeLedgers"]

NODE_FAILED = "node-failed"
"""The code of a reason, and of an error: a node answered, but with an error or with what is no answer."""

T = TypeVar("T")


class NodeLedgers:
    """Asks nodes."""

    def __init__(self, settings: ControllerSettings, bus: Bus, world: ApiServerState) -> None:
        self._timeout_s = settings.ask_timeout_s
        self._bus = bus
        self._world = world

    async def hold(
        self, claim: ApiObject, attempt: GateAttempt, is_newest: Callable[[], Awaitable[bool]]
    ) -> Placement | Refusal | Holding | None:
        """Have the node hold what a claim is to get; None when it has no say.

        Shapes: is_newest — reads the claim anew and says whether the attempt is still its newest; a Holding is DONE when the node held this very attempt before, and
        OVERTAKEN when another attempt is on its way.
        Errors: raises PeerUnavailable when the node does not answer, or not as it should: neither done nor undone.
        """
        request = placement_request(claim, attempt.allocation, attempt.node, attempt.wishes)
        if request is None:
            return None
        owner, node = owner_of(claim), attempt.node
        op_id = f"allocate-{owner.uid}-{attempt.number}"
        place = PlaceRequest(op_id=op_id, pod=request)
        reply = await _from_node(node, self._bus.ask(catalogue.PLACE, place, timeout_s=self._timeout_s, node=node))
        if not isinstance(reply.result, Refusal):
            return reply.result

        async def release(op_id: str, decision_id: str) -> None:
            try:
                await self._release(owner, node, op_id, decision_id=decision_id)
            except PeerUnavailable as err:
                get_logger().warning("ledger.silent", node=node, error=str(err))

        holding = await _from_node(
            node,
            look_at_holding(
                self._bus,
                node,
                owner,
                devices_of(attempt.allocation, node),
                cpu_devices=self._world.cpu_devices(node),
                is_newest=is_newest,
                release=release,
            ),
        )
        return reply.result if holding is Holding.NOT_DONE else holding

    async def release(self, claim: ApiObject, why: str) -> Refusal | None:
        """Have every node let go of what it holds for a claim; a node refuses while containers may be using the devices.

        Only what our copy of a ledger shows is let go: what another replica had placed since is its own.
        Errors: raises PeerUnavailable when a node does not answer, or not as it should; the other nodes have been asked then all the same.
        """
        owner = owner_of(claim)
        trouble: PeerUnavailable | None = None
        refused: Refusal | None = None
        for node in self._world.stock.nodes_holding(owner.key):
            ledger = self._world.ledgers.get(node)
            held = ledger.allocations.get(owner.key) if ledger is not None else None
            if ledger is None or held is None:
                continue
            if held.is_prepared:
                refused = refused or Refusal(reasons=(Reason(code="prepared", message=f"node {node}: {owner} is prepared"),))
                continue
            try:
                op_id = f"release-{owner.uid}-{why}-{ledger.sequence}"
                refused = await self._release(owner, node, op_id, decision_id=held.decision_id) or refused
            except PeerUnavailable as err:
                trouble = trouble or err
        if trouble is not None:
            raise trouble
        return refused

    async def _release(self, owner: Owner, node: str, op_id: str, *, decision_id: str) -> Refusal | None:
        request = ReleaseRequest(op_id=op_id, owner=owner, decision_id=decision_id)
        reply = await _from_node(node, self._bus.ask(catalogue.RELEASE, request, timeout_s=self._timeout_s, node=node))
        get_logger().info("ledger.released", claim=str(owner), node=node, is_refused=reply.refusal is not None)
        return reply.refusal


async def _from_node(node: str, answer: Awaitable[T]) -> T:
    """Await a node's answer: a node that fails, or answers what is no answer, is as unavailable as a silent one, and its neighbours go on.

    Errors: raises PeerUnavailable; with the fact `code` "node-failed" for a node that answered.
    """
    try:
        return await answer
    except (ContractError, HardwareError, ConfigError) as err:
        message = f"node {node}: its topology service failed: {err}"
        raise PeerUnavailable(message, code=NODE_FAILED, next_step=f"read the log of topology on {node}") from err
