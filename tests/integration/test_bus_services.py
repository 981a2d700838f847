"""NATS' services protocol over the bus, on the server in memory and on real ones: a tool sees who is there, what is answered and how often, and makes nobody act for it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from nats.micro.service import SEMVER_REGEX, ServiceInfo, ServicePing, ServiceStats

from integration.values import release, released
from support.nats_tools import OPEN_INBOX, introduced, open_tool
from topobus.contracts.catalogue import BUCKETS, EVENTS, LEDGER, PLAN, RELEASE
from topobus.contracts.messages import ReleaseReply, ReleaseRequest
from topobus.contracts.streams import STREAM_LISTS, bucket_stream
from topobus.domain.errors import HardwareError
from topobus.runtime.bus import Bus
from topobus.runtime.config import NatsSettings
from topobus.simulation.nats_server import NatsServer

pytestmark = [pytest.mark.integration, pytest.mark.both_buses]


async def _release(_request: ReleaseRequest) -> ReleaseReply:
    return released()


async def _never(_request: Any) -> Any:
    raise AssertionError("nobody asks")


async def test_process_says_who_it_is_when_a_tool_asks_all_its_name_or_itself(nats_server: NatsServer) -> None:
    """The three verbs are answered at the three kinds of subjects, in the shape that nats-py's own client side reads."""
    async with Bus.session(NatsSettings(url=nats_server.url), name="topology") as bus, open_tool(nats_server.url) as tool:
        await bus.provision()
        await bus.answer(RELEASE, _release, node="node1.example")
        await introduced(bus, "node1.example")
        (ping,) = await tool.ask("PING", wanted=1)
        (info,) = await tool.ask("INFO", "topobus-topology", wanted=1)
        (stats,) = await tool.ask("STATS", "topobus-topology", ping["id"], wanted=1)

    own = {"principal": "topology", "release": bus.release, "node": "node1.example"}
    read_ping, read_info, read_stats = ServicePing.from_dict(ping), ServiceInfo.from_dict(info), ServiceStats.from_dict(stats)
    assert [answer["type"] for answer in (ping, info, stats)] == [read_ping.type, read_info.type, read_stats.type]
    for answer in (read_ping, read_info, read_stats):
        assert (answer.name, answer.id, answer.metadata) == ("topobus-topology", ping["id"], own)
        assert SEMVER_REGEX.match(answer.version)
    assert ping["id"].startswith("node1_example-")
    assert (read_info.description or "").startswith("Topobus: ")
    assert [endpoint.to_dict() for endpoint in read_info.endpoints] == [
        {"name": "release", "subject": RELEASE.subject(node="node1.example"), "queue_group": "", "metadata": {"node": "node1.example"}}
    ]
    assert [(endpoint.name, endpoint.subject) for endpoint in read_stats.endpoints] == [("release", RELEASE.subject(node="node1.example"))]


async def test_statistics_are_those_of_real_asks_when_some_failed(nats_server: NatsServer) -> None:
    """Requests, errors, the last error and the outcomes are what askers met; a sign of life and a tool's own questions are no requests."""
    is_sick = False

    async def handle(_request: ReleaseRequest) -> ReleaseReply:
        if is_sick:
            raise HardwareError("the card fell off\x1b[31m")
        return released()

    async with (
        Bus.session(NatsSettings(url=nats_server.url), name="topology") as bus,
        Bus.session(NatsSettings(url=nats_server.url), name="gateway") as gateway,
        open_tool(nats_server.url) as tool,
    ):
        await bus.provision()
        await bus.answer(RELEASE, handle, node="n1")
        await introduced(bus, "n1")
        await gateway.is_answered(RELEASE, timeout_s=30, node="n1")
        (before,) = await tool.ask("STATS", wanted=1)
        for _ in range(3):
            await gateway.ask(RELEASE, release(), node="n1")
        is_sick = True
        with pytest.raises(HardwareError):
            await gateway.ask(RELEASE, release(), node="n1")
        (after,) = await tool.ask("STATS", wanted=1)

    (unasked,), (asked,) = before["endpoints"], after["endpoints"]
    assert [unasked[field] for field in ("num_requests", "num_errors", "last_error", "average_processing_time")] == [0, 0, "", 0]
    assert [asked[field] for field in ("num_requests", "num_errors", "last_error")] == [4, 1, "hardware: the card fell off?[31m"]
    assert asked["data"] == {"outcomes": {"answered": 3, "hardware": 1}}
    assert asked["processing_time"] > 0
    assert asked["average_processing_time"] == asked["processing_time"] // 4


async def test_each_process_answers_once_when_several_are_there(nats_server: NatsServer) -> None:
    """A replica is another id of the same name; a name reaches its own processes; the queue group of an ask is said."""
    async with (
        Bus.session(NatsSettings(url=nats_server.url), name="controller") as first,
        Bus.session(NatsSettings(url=nats_server.url), name="controller") as second,
        Bus.session(NatsSettings(url=nats_server.url), name="gpu") as gpu,
        open_tool(nats_server.url) as tool,
    ):
        for bus, node in ((first, "n1"), (second, "n2"), (gpu, "n1")):
            await introduced(bus, node)
        await first.answer(PLAN, _never, node="_")
        everyone = await tool.ask("PING", wanted=3)
        controllers = await tool.ask("INFO", "topobus-controller", wanted=2)

    assert [answer["name"] for answer in everyone] == ["topobus-controller", "topobus-controller", "topobus-gpu"]
    assert len({answer["id"] for answer in everyone}) == 3
    # A controller is of no node, whatever machine it runs on.
    assert [sorted(answer["metadata"]) for answer in controllers] == [["principal", "release"]] * 2
    groups = [endpoint["queue_group"] for answer in controllers for endpoint in answer["endpoints"]]
    assert groups == ["controller"]
    assert everyone[2]["metadata"]["class"] == "gpu"


@pytest.mark.parametrize(
    "reply",
    ["$KV.topobus_ledgers.n1", "topobus.v1.release.n1", "_INBOX.gateway.topology.guess.guess", "_R_.guess1.guess2", ""],
    ids=["key", "ask", "inbox-of-ours", "import", "none"],
)
async def test_nothing_is_answered_when_the_reply_subject_is_no_tools_inbox(nats_server: NatsServer, reply: str) -> None:
    """Who asks cannot have a service write with its own rights: only inboxes of tools are answered."""
    async with (
        Bus.session(NatsSettings(url=nats_server.url), name="topology") as bus,
        open_tool(nats_server.url) as tool,
    ):
        await bus.provision()
        await introduced(bus, "n1")
        heard: asyncio.Queue[bytes] = asyncio.Queue()

        async def hear(message: Any) -> None:
            heard.put_nowait(message.data)

        if reply:
            await tool.client.subscribe(reply, cb=hear)
        await tool.client.publish("$SRV.PING", b"", reply=reply)
        # On the same connection, so that it is looked at later.
        (answer,) = await tool.ask("PING", wanted=1)
        await bus._connection.barrier()
        await tool.ask("PING", wanted=1)

        assert answer["name"] == "topobus-topology"
        assert heard.empty()
        assert await bus.get(LEDGER, node="n1") is None


async def test_verb_without_an_answer_is_left_alone(nats_server: NatsServer) -> None:
    """What a later revision of the protocol asks is no error of ours: the next question is answered."""
    async with Bus.session(NatsSettings(url=nats_server.url), name="nic") as bus, open_tool(nats_server.url) as tool:
        await introduced(bus, "n1")
        async with tool.listening() as (inbox, answers):
            await tool.client.publish("$SRV.SCHEMA", b"", reply=inbox)
            await tool.client.publish("$SRV.PING", b"", reply=inbox)
            first = json.loads((await asyncio.wait_for(answers.get(), 60)).data)

        assert first["type"] == "io.nats.micro.v1.ping_response"


async def test_tool_awaits_answers_where_it_likes_when_the_server_has_no_users(own_nats_server: NatsServer) -> None:
    """A tool that is told nothing makes an inbox of its own, and on an open server that is enough."""
    async with (
        Bus.session(NatsSettings(url=own_nats_server.url), name="nic") as bus,
        open_tool(own_nats_server.url, inbox_prefix=OPEN_INBOX) as tool,
    ):
        await introduced(bus, "n1")
        (answer,) = await tool.ask("PING", wanted=1)

    assert answer["name"] == "topobus-nic"


async def test_process_is_seen_again_when_its_server_was_away(own_nats_server: NatsServer) -> None:
    """The next client answers as the one before, under the same id and with what was counted."""
    async with Bus.session(NatsSettings(url=own_nats_server.url), name="topology") as bus:
        await bus.provision()
        await bus.answer(RELEASE, _release, node="n1")
        await introduced(bus, "n1")
        async with open_tool(own_nats_server.url) as tool, Bus.session(NatsSettings(url=own_nats_server.url), name="gateway") as gateway:
            await gateway.ask(RELEASE, release(), node="n1")
            (before,) = await tool.ask("STATS", wanted=1)
        await own_nats_server.stop()
        async with asyncio.timeout(60):
            while bus.is_connected:  # noqa: ASYNC110 - nothing tells when it is lost
                await asyncio.sleep(0.01)
        await own_nats_server.start()
        async with asyncio.timeout(60):
            await bus.wait_connected()
        async with open_tool(own_nats_server.url) as tool:
            (after,) = await tool.ask("STATS", wanted=1)

    assert after == before
    assert after["endpoints"][0]["num_requests"] == 1


async def test_endpoints_are_gone_when_a_process_stops_answering(nats_server: NatsServer) -> None:
    """A gateway that hands over goes on for a while, and says so: it is there and answers nothing."""
    async with Bus.session(NatsSettings(url=nats_server.url), name="topology") as bus, open_tool(nats_server.url) as tool:
        await bus.answer(RELEASE, _release, node="n1")
        await introduced(bus, "n1")
        await bus.stop_answering()
        (info,) = await tool.ask("INFO", wanted=1)

    assert info["endpoints"] == []


@pytest.mark.real_server
async def test_lists_of_streams_and_buckets_are_readable_when_a_tool_shows_them(nats_server: NatsServer, bus: Bus) -> None:
    """`nats stream ls` and `nats kv ls` see each stream of the catalogue under its plain name, with a description for people."""
    async with open_tool(nats_server.url) as tool:
        listing, naming = STREAM_LISTS
        streams = await tool.lists(listing, "streams")
        names = await tool.lists(naming, "streams")
        buckets = await tool.lists(listing, "streams", {"subject": "$KV.*.>"})

    described = {stream["config"]["name"]: stream["config"].get("description", "") for stream in streams}
    wanted = {bucket_stream(state): state.description for state in BUCKETS} | {event.stream: event.description for event in EVENTS}
    assert described == wanted
    assert names == sorted(names) == sorted(wanted)
    assert [stream["config"]["name"] for stream in buckets] == sorted(name for name in wanted if name.startswith("KV_"))
