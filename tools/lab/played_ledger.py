"""Plays the topology service of one node for benchmarks: a ledger with one writer, and answers to
`place` and `release` by the rules of `topobus.engine.ledger`.

The ledger is written by compare-and-set. Dry runs and reservations are not served. Thousands of
real services would run watches of their own on the machine that measures something else.
tests/integration/topology/test_topology_places.py compares its answers with the service's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from topobus.bus.bus import Bus, Written
from topobus.engine.alignment.planning.node_view import with_ledger
from topobus.engine.alignment.planning.placement import place
from topobus.engine.ledger import transitions
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import PlaceReply, PlaceRequest
from topobus.formats.messages.release_messages import ReleaseReply, ReleaseRequest
from topobus.values.errors import PeerUnavailable
from topobus.values.ledger import Ledger
from topobus.values.outcome import Placement, Refusal
from topobus.values.view import NodeView

__all__ = ["PlayedLedger"]


class PlayedLedger:
    """The ledger of one node. Make it, then `start`.

    Args: make_view — returns the node while nothing is held. It is called once, and only when
    something is placed there, for many of thousands of nodes are never asked.
    """

    def __init__(self, bus: Bus, node: str, make_view: Callable[[], NodeView]) -> None:
        self.node = node
        self.ledger = Ledger(node=node)
        self._bus = bus
        self._make_view = make_view
        self._view: NodeView | None = None
        self._revision = 0
        # One writer, and each write is awaited: as in the service, requests are answered one after
        # the other.
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Answer from now on."""
        await self._bus.answer(catalogue.PLACE, self._place, node=self.node)
        await self._bus.answer(catalogue.RELEASE, self._release, node=self.node)

    async def _place(self, request: PlaceRequest) -> PlaceReply:
        async with self._turn:
            recorded = transitions.recorded_operation(self.ledger, request.op_id)
            if recorded is not None:
                return self._placed(recorded.decision_id, transitions.placed_by(self.ledger, recorded))
            if self._view is None:
                self._view = self._make_view()
            result = place(with_ledger(self._view, self.ledger), request.pod)
            if isinstance(result, Placement):
                step = transitions.reserve(
                    self.ledger, op_id=request.op_id, request=request.pod, placement=result, decision_id=request.op_id
                )
                await self._write(step.ledger)
            return self._placed(request.op_id, result)

    async def _release(self, request: ReleaseRequest) -> ReleaseReply:
        async with self._turn:
            step = transitions.release(
                self.ledger,
                op_id=request.op_id,
                owner=request.owner,
                decision_id=request.op_id,
                is_undone=request.is_undone,
                only=request.decision_id,
            )
            if isinstance(step, Refusal):
                return ReleaseReply(refusal=step, ledger_sequence=self.ledger.sequence)
            await self._write(step.ledger)
            return ReleaseReply(devices=step.record.devices, ledger_sequence=self.ledger.sequence)

    async def _write(self, ledger: Ledger) -> None:
        """Write the next ledger.

        Errors: raises PeerUnavailable. The requester gets no answer, and asks again with the same
        operation id.
        """
        if ledger is self.ledger:
            return
        written = await self._bus.compare_and_set(catalogue.LEDGER, ledger, self._revision, node=self.node)
        if not isinstance(written, Written):
            raise PeerUnavailable(f"{self.node}: somebody else wrote its ledger")
        self.ledger, self._revision = ledger, written.revision

    def _placed(self, decision_id: str, result: Placement | Refusal) -> PlaceReply:
        return PlaceReply(decision_id=decision_id, node=self.node, result=result, ledger_sequence=self.ledger.sequence)
