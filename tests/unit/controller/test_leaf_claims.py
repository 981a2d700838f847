"""The controller's part and the relay's part of claims on nodes with servers of their own, over one bus: what is allocated is there, and nothing is said for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from topobus.contracts.catalogue import CLAIMS, HELD_CLAIMS, LEDGER, NODE_CLAIM
from topobus.contracts.messages import ApiObject
from topobus.contracts.node_claim_messages import ClaimsReply, ClaimsRequest, HeldClaims, version_of
from topobus.controller.claims.stored import ObjectKey, Stored
from topobus.controller.reconcilers.say_leaf_claims import LeafClaims
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.nats_store import NatsStore
from topobus.domain.errors import PeerUnavailable
from topobus.domain.ledger import Allocation, Ledger
from topobus.domain.request import Owner, OwnerKind
from topobus.relay.hub_link import HubLink
from topobus.relay.node_claims import NodeClaims
from topobus.runtime.bus import Bus
from topobus.runtime.clock import SystemClock
from topobus.runtime.readiness import Readiness
from topobus.runtime.service import Runtime
from topobus.testing.bus import MemoryBus
from topobus.testing.nats.memory_server import MemoryNats

pytestmark = pytest.mark.virtual_time

_NODE = "n1"
_LIMIT_S = 60.0


def _claim(name: str, *nodes: str, uid: str = "", **spec: Any) -> ApiObject:
    """Make a claim that has a GPU of each of these nodes."""
    results = [{"request": "r", "driver": "gpu.topobus.dev", "pool": node, "device": "gpu-0"} for node in nodes]
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": name, "namespace": "default", "uid": uid or f"u-{name}"},
        spec=spec,
        status={"allocation": {"devices": {"results": results}}} if nodes else {},
    )


def _key(name: str) -> ObjectKey:
    return ObjectKey("resourceclaim", "default", name)


@dataclass
class _Side:
    """One controller replica's part: its copy, its store and what it says."""

    state: StandaloneState
    store: NatsStore
    claims: LeafClaims


class _Place:
    """A hub and a node on one bus."""

    def __init__(self, server: MemoryNats, stack: AsyncExitStack) -> None:
        self._server = server
        self._stack = stack
        self.requests: list[ClaimsRequest] = []

    async def bus(self, name: str) -> Bus:
        """Connect as a process."""
        return await self._stack.enter_async_context(MemoryBus.session(self._server, name=name))

    async def runtime(self, name: str, bus: Bus | None = None) -> Runtime:
        """Give what a process is given."""
        bus = bus or await self.bus(name)
        return Runtime(name=name, node=_NODE, bus=bus, clock=SystemClock(), readiness=Readiness(), registry=CollectorRegistry())

    @asynccontextmanager
    async def controller(self) -> AsyncIterator[_Side]:
        """Run one replica's part until the block ends."""
        runtime, state = await self.runtime("controller"), StandaloneState()
        store = NatsStore(runtime.bus, state)
        claims = LeafClaims(runtime, state, store, timeout_s=5.0, parallel=4, is_whole=lambda: True)
        async with _running(claims.run()):
            yield _Side(state, store, claims)

    @asynccontextmanager
    async def relay(self) -> AsyncIterator[Bus]:
        """Run the relay's part until the block ends."""
        runtime = await self.runtime("relay")
        async with _running(NodeClaims(runtime, HubLink(runtime)).run()):
            yield runtime.bus

    async def answer_by(self, answer: Callable[[ClaimsRequest], Awaitable[ClaimsReply]]) -> Bus:
        """Answer in the relay's place, and note that the node has no claims; the requests are kept."""

        async def keep(request: ClaimsRequest) -> ClaimsReply:
            self.requests.append(request)
            return await answer(request)

        bus = await self.bus("relay")
        await bus.answer(CLAIMS, keep, node=_NODE)
        await bus.put(HELD_CLAIMS, HeldClaims(node=_NODE), node=_NODE)
        return bus


@asynccontextmanager
async def _running(work: Awaitable[None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()


@pytest_asyncio.fixture
async def place() -> AsyncIterator[_Place]:
    """All streams are made."""
    async with AsyncExitStack() as stack:
        made = _Place(MemoryNats(), stack)
        await (await made.bus("controller")).provision()
        yield made


@pytest_asyncio.fixture
async def bus(place: _Place) -> Bus:
    """Somebody who looks."""
    return await place.bus("topobus-cli")


async def _until_noted(bus: Bus, *versions: tuple[str, str]) -> None:
    """Wait until the node's note has exactly these claims."""
    wanted = {f"default/{name}": version for name, version in versions}
    async with asyncio.timeout(_LIMIT_S):
        async for change in bus.watch(HELD_CLAIMS, node=_NODE):
            if change.value is not None and change.value.versions == wanted:
                return


async def _write(side: _Side, name: str, value: ApiObject) -> str:
    """Store a claim as the controller does; gives its version."""
    stored = side.state.objects.get(_key(name))
    written = await side.store.put(_key(name), stored.revision if stored is not None else 0, value)
    assert isinstance(written, Stored)
    side.claims.wake()
    return version_of(value, written.revision)


async def test_node_has_what_is_allocated_on_it_when_claims_come_change_and_go(bus: Bus, place: _Place) -> None:
    """The claim as it stands at the hub, then its next version, then nothing; a claim of another node and one that is not allocated never come."""
    async with place.relay(), place.controller() as side:
        await _write(side, "other", _claim("other", "n2"))
        await _write(side, "waiting", _claim("waiting"))
        first = await _write(side, "a", _claim("a", _NODE))
        await _until_noted(bus, ("a", first))
        entry = await bus.get(NODE_CLAIM, node=_NODE, namespace="default", name="a")
        assert entry is not None
        assert (entry.value.claim, entry.value.uid) == (_claim("a", _NODE), "u-a")

        second = await _write(side, "a", _claim("a", _NODE, "n2"))
        await _until_noted(bus, ("a", second))
        await _write(side, "a", _claim("a"))
        await _until_noted(bus)

    assert await bus.list(NODE_CLAIM) == ()


async def test_nothing_is_asked_when_another_replica_starts_and_the_node_has_all(bus: Bus, place: _Place) -> None:
    """A replica that knows nothing reads the note and the claims, and finds no difference."""
    relay = await place.answer_by(lambda _: asyncio.sleep(0, ClaimsReply()))
    async with place.controller() as side:
        version = await _write(side, "a", _claim("a", _NODE))
        await relay.put(HELD_CLAIMS, HeldClaims(node=_NODE, versions={"default/a": version}), node=_NODE)
        await asyncio.sleep(5.0)
        place.requests.clear()
        await asyncio.sleep(600.0)

    assert place.requests == []


async def test_claims_are_deleted_when_they_went_while_nobody_looked(bus: Bus, place: _Place) -> None:
    """A replica that starts finds claims in the note that are allocated nowhere any more."""
    async with place.relay(), place.controller() as side:
        version = await _write(side, "a", _claim("a", _NODE))
        await _until_noted(bus, ("a", version))
    async with place.controller() as first:
        stored = await first.store.get(_key("a"))
        assert stored is not None
        await first.store.delete(_key("a"), stored.revision)
        first.claims.wake()
    async with place.relay(), place.controller() as second:
        second.claims.wake()
        await _until_noted(bus)


async def test_claim_stays_when_only_a_replicas_copy_does_not_have_it_yet(bus: Bus, place: _Place) -> None:
    """What the store has is not taken away by one who is behind."""
    async with place.controller() as ahead:
        version = await _write(ahead, "a", _claim("a", _NODE))
    relay = await place.answer_by(lambda _: asyncio.sleep(0, ClaimsReply()))
    await relay.put(HELD_CLAIMS, HeldClaims(node=_NODE, versions={"default/a": version}), node=_NODE)
    async with place.controller() as behind:
        behind.claims.wake()
        await asyncio.sleep(120.0)

    assert place.requests == []


async def test_node_is_asked_seldom_when_it_takes_nothing(place: _Place) -> None:
    """Ten minutes of a node that is frozen or full: some forty asks, however often something changes meanwhile."""

    async def refuse(_: ClaimsRequest) -> ClaimsReply:
        raise PeerUnavailable("no room")

    await place.answer_by(refuse)
    async with place.controller() as side:
        await _write(side, "a", _claim("a", _NODE))
        for count in range(6000):
            if count % 100 == 0:
                await _write(side, f"other-{count}", _claim(f"other-{count}", "n2"))
            side.claims.wake()
            await asyncio.sleep(0.1)

    assert 5 < len(place.requests) < 150


async def test_node_is_asked_at_once_when_it_is_back_after_a_long_cut(place: _Place) -> None:
    """Its relay's note has another time then: what was put off for longer and longer is said within a second."""

    async def refuse(_: ClaimsRequest) -> ClaimsReply:
        raise PeerUnavailable("cut off")

    relay = await place.answer_by(refuse)
    async with place.controller() as side:
        await _write(side, "a", _claim("a", _NODE))
        for number in range(20):
            await asyncio.sleep(300.0)
            before = len(place.requests)
            await relay.put(HELD_CLAIMS, HeldClaims(node=_NODE, joined_at=f"join-{number}"), node=_NODE)
            await asyncio.sleep(0.5)

            assert len(place.requests) > before, f"join {number}"


async def test_other_claims_come_when_one_is_refused(bus: Bus, place: _Place) -> None:
    """A claim that says another name than its place is refused and not said again; it does not keep its neighbours from the node."""
    async with place.relay(), place.controller() as side:
        wrong = replace(_claim("wrong", _NODE), metadata={"name": "other", "namespace": "default", "uid": "u"})
        await _write(side, "wrong", wrong)
        version = await _write(side, "z", _claim("z", _NODE))
        await _until_noted(bus, ("z", version))


async def test_claim_stays_while_it_is_prepared_when_it_was_deleted(bus: Bus, place: _Place) -> None:
    """The node's own ledger says so, which the controller's copy may not yet; it goes when the ledger says that it is undone."""
    owner = Owner(kind=OwnerKind.CLAIM, namespace="default", name="a", uid="u-a")
    prepared = Ledger(node=_NODE, sequence=1, allocations={owner.key: Allocation(owner=owner, is_prepared=True)})
    await bus.put(LEDGER, prepared, node=_NODE)
    async with place.relay(), place.controller() as side:
        version = await _write(side, "a", _claim("a", _NODE))
        await _until_noted(bus, ("a", version))
        await _write(side, "a", _claim("a"))
        await asyncio.sleep(60.0)
        assert await bus.get(NODE_CLAIM, node=_NODE, namespace="default", name="a") is not None

        await bus.put(LEDGER, Ledger(node=_NODE, sequence=2), node=_NODE)
        await _until_noted(bus)


async def test_all_claims_come_when_they_need_several_requests(bus: Bus, place: _Place) -> None:
    """A node whose store was lost has hundreds of kilobytes to be told: no request is larger than a server takes."""
    async with place.controller() as side:
        versions = [
            (f"c{number}", await _write(side, f"c{number}", _claim(f"c{number}", _NODE, text="x" * 300_000))) for number in range(7)
        ]
        async with place.relay():
            await _until_noted(bus, *versions)
