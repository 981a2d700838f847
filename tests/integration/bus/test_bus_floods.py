"""Floods of asks: who sends masses waits behind its own, others have their turn, and expensive
requests run behind cheap ones. Counted in turns, not in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from integration.values import OWNER, release, released
from support.looks import next_turn
from topobus.bus.asks.heavy_lane import Workload
from topobus.bus.bus import Bus
from topobus.engine.health.silence import Answered
from topobus.formats.messages.catalogue import PLAN, RELEASE
from topobus.formats.messages.messages import ReleaseReply, ReleaseRequest
from topobus.formats.messages.plan_messages import PlanReply, PlanRequest
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.errors import PeerUnavailable
from topobus.values.request import PodRequest

pytestmark = [pytest.mark.integration, pytest.mark.both_buses]

# Of an ask that nobody waits for any more nothing is done: none of
# these may end before its test does.
_LONG_S = 300.0


class Service:
    """Answers releases one at a time, once it may, and remembers whose."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.handled: list[str] = []

    async def handle(self, request: ReleaseRequest) -> ReleaseReply:
        """Answer one request."""
        await self.may_answer.wait()
        self.handled.append(request.op_id)
        return released()


@pytest_asyncio.fixture
async def service(nats_server: NatsServer) -> AsyncIterator[Service]:
    """A service on a connection of its own."""
    made = Service()
    async with Bus.session(NatsSettings(url=nats_server.url), name="topology") as own:
        await own.answer(RELEASE, made.handle, concurrency=1, node="n1")
        yield made
        made.may_answer.set()


def flood(bus: Bus, count: int, prefix: str = "flood") -> list[asyncio.Task[ReleaseReply]]:
    """Ask so many times at once."""
    return [
        asyncio.create_task(bus.ask(RELEASE, release(f"{prefix}-{number}"), node="n1", timeout_s=_LONG_S))
        for number in range(count)
    ]


async def until_arrived(bus: Bus) -> None:
    """Wait until the service has taken in what was asked before: a sign of life is given in the
    order of arrival.
    """
    # Tasks that were made a moment ago send in their first turns; without these the sign
    # would be asked for before them.
    for _ in range(5):
        await next_turn()
    assert isinstance(await bus.is_answered(RELEASE, timeout_s=60, node="n1"), Answered)


async def until_done(asking: list[asyncio.Task[PlanReply]], count: int) -> None:
    """Wait until so many have their answer."""
    while sum(task.done() for task in asking) < count:
        await asyncio.wait(
            [task for task in asking if not task.done()], timeout=60, return_when=asyncio.FIRST_COMPLETED
        )


async def test_an_asker_is_served_next_when_another_of_its_kind_waits_with_hundreds(
    nats_server: NatsServer, bus: Bus, service: Service
) -> None:
    """Two programs of one principal have turns of their own: the second one waits for the request
    that runs and for one more.
    """
    flooding = flood(bus, 300)
    await until_arrived(bus)
    async with Bus.session(NatsSettings(url=nats_server.url), name="topobus-cli") as other:
        modest = flood(other, 1, "modest")
        await until_arrived(other)
        service.may_answer.set()
        await asyncio.gather(*flooding, *modest)

    assert service.handled.index("modest-0") <= 2
    assert sorted(service.handled) == sorted(["modest-0", *(f"flood-{number}" for number in range(300))])


async def test_a_principal_has_every_second_turn_when_another_floods_from_many_connections(
    nats_server: NatsServer, bus: Bus, service: Service
) -> None:
    """Whoever opens many connections takes turns from its own principal alone: kubelet's way is no
    longer for a flood of the CLI's.
    """
    flooding = flood(bus, 20)
    await until_arrived(bus)
    settings = NatsSettings(url=nats_server.url)
    async with Bus.session(settings, name="topobus-cli") as second, Bus.session(settings, name="gateway") as gateway:
        flooding += flood(second, 20, "second")
        await until_arrived(second)
        wanted = flood(gateway, 5, "gateway")
        await until_arrived(gateway)
        service.may_answer.set()
        await asyncio.gather(*flooding, *wanted)

    assert service.handled.index("gateway-4") <= 2 * 5


async def test_only_the_flood_is_told_to_come_again_when_the_queue_is_full(
    nats_server: NatsServer, bus: Bus, service: Service
) -> None:
    """A full queue has room for who waits with less.

    The flood's newest request loses its place, and is told when to ask again.
    """
    flooding = flood(bus, 1 + 1024)
    await until_arrived(bus)
    async with Bus.session(NatsSettings(url=nats_server.url), name="topobus-cli") as other:
        modest = flood(other, 3, "modest")
        await until_arrived(other)
        service.may_answer.set()
        outcomes = await asyncio.gather(*flooding, return_exceptions=True)
        assert await asyncio.gather(*modest) == [released()] * 3

    refused = [outcome for outcome in outcomes if isinstance(outcome, PeerUnavailable)]
    assert [(error.facts["code"], error.retry_after_s >= 1) for error in refused] == [("busy", True)] * 3
    assert all("ask again in" in str(error) for error in refused)


async def test_a_cheap_request_is_answered_while_expensive_ones_run_and_wait(nats_server: NatsServer, bus: Bus) -> None:
    """Expensive requests run a few at a time and wait in no cheap one's place.

    Who finds no room gets an answer that says when to ask again.
    """
    may_end, are_two = asyncio.Event(), asyncio.Event()
    running: set[str] = set()
    most = 0

    async def handle(request: PlanRequest) -> PlanReply:
        nonlocal most
        if request.node:
            return PlanReply(silent_nodes=("cheap",))
        running.add(request.op_id)
        most = max(most, len(running))
        if len(running) == 2:
            are_two.set()
        await may_end.wait()
        running.discard(request.op_id)
        return PlanReply(silent_nodes=("expensive",))

    def plan(number: int, node: str = "") -> PlanRequest:
        return PlanRequest(op_id=f"op-{number}", pod=PodRequest(owner=OWNER, containers=()), node=node)

    workload = Workload[PlanRequest, PlanReply](
        is_heavy=lambda request: not request.node,
        at_once=2,
        most_waiting=5,
        busy=lambda pause_s: PlanReply(retry_after_s=pause_s),
    )
    async with Bus.session(NatsSettings(url=nats_server.url), name="controller") as service:
        await service.answer(PLAN, handle, concurrency=4, workload=workload, node="_")
        expensive = [
            asyncio.create_task(bus.ask(PLAN, plan(number), node="_", timeout_s=_LONG_S)) for number in range(20)
        ]
        await asyncio.wait_for(are_two.wait(), 60)
        cheap = await bus.ask(PLAN, plan(100, node="n1"), node="_", timeout_s=60)
        assert cheap.silent_nodes == ("cheap",)
        assert len(running) == 2
        await until_done(expensive, 20 - 2 - 5)
        may_end.set()
        replies = await asyncio.gather(*expensive)

    assert most == 2
    assert sum(reply.silent_nodes == ("expensive",) for reply in replies) == 2 + 5
    assert sum(reply.retry_after_s >= 1 for reply in replies) == 20 - 2 - 5
