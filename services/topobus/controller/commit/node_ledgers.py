"""Requests to the ledgers of Topobus nodes: PLACE before a claim's status is written, RELEASE after
a deallocation.

Operation ids consist of the claim's uid and the attempt's number, so any replica repeats the same
operation. Devices of other vendors' drivers have no ledger: for them the claim alone counts. A node
that answers with an error or an invalid message is treated as unavailable: its own devices are not
allocated, other nodes are not affected.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from topobus.bus.bus import Bus
from topobus.controller.commit.ledger_releases import LedgerReleases, UnderWay
from topobus.controller.state.cluster_state import ClusterState
from topobus.controller.state.inventory_slices import devices_of_owner
from topobus.engine.allocation.values import DeviceId
from topobus.engine.claims.attempts import Attempt
from topobus.engine.claims.lifecycle import devices_of, placement_request
from topobus.engine.claims.objects import Claim
from topobus.engine.shapes.shape_parts import shapes_left, without_shapes
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import PlaceReply, PlaceRequest, ReleaseRequest
from topobus.process.logging import get_logger
from topobus.values.errors import ConfigError, ContractError, HardwareError, PeerUnavailable
from topobus.values.ledger import Ledger
from topobus.values.outcome import Placement, Refusal, refuse
from topobus.values.request import Owner

__all__ = ["NODE_FAILED", "Held", "NodeLedgers", "Overtaken"]

NODE_FAILED = "node-failed"
"""The code of a reason and of an error: a node answered with an error or an invalid message."""

T = TypeVar("T")


@dataclass(frozen=True)
class Held:
    """The node holds the attempt's devices, or no ledger is needed for them."""

    placement: Placement | None = None
    """What the node placed. None when it held this very attempt before, or needs no ledger."""


class Overtaken(Enum):
    """The attempt is no longer the claim's newest: what the node holds may belong to a later
    attempt of another replica.
    """

    OVERTAKEN = "overtaken"


class NodeLedgers:
    """Sends PLACE and RELEASE requests to nodes.

    Args: releases — how a RELEASE is sent: beside the rounds while its `run` is active. Without
    that, each request is awaited.
    """

    def __init__(self, bus: Bus, state: ClusterState, timeout_s: float, releases: LedgerReleases | None = None) -> None:
        self._bus = bus
        self._state = state
        self._timeout_s = timeout_s
        self._releases = releases or LedgerReleases(bus, timeout_s)
        self._log = get_logger()

    async def hold(
        self, claim: Claim, attempt: Attempt, is_newest: Callable[[], Awaitable[bool]]
    ) -> Held | Refusal | Overtaken:
        """Place an attempt's devices in the node's ledger.

        A node remembers only its newest operations, while its ledger keeps every holding. So a
        refusal is ignored when the ledger shows the attempt as done, and what an older attempt left
        there is released.
        Of a shape the node holds the parts.
        Shapes: is_newest — reads the claim again and returns whether the attempt is still its
        newest.
        Errors: raises PeerUnavailable when the node does not answer or answers with an error, which
        leaves open whether it placed. Raises what `is_newest` raises.
        """
        parts = self._state.stock.table_of(attempt.node).parts
        unknown = shapes_left(attempt.allocation, parts)
        if unknown:
            return _no_such_shape(attempt.node, unknown)
        allocation = without_shapes(attempt.allocation, parts)
        request = placement_request(claim.object, allocation, attempt.node, attempt.wishes)
        if request is None:
            return Held()
        owner, node = claim.owner, attempt.node
        reply = await self.place(node, PlaceRequest(op_id=attempt.op_id(owner.uid), pod=request))
        if not isinstance(reply.result, Refusal):
            return Held(reply.result)
        ledger = await _from_node(node, self.read(node))
        if ledger is None or owner.key not in ledger.allocations:
            return reply.result
        if self.devices_held(ledger, owner) == set(devices_of(allocation, node)):
            return Held()
        # In this order: each attempt is written before it is placed, so as long as the claim still
        # has ours, the ledger's holding is from an older one.
        if not await is_newest():
            return Overtaken.OVERTAKEN
        try:
            # Before this request arrives, another replica may release the holding and place the
            # next attempt. The decision id keeps that one from being released.
            decision_id = ledger.allocations[owner.key].decision_id
            await self.release_on(node, owner, f"release-{owner.uid}-stale-{ledger.sequence}", decision_id=decision_id)
        except PeerUnavailable as err:
            self._log.warning("ledger.silent", node=node, error=str(err))
        return reply.result

    async def place(self, node: str, request: PlaceRequest) -> PlaceReply:
        """Place the chosen devices on a node.

        Errors: raises PeerUnavailable when the node does not answer or answers with an error, which
        leaves open whether it placed.
        """
        return await _from_node(node, self._bus.ask(catalogue.PLACE, request, timeout_s=self._timeout_s, node=node))

    async def read(self, node: str) -> Ledger | None:
        """Read a node's ledger from the store, not from the copy. None when it has none.

        Errors: raises PeerUnavailable, or ContractError for a ledger that cannot be read.
        """
        entry = await self._bus.get(catalogue.LEDGER, node=node)
        return entry.value if entry is not None else None

    async def release(self, claim: Claim, why: str) -> Refusal | UnderWay | None:
        """Release what every node holds for a claim.

        A node refuses while containers may be using the devices. None: all nodes have released.
        UnderWay: a node has not answered yet, which takes precedence over another's refusal. Only
        what our copy of a ledger shows is released, not what another replica has placed since.
        Errors: raises PeerUnavailable when a node does not answer or answers with an error. The
        other nodes have been asked nevertheless.
        """
        owner = claim.owner
        trouble: PeerUnavailable | None = None
        kept: Refusal | UnderWay | None = None
        for node in self._state.stock.nodes_holding(owner.key):
            ledger = self._state.ledgers.get(node)
            held = ledger.allocations.get(owner.key) if ledger is not None else None
            if ledger is None or held is None:
                continue
            try:
                op_id = f"release-{owner.uid}-{why}-{ledger.sequence}"
                answer = await self.release_on(node, owner, op_id, decision_id=held.decision_id)
                if answer is not None and not isinstance(kept, UnderWay):
                    kept = answer
            except PeerUnavailable as err:
                trouble = trouble or err
        if trouble is not None:
            raise trouble
        return kept

    async def release_on(
        self, node: str, owner: Owner, op_id: str, *, decision_id: str = ""
    ) -> Refusal | UnderWay | None:
        """Release what one node holds for an owner.

        The node refuses while containers may be using the devices, which only the node can know.

        Shapes: decision_id — release only what this decision placed; empty for whatever the owner
        holds.
        Errors: raises PeerUnavailable when the node does not answer or answers with an error.
        """
        ledger = self._state.ledgers.get(node)
        held = ledger.allocations.get(owner.key) if ledger is not None else None
        if held is not None and held.is_prepared:
            return refuse("prepared", f"{owner} is prepared: its devices are released when it is unprepared")
        request = ReleaseRequest(op_id=op_id, owner=owner, decision_id=decision_id)
        reply = await _from_node(node, self._releases.ask(node, request))
        if isinstance(reply, UnderWay):
            return reply
        self._log.info("ledger.released", owner=str(owner), node=node, is_refused=reply.refusal is not None)
        return reply.refusal

    def devices_held(self, ledger: Ledger, owner: Owner) -> Collection[DeviceId]:
        """Name the devices that an owner holds in a ledger."""
        return devices_of_owner(ledger, owner, self._state.cpu_devices(ledger.node))


def _no_such_shape(node: str, shapes: tuple[str, ...]) -> Refusal:
    message = f"node {node}: the machine has no shape {', '.join(shapes)} now: its devices have changed"
    return refuse("shape-unknown", message, node=node, devices=shapes)


async def _from_node(node: str, answer: Awaitable[T]) -> T:
    """Await a node's answer. An error or an invalid answer counts as silence, so that other nodes
    are not affected.

    Errors: raises PeerUnavailable, with the fact `code` "node-failed" for a node that answered.
    """
    try:
        return await answer
    except (ContractError, HardwareError, ConfigError) as err:
        message = f"node {node}: its topology service failed: {err}"
        raise PeerUnavailable(message, code=NODE_FAILED, next_step=f"read the log of topology on {node}") from err
