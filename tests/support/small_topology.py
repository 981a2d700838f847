"""A node's topology on a real bus, as small as can be: the real engine and the real transitions, no crash safety."""

from __future__ import annotations

import asyncio

import msgspec

from topobus.contracts import catalogue
from topobus.contracts.messages import PlaceReply, PlaceRequest, ReleaseReply, ReleaseRequest
from topobus.domain import transitions
from topobus.domain.alignment.planning.node_view import node_view, with_devices, with_ledger
from topobus.domain.alignment.planning.placement import place
from topobus.domain.device import Inventory
from topobus.domain.idset import CpuSet
from topobus.domain.ledger import Ledger
from topobus.domain.machine import Machine
from topobus.domain.outcome import Placement, Reason, Refusal
from topobus.domain.request import Owner
from topobus.domain.view import AlignmentOptions, NodeView
from topobus.runtime.bus import Bus


class SmallTopology:
    """Answers `place` and `release` for one node and writes its ledger."""

    def __init__(self, bus: Bus, machine: Machine, inventories: list[Inventory]) -> None:
        self._bus = bus
        self._node = machine.node
        self._view = node_view(
            machine, {inventory.device_class: inventory for inventory in inventories}, None, AlignmentOptions(), CpuSet()
        )
        self.ledger = Ledger(node=machine.node)
        self.requests: list[PlaceRequest] = []
        self.refuse_next = 0
        """How many commits to refuse, as if the ledger had just changed."""
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Publish an empty ledger and answer from now on."""
        await self._bus.put(catalogue.LEDGER, self.ledger, node=self._node)
        await self._bus.answer(catalogue.PLACE, self._place, node=self._node)
        await self._bus.answer(catalogue.RELEASE, self._release, node=self._node)

    def view(self) -> NodeView:
        """Show the node with nothing held."""
        return self._view

    async def _place(self, request: PlaceRequest) -> PlaceReply:
        async with self._turn:
            self.requests.append(request)
            record = transitions.known(self.ledger, request.op_id)
            if record is not None:
                answer = transitions.placed_by(self.ledger, record)
                return PlaceReply(decision_id=record.decision_id, node=self._node, result=answer)
            result = place(with_devices(with_ledger(self._view, self.ledger), "claim/default/planned/-", request.besides), request.pod)
            if self.refuse_next and not request.is_dry_run:
                self.refuse_next -= 1
                result = Refusal(reasons=(Reason(code="test", message="refused by the test"),))
            if not request.is_dry_run and isinstance(result, Placement):
                step = transitions.reserve(
                    self.ledger, op_id=request.op_id, request=request.pod, placement=result, decision_id=f"d-{request.op_id}"
                )
                await self._keep(step.ledger)
            return PlaceReply(decision_id=f"d-{request.op_id}", node=self._node, result=result, ledger_sequence=self.ledger.sequence)

    async def _release(self, request: ReleaseRequest) -> ReleaseReply:
        async with self._turn:
            step = transitions.release(
                self.ledger,
                op_id=request.op_id,
                owner=request.owner,
                decision_id=f"d-{request.op_id}",
                is_undone=request.is_undone,
                only=request.decision_id,
            )
            if isinstance(step, Refusal):
                return ReleaseReply(refusal=step, ledger_sequence=self.ledger.sequence)
            await self._keep(step.ledger)
            return ReleaseReply(devices=step.record.devices, ledger_sequence=self.ledger.sequence)

    async def set_prepared(self, owner: Owner, *, is_prepared: bool) -> None:
        """Note what the gateway does: the owner's devices are prepared for a container, or not any more."""
        async with self._turn:
            held = msgspec.structs.replace(self.ledger.allocations[owner.key], is_prepared=is_prepared)
            allocations = {**self.ledger.allocations, owner.key: held}
            await self._keep(msgspec.structs.replace(self.ledger, sequence=self.ledger.sequence + 1, allocations=allocations))

    async def clear(self) -> None:
        """Hold nothing and remember no operation, as a node that was never asked."""
        async with self._turn:
            await self._keep(msgspec.structs.replace(self.ledger, sequence=self.ledger.sequence + 1, operations={}, allocations={}))

    async def _keep(self, ledger: Ledger) -> None:
        transitions.check(ledger)
        self.ledger = ledger
        await self._bus.put(catalogue.LEDGER, ledger, node=self._node)
