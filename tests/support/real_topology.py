"""A node's topology service in process: the service itself on a test's bus, watched, and made to refuse where a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry

from topobus.contracts import catalogue
from topobus.contracts.catalogue import Ask, State
from topobus.contracts.messages import Adopted, AdoptReply, AdoptRequest, PlaceReply, PlaceRequest, ReleaseReply, ReleaseRequest
from topobus.domain.alignment.planning.node_view import node_view
from topobus.domain.device import Inventory
from topobus.domain.idset import CpuSet
from topobus.domain.ledger import Ledger
from topobus.domain.machine import Machine
from topobus.domain.outcome import Reason, Refusal
from topobus.domain.request import Owner
from topobus.domain.silence import SilenceSettings
from topobus.domain.view import AlignmentOptions, NodeView
from topobus.runtime.bus import Bus, Conflict, Written
from topobus.runtime.clock import SystemClock
from topobus.runtime.readiness import Readiness
from topobus.runtime.service import Runtime
from topobus.topology.config import TopologySettings
from topobus.topology.service import serve

M = TypeVar("M")
Q = TypeVar("Q")
R = TypeVar("R")

# The device services are not there: their silence is another test's matter.
_SETTINGS = TopologySettings(silence=SilenceSettings(gone_s=3600.0, hung_s=3600.0))


class WatchedTopology(Bus):
    """The bus of a topology service: notes what the service is asked and what it writes, and may answer in its place."""

    def __init__(self, bus: Bus, node: str, view: NodeView | None = None) -> None:
        super().__init__(bus._connection)
        self._node = node
        self._view = view
        self.ledger = Ledger(node=node)
        """What the service has written last."""
        self.requests: list[PlaceRequest] = []
        self.refuse_next = 0
        """How many commits to refuse, as if the ledger had just changed."""
        self.is_answering = asyncio.Event()
        self._handlers: dict[str, Callable[[Any], Awaitable[Any]]] = {}

    def view(self) -> NodeView:
        """Show the node with nothing held."""
        assert self._view is not None
        return self._view

    async def compare_and_set(self, state: State[M], value: M, expected_revision: int, **parts: str) -> Written | Conflict:
        """Write, and remember a ledger that was written."""
        done = await super().compare_and_set(state, value, expected_revision, **parts)
        if isinstance(done, Written) and isinstance(value, Ledger):
            self.ledger = value
        return done

    async def answer(self, ask: Ask[Q, R], handler: Callable[[Q], Awaitable[R]], *, concurrency: int = 64, **parts: str) -> None:
        """Answer, and look at each request for a place first."""
        if ask.name == catalogue.PLACE.name:
            handler = cast("Callable[[Q], Awaitable[R]]", self._look_first(cast("Any", handler)))
        self._handlers[ask.name] = cast("Callable[[Any], Awaitable[Any]]", handler)
        await super().answer(ask, handler, concurrency=concurrency, **parts)
        if ask.name == catalogue.RELEASE.name:
            # The last one that the service begins to answer.
            self.is_answering.set()

    async def set_prepared(self, owner: Owner, *, is_prepared: bool) -> None:
        """Do what the gateway does: say that the owner's devices are prepared for a container, or not any more."""
        op_id = f"prepared-{is_prepared}-{self.ledger.sequence}"
        if is_prepared:
            (holding,) = self.ledger.allocations[owner.key].holdings
            adopted: AdoptReply = await self._handlers[catalogue.ADOPT.name](
                AdoptRequest(op_id=op_id, owner=owner, devices=holding.devices, is_prepared=True)
            )
            assert isinstance(adopted.result, Adopted), adopted
        else:
            released: ReleaseReply = await self._handlers[catalogue.RELEASE.name](
                ReleaseRequest(op_id=op_id, owner=owner, is_undone=True, keeps_devices=True)
            )
            assert released.refusal is None, released

    def _look_first(self, place: Callable[[PlaceRequest], Awaitable[PlaceReply]]) -> Callable[[PlaceRequest], Awaitable[PlaceReply]]:
        async def look(request: PlaceRequest) -> PlaceReply:
            self.requests.append(request)
            if self.refuse_next and not request.is_dry_run:
                self.refuse_next -= 1
                refusal = Refusal(reasons=(Reason(code="test", message="refused by the test"),))
                return PlaceReply(decision_id=f"d-{request.op_id}", node=self._node, result=refusal, ledger_sequence=self.ledger.sequence)
            return await place(request)

        return look


@asynccontextmanager
async def real_topology(bus: Bus, machine: Machine, inventories: list[Inventory]) -> AsyncIterator[WatchedTopology]:
    """Publish what a node has, and run its topology service for the length of a block."""
    node = machine.node
    await bus.put(catalogue.MACHINE, machine, node=node)
    for inventory in inventories:
        await bus.put(catalogue.INVENTORY, inventory, node=node, device_class=inventory.device_class)
    by_class = {inventory.device_class: inventory for inventory in inventories}
    watched = WatchedTopology(bus, node, node_view(machine, by_class, None, AlignmentOptions(), CpuSet()))
    readiness = Readiness()
    runtime = Runtime(name="topology", node=node, bus=watched, clock=SystemClock(), readiness=readiness, registry=CollectorRegistry())
    task = asyncio.create_task(serve(_SETTINGS, runtime), name=f"topology-{node}")
    try:
        answering = asyncio.create_task(watched.is_answering.wait())
        await asyncio.wait({task, answering}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            answering.cancel()
            task.result()
        yield watched
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()  # type: ignore[misc]  # checked just before
        await watched.stop_answering()
