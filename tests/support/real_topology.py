"""A node's topology service in process: the service itself on a test's bus, watched, and made to
refuse, wait or forget where a test wants that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar, cast

from msgspec import structs

from support.ask_record import AskRecord
from support.runtimes import runtime_of
from topobus.bus.asks.heavy_lane import Workload
from topobus.bus.bus import Bus, Change, Conflict, Written
from topobus.engine.alignment.planning.node_view import node_view
from topobus.engine.health.silence import SilenceSettings
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import (
    Adopted,
    AdoptReply,
    AdoptRequest,
    PlaceReply,
    PlaceRequest,
    ReleaseReply,
    ReleaseRequest,
)
from topobus.formats.messages.nouns import Ask, State
from topobus.process.readiness import Readiness
from topobus.topology.config import AlignmentSettings, TopologySettings
from topobus.topology.service import serve
from topobus.values.device import Inventory
from topobus.values.idset import CpuSet
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine
from topobus.values.outcome import Reason, Refusal
from topobus.values.request import Owner
from topobus.values.view import NodeView

M = TypeVar("M")
Q = TypeVar("Q")
R = TypeVar("R")

# The device services are not there: their silence is another test's matter.
_SETTINGS = TopologySettings(silence=SilenceSettings(every_s=3600.0, gone_s=3600.0, hung_s=3600.0))


class _ReadyEvent(Readiness):
    """Readiness that one can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.happened = asyncio.Event()

    def set(self, part: str, is_ready: bool, why: str = "") -> None:
        super().set(part, is_ready, why)
        if self.is_ready:
            self.happened.set()


class WatchedTopology(Bus):
    """The bus of a topology service: notes what the service is asked and what it writes, and may
    answer in its place or late.
    """

    def __init__(
        self,
        bus: Bus,
        node: str,
        view: NodeView | None = None,
        *,
        alignment: AlignmentSettings = _SETTINGS.alignment,
        asks: AskRecord | None = None,
    ) -> None:
        super().__init__(bus._connection)
        self._node = node
        self._view = view
        self._settings = structs.replace(_SETTINGS, alignment=alignment)
        self.ledger = Ledger(node=node)
        """What the service has written last."""
        self.asks = asks if asks is not None else AskRecord()
        self.refuse_next = 0
        """How many commits to refuse, as if the ledger had just changed."""
        self._heard: dict[str, int] = {}
        self._has_heard = asyncio.Condition()
        self._is_answering = asyncio.Event()
        self._handlers: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def requests(self) -> list[PlaceRequest]:
        """Give what it was asked to place, in order."""
        return self.asks.requests("place")

    def view(self) -> NodeView:
        """Show the node with nothing held."""
        assert self._view is not None
        return self._view

    async def wait_until_heard(self, state: State[Any], revision: int) -> None:
        """Wait until the service has taken in what was written as this revision of a bucket."""
        async with asyncio.timeout(60), self._has_heard:
            await self._has_heard.wait_for(lambda: self._heard.get(state.name, 0) >= revision)

    async def watch(
        self, state: State[M], on_rejected: Callable[[str, str], None] | None = None, /, **parts: str
    ) -> AsyncGenerator[Change[M], None]:
        """Watch, and note what the service has taken in: it asks for
        the next change when it has.
        """
        async with aclosing(super().watch(state, on_rejected, **parts)) as changes:
            async for change in changes:
                yield change
                async with self._has_heard:
                    self._heard[state.name] = max(change.revision, self._heard.get(state.name, 0))
                    self._has_heard.notify_all()

    async def compare_and_set(
        self, state: State[M], value: M, expected_revision: int, **parts: str
    ) -> Written | Conflict:
        """Write, and remember a ledger that was written."""
        done = await super().compare_and_set(state, value, expected_revision, **parts)
        if isinstance(done, Written) and isinstance(value, Ledger):
            self.ledger = value
        return done

    async def answer(
        self,
        ask: Ask[Q, R],
        handler: Callable[[Q], Awaitable[R]],
        *,
        concurrency: int = 64,
        workload: Workload[Q, R] | None = None,
        **parts: str,
    ) -> None:
        """Answer, and look at each request first."""
        watched = self._watched(ask.name, cast("Callable[[Any], Awaitable[Any]]", handler))
        self._handlers[ask.name] = cast("Callable[[Any], Awaitable[Any]]", handler)
        await super().answer(
            ask, cast("Callable[[Q], Awaitable[R]]", watched), concurrency=concurrency, workload=workload, **parts
        )
        if ask.name == catalogue.RELEASE.name:
            # The last one that the service begins to answer.
            self._is_answering.set()

    async def start(self) -> None:
        """Run the service from now on.

        Gives back when it answers and has heard of the machine and its devices.

        Errors: raises what the service ends with before that.
        """
        readiness = _ReadyEvent()
        runtime = runtime_of("topology", self._node, self, readiness=readiness)
        self._is_answering.clear()
        self._task = asyncio.create_task(serve(self._settings, runtime), name=f"topology-{self._node}")
        for event in (self._is_answering, readiness.happened):
            waiting = asyncio.create_task(event.wait())
            await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                waiting.cancel()
                self._task.result()

    async def stop(self) -> None:
        """End the service.

        Errors: raises what it ended with, if it had before.
        """
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()
        await self.stop_answering()

    async def lose_ledger(self) -> None:
        """Hold nothing and remember no operation, as a node does whose store was lost while its
        topology service was down.
        """
        await self.stop()
        await self.delete(catalogue.LEDGER, node=self._node)
        await self.start()

    async def begin_from(self, older: Ledger) -> None:
        """Begin from an older ledger, as a node does whose store was put back from a copy while its
        topology service was down.
        """
        await self.stop()
        await self.delete(catalogue.LEDGER, node=self._node)
        await self.put(catalogue.LEDGER, older, node=self._node)
        await self.start()

    async def set_prepared(self, owner: Owner, *, is_prepared: bool) -> None:
        """Do what the gateway does: report that the owner's devices are prepared for a container,
        or no longer.
        """
        op_id = f"prepared-{is_prepared}-{self.ledger.sequence}"
        if is_prepared:
            (holding,) = self.ledger.allocations[owner.key].holdings
            await self.hold(AdoptRequest(op_id=op_id, owner=owner, devices=holding.devices, is_prepared=True))
        else:
            await self.let_go(ReleaseRequest(op_id=op_id, owner=owner, is_undone=True, keeps_devices=True))

    async def hold(self, request: AdoptRequest) -> None:
        """Write a holding as another client's adoption does. It is not noted as a request."""
        adopted: AdoptReply = await self._handlers[catalogue.ADOPT.name](request)
        assert isinstance(adopted.result, Adopted), adopted

    async def let_go(self, request: ReleaseRequest) -> None:
        """Take a holding out again."""
        released: ReleaseReply = await self._handlers[catalogue.RELEASE.name](request)
        assert released.refusal is None, released

    def _watched(self, verb: str, handler: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        async def look_first(request: Any) -> Any:
            await self.asks.note(verb, request)
            reply = self._refused(request) or await handler(request)
            if done := _done(request, reply):
                await self.asks.note(done, request)
            return reply

        return look_first

    def _refused(self, request: Any) -> PlaceReply | None:
        if not self.refuse_next or not isinstance(request, PlaceRequest) or request.is_dry_run:
            return None
        self.refuse_next -= 1
        refusal = Refusal(reasons=(Reason(code="test", message="refused by the test"),))
        return PlaceReply(
            decision_id=f"d-{request.op_id}", node=self._node, result=refusal, ledger_sequence=self.ledger.sequence
        )


def _done(request: Any, reply: Any) -> str:
    """Name what was done, for the record; empty when it was refused, or changes nothing."""
    match reply:
        case AdoptReply(result=Adopted()):
            return "named" if request.names_pods_of else "adopted"
        case ReleaseReply(refusal=None):
            return "released"
    return ""


@asynccontextmanager
async def topology_service(
    bus: Bus,
    machine: Machine,
    inventories: Iterable[Inventory] = (),
    *,
    alignment: AlignmentSettings = _SETTINGS.alignment,
) -> AsyncIterator[WatchedTopology]:
    """Run a node's topology service for the length of a block.

    Somebody else publishes what the node has.
    """
    by_class = {inventory.device_class: inventory for inventory in inventories}
    watched = WatchedTopology(
        bus, machine.node, node_view(machine, by_class, None, alignment.options(), CpuSet()), alignment=alignment
    )
    try:
        await watched.start()
        yield watched
    finally:
        await watched.stop()


@asynccontextmanager
async def real_topology(
    bus: Bus, machine: Machine, inventories: list[Inventory], *, alignment: AlignmentSettings = _SETTINGS.alignment
) -> AsyncIterator[WatchedTopology]:
    """Publish what a node has, and run its topology service for the length of a block."""
    await bus.put(catalogue.MACHINE, machine, node=machine.node)
    for inventory in inventories:
        await bus.put(catalogue.INVENTORY, inventory, node=machine.node, device_class=inventory.device_class)
    async with topology_service(bus, machine, inventories, alignment=alignment) as watched:
        yield watched
