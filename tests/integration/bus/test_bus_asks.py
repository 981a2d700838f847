"""Asks over a real server: deadlines, errors, concurrency, draining, and what an asker may not make
us do.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from opentelemetry import trace

from integration.values import OWNER, inventory, release, released
from topobus.bus.bus import Bus
from topobus.engine.health.silence import Answered, Silent
from topobus.formats.messages.catalogue import INVENTORY, PLAN, PREPARE, RELEASE
from topobus.formats.messages.messages import PrepareRequest, ReleaseReply, ReleaseRequest
from topobus.formats.messages.plan_messages import PlanReply, PlanRequest
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.testing.clock import ManualClock
from topobus.values.errors import ContractError, HardwareError, InvariantError, PeerUnavailable, TopobusError, UnderWay
from topobus.values.request import PodRequest

pytestmark = [pytest.mark.integration, pytest.mark.both_buses]


async def test_ask_says_nobody_is_there_when_no_peer_listens(bus: Bus) -> None:
    """An absent peer is told at once, with the name of the process that should be running."""
    with pytest.raises(PeerUnavailable, match=r"no service answers release.*is topology running"):
        await asyncio.wait_for(bus.ask(RELEASE, release(), node="n1", timeout_s=600), 60)


async def test_ask_names_the_class_that_was_asked_when_its_service_is_away(bus: Bus) -> None:
    """Many services answer the same question, each for its class: whoever mends it looks at the one
    that is missing.
    """
    request = PrepareRequest(op_id="o", owner=release().owner, devices=("nic-0",))
    with pytest.raises(PeerUnavailable, match=r"no service answers prepare.*is nic running"):
        await asyncio.wait_for(bus.ask(PREPARE, request, node="n1", device_class="nic", timeout_s=600), 60)


async def test_ask_gives_up_when_the_answer_does_not_come_in_time(bus: Bus) -> None:
    """A peer that hangs costs the timeout and not more."""
    never = asyncio.Event()

    async def handle(_request: ReleaseRequest) -> ReleaseReply:
        await never.wait()
        return released()

    await bus.answer(RELEASE, handle, node="n1")
    with pytest.raises(PeerUnavailable, match=r"within 0\.05 s"):
        await bus.ask(RELEASE, release(), node="n1", timeout_s=0.05)
    never.set()


async def test_peer_is_answered_without_being_asked_when_somebody_wants_a_sign_of_life(
    own_nats_server: NatsServer, own_bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sign of life runs no handler, warns of no twin, and tells nobody there, no answer and no
    server apart.
    """
    asked: list[ReleaseRequest] = []

    async def handle(request: ReleaseRequest) -> ReleaseReply:
        asked.append(request)
        return released()

    async with Bus.session(NatsSettings(url=own_nats_server.url), name="gateway") as asker:
        nobody = await asker.is_answered(RELEASE, timeout_s=600, node="n1")
        await own_bus.answer(RELEASE, handle, node="n1")
        answered = await asker.is_answered(RELEASE, timeout_s=30, node="n1")
        hung = await asker.is_answered(RELEASE, timeout_s=1e-9, node="n1")
        await own_nats_server.stop()
        away = await asker.is_answered(RELEASE, timeout_s=30, node="n1")

    assert isinstance(answered, Answered)
    assert answered.instance.startswith("topobus-cli-")
    assert [answer.because for answer in (nobody, hung, away) if isinstance(answer, Silent)] == [
        "nobody",
        "timeout",
        "no-bus",
    ]
    assert asked == []
    assert "twin.found" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("raised", "wanted", "text"),
    [
        (ContractError("device 'x' does not exist"), ContractError, "device 'x' does not exist"),
        (PeerUnavailable("wait a little", retry_after_s=7.0), PeerUnavailable, "wait a little"),
        (UnderWay("half way", retry_after_s=7.0), UnderWay, "half way"),
        (
            HardwareError("the card fell off — again\r\nInjected: yes"),
            HardwareError,
            "the card fell off — again\r\nInjected: yes",
        ),
        (InvariantError("two owners"), PeerUnavailable, "two owners"),
    ],
    ids=["contract", "unavailable", "under-way", "hardware", "invariant"],
)
async def test_ask_raises_the_peers_error_when_its_handler_raised_one(
    bus: Bus, raised: TopobusError, wanted: type[TopobusError], text: str
) -> None:
    """A TopobusError of the handler reaches the asker with its meaning and its words, whatever
    characters they have.
    """

    async def handle(_request: ReleaseRequest) -> ReleaseReply:
        raise raised

    await bus.answer(RELEASE, handle, node="n1")
    with pytest.raises(wanted) as caught:
        await bus.ask(RELEASE, release(), node="n1")
    assert text in str(caught.value)
    if isinstance(caught.value, PeerUnavailable) and isinstance(raised, PeerUnavailable):
        assert caught.value.retry_after_s == 7.0


async def test_ask_learns_nothing_of_the_inside_when_the_handler_failed(bus: Bus) -> None:
    """A bug in a handler is "failed" to the asker: no traceback, no secret, and the next ask is
    served.
    """
    is_first = True

    async def handle(_request: ReleaseRequest) -> ReleaseReply:
        nonlocal is_first
        if is_first:
            is_first = False
            raise KeyError("s3cret")
        return released()

    await bus.answer(RELEASE, handle, node="n1")
    with pytest.raises(PeerUnavailable) as caught:
        await bus.ask(RELEASE, release(), node="n1")
    assert "s3cret" not in str(caught.value)
    assert await bus.ask(RELEASE, release(), node="n1") == released()


async def test_process_crashes_when_a_handler_breaks_an_invariant(bus: Bus) -> None:
    """Our own broken promise ends the process, after the asker was told."""

    async def handle(_request: ReleaseRequest) -> ReleaseReply:
        raise InvariantError("two owners")

    await bus.answer(RELEASE, handle, node="n1")
    with pytest.raises(PeerUnavailable):
        await bus.ask(RELEASE, release(), node="n1")
    with pytest.raises(InvariantError, match="two owners"):
        await asyncio.wait_for(bus.wait_crash(), 10)


async def test_answer_refuses_when_the_request_is_malformed(bus: Bus) -> None:
    """Bytes that are no request give a contract error with the place of the misfit.

    The handler never sees them.
    """
    handled: list[ReleaseRequest] = []

    async def handle(request: ReleaseRequest) -> ReleaseReply:
        handled.append(request)
        return released()

    await bus.answer(RELEASE, handle, node="n1")
    answer = await bus._connection.request(RELEASE.subject(node="n1"), b'{"op_id": 7}', timeout_s=60)

    assert answer.headers is not None
    assert answer.headers["Topobus-Error"] == "contract"
    assert "$.op_id" in answer.headers["Topobus-Error-Message"]
    assert handled == []


async def test_answer_handles_many_at_once_when_handlers_wait(bus: Bus) -> None:
    """Requests are handled side by side up to the limit, the next ones wait their turn, and all are
    answered.
    """
    running = 0
    most = 0
    is_full = asyncio.Event()
    go = asyncio.Event()

    async def handle(_request: ReleaseRequest) -> ReleaseReply:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 4:
            is_full.set()
        await go.wait()
        running -= 1
        return released()

    await bus.answer(RELEASE, handle, concurrency=4, node="n1")
    asking = [asyncio.create_task(bus.ask(RELEASE, release(), node="n1")) for _ in range(20)]
    await asyncio.wait_for(is_full.wait(), 10)
    go.set()

    assert await asyncio.gather(*asking) == [released()] * 20
    assert most == 4


async def test_answer_skips_the_work_when_the_asker_gave_up_meanwhile(nats_server: NatsServer, bus: Bus) -> None:
    """A request whose deadline passed while it waited is not handled: its effect would surprise
    everybody.
    """
    handled: list[str] = []
    is_busy = asyncio.Event()
    go = asyncio.Event()
    clock = ManualClock(start=datetime.now(UTC))

    async def handle(request: ReleaseRequest) -> ReleaseReply:
        handled.append(request.op_id)
        is_busy.set()
        await go.wait()
        return released()

    async with Bus.session(NatsSettings(url=nats_server.url), name="answerer", clock=clock) as answerer:
        await answerer.answer(RELEASE, handle, concurrency=1, node="n1")
        first = asyncio.create_task(bus.ask(RELEASE, release("first"), node="n1"))
        await asyncio.wait_for(is_busy.wait(), 10)
        with pytest.raises(PeerUnavailable):
            await bus.ask(RELEASE, release("late"), node="n1", timeout_s=0.05)
        # A sign of life comes over the same subscription: the late request has arrived before it.
        assert isinstance(await bus.is_answered(RELEASE, timeout_s=30, node="n1"), Answered)
        clock.advance(0.1)
        go.set()
        await first
        await bus.ask(RELEASE, release("last"), node="n1")

    assert handled == ["first", "last"]


async def test_answer_skips_the_work_when_the_request_was_sent_long_ago(bus: Bus) -> None:
    """A request that lay in some buffer past its deadline has no effect, by its own time of
    sending, and its asker is told both clocks.
    """
    handled: list[str] = []

    async def handle(request: ReleaseRequest) -> ReleaseReply:
        handled.append(request.op_id)
        return released()

    await bus.answer(RELEASE, handle, node="n1")
    old = {"Topobus-Deadline-Ms": "100", "Topobus-Sent-Ms": "1700000000000"}
    answer = await bus._connection.request(
        RELEASE.subject(node="n1"), b"{}", headers=old, timeout_s=60, answerer="topology"
    )
    await bus.ask(RELEASE, release("fresh"), node="n1")

    assert answer.headers is not None
    assert answer.headers["Topobus-Error"] == "stale"
    assert "sent at 2023-11-14T22:13:20" in answer.headers["Topobus-Error-Message"]
    assert handled == ["fresh"]


@pytest.mark.parametrize(
    ("ahead_s", "is_served"), [(3.0, True), (-3600.0, True), (60.0, False)], ids=["a-little", "behind", "ahead"]
)
async def test_ask_names_the_clock_that_is_ahead_when_the_peer_takes_it_for_stale(
    nats_server: NatsServer, bus: Bus, capsys: pytest.CaptureFixture[str], ahead_s: float, is_served: bool
) -> None:
    """A node whose clock is ahead serves nothing, and nobody is left in the dark: the asker's
    error, the sign of life and one log line have the seconds.
    """
    clock = ManualClock(start=datetime.now(UTC) + timedelta(seconds=ahead_s))
    handled: list[str] = []

    async def handle(request: ReleaseRequest) -> ReleaseReply:
        handled.append(request.op_id)
        return released()

    async with Bus.session(NatsSettings(url=nats_server.url), name="topology", clock=clock) as topology:
        await topology.answer(RELEASE, handle, node="n1")
        errors = []
        for number in range(5):
            try:
                await bus.ask(RELEASE, release(f"op-{number}"), node="n1")
            except PeerUnavailable as err:
                errors.append(str(err))
        sign = await bus.is_answered(RELEASE, timeout_s=30, node="n1")

    assert len(handled) == (5 if is_served else 0)
    assert len(errors) == (0 if is_served else 5)
    assert isinstance(sign, Answered)
    # The test's clock stands still while the machine's goes on.
    assert ahead_s - 60 < sign.clock_ahead_s <= ahead_s + 1
    if not is_served:
        assert all("clock of n1 is " in error and " s ahead of that of topobus-cli" in error for error in errors)
        assert "".join(capsys.readouterr()).count("ask.stale") == 1


async def test_answer_writes_no_bucket_when_the_asker_names_one_as_its_inbox(bus: Bus) -> None:
    """A reply subject of the asker's choice would make us write the ledger in our own name.

    Only what names an inbox is served.
    """
    await bus.put(INVENTORY, inventory(1), node="n1", device_class="gpu")
    handled: list[str] = []

    async def handle(request: ReleaseRequest) -> ReleaseReply:
        handled.append(request.op_id)
        return released()

    await bus.answer(RELEASE, handle, node="n1")
    request = b'{"op_id":"x","owner":{"kind":"pod","name":"a","uid":"b"}}'
    await bus._connection.publish(RELEASE.subject(node="n1"), request, reply="$KV.topobus_inventories.n1.gpu")
    await bus.ask(RELEASE, release("honest"), node="n1")

    assert handled == ["honest"]
    entry = await bus.get(INVENTORY, node="n1", device_class="gpu")
    assert entry is not None
    assert (entry.revision, entry.value.generation) == (1, 1)


async def test_answer_sends_no_header_of_the_asker_back_when_it_replies(bus: Bus) -> None:
    """Credentials or ids in a request's headers are not reflected, as nats-py's own respond()
    would.
    """

    async def handle(_request: ReleaseRequest) -> ReleaseReply:
        return released()

    await bus.answer(RELEASE, handle, node="n1")
    request = b'{"op_id":"x","owner":{"kind":"pod","name":"a","uid":"b"}}'
    answer = await bus._connection.request(
        RELEASE.subject(node="n1"), request, headers={"Authorization": "s3cret"}, timeout_s=60
    )

    assert "Authorization" not in (answer.headers or {})


async def test_answers_are_not_lost_when_the_service_stops(nats_server: NatsServer, bus: Bus) -> None:
    """A stopping service answers what it has received: ten queued requests, ten answers (nats.micro
    loses nine).
    """
    service = await Bus.connect(NatsSettings(url=nats_server.url), name="service")
    received = 0
    all_here = asyncio.Event()

    async def handle(_request: ReleaseRequest) -> ReleaseReply:
        nonlocal received
        received += 1
        if received == 10:
            all_here.set()
        await all_here.wait()
        return released()

    await service.answer(RELEASE, handle, node="n1")
    asking = [asyncio.create_task(bus.ask(RELEASE, release(), node="n1")) for _ in range(10)]
    await asyncio.wait_for(all_here.wait(), 10)
    await service.close()

    assert await asyncio.gather(*asking) == [released()] * 10


async def test_no_request_is_swallowed_when_the_service_stops_under_load(nats_server: NatsServer, bus: Bus) -> None:
    """Whoever asks a stopping service is answered or told at once that nobody is there.

    Nobody waits for nothing.
    """
    service = await Bus.connect(NatsSettings(url=nats_server.url), name="service")
    is_busy = asyncio.Event()

    async def handle(_request: ReleaseRequest) -> ReleaseReply:
        is_busy.set()
        return released()

    await service.answer(RELEASE, handle, node="n1")
    # Large enough that most of them are still on their way when the service begins to stop.
    asking = [asyncio.create_task(bus.ask(RELEASE, release("x" * 1000), node="n1", timeout_s=60)) for _ in range(500)]
    await is_busy.wait()
    await service.close()
    outcomes = await asyncio.gather(*asking, return_exceptions=True)

    others = {str(outcome) for outcome in outcomes if outcome != released()}
    assert all("no service answers" in other for other in others), others


async def test_one_replica_answers_when_several_share_a_queue_group(nats_server: NatsServer, bus: Bus) -> None:
    """An ask with a queue group is handled by exactly one replica."""
    handled = 0

    async def handle(_request: PlanRequest) -> PlanReply:
        nonlocal handled
        handled += 1
        return PlanReply()

    async with Bus.session(NatsSettings(url=nats_server.url), name="second") as second:
        await bus.answer(PLAN, handle, node="_")
        await second.answer(PLAN, handle, node="_")
        for number in range(10):
            await bus.ask(PLAN, PlanRequest(op_id=str(number), pod=PodRequest(owner=OWNER, containers=())), node="_")

    assert handled == 10


async def test_trace_goes_on_in_the_answerer_when_the_asker_has_one(bus: Bus) -> None:
    """The W3C trace context travels with an ask and is the handler's context."""
    seen: list[int] = []
    context = trace.SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))

    async def handle(_request: ReleaseRequest) -> ReleaseReply:
        seen.append(trace.get_current_span().get_span_context().trace_id)
        return released()

    await bus.answer(RELEASE, handle, node="n1")
    with trace.use_span(trace.NonRecordingSpan(context)):
        await bus.ask(RELEASE, release(), node="n1")

    assert seen == [0xABC]
