"""A simulated leaf against a real hub, beside a real leaf server: the hub cannot tell them apart by
what they listen to, say and answer.
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError

from docpages.nats_files import DENIED_EXPORTS, DENIED_IMPORTS, domain_of
from lab.leaves.crowd import Crowd
from lab.leaves.hub import Hub
from lab.leaves.hub_measures import Fleet, draw_growth, measure_fleet
from lab.leaves.leaf_connection import LeafConnection, NoAnswer
from lab.leaves.node_content import NodeContent, Saying, node_name
from lab.leaves.simulated_node import SimulatedNode, asked_subjects
from lab.leaves.swarm import Order
from lab.leaves.watcher import Watcher
from lab.servers.shaped_servers import cheap_folder
from support.looks import next_look
from topobus.bus.asks.ask_headers import PING
from topobus.bus.bus import Bus
from topobus.bus.server_config.up_subjects import up_stored_subject, up_subject
from topobus.engine.health.silence import Answered
from topobus.formats.messages.catalogue import MACHINE, PREFER
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import PreferReply, PreferRequest
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer, free_port
from topobus.values.device import Inventory
from topobus.values.errors import PeerUnavailable
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine

pytestmark = pytest.mark.integration

_REAL, _SIMULATED = "real-node", "simulated-node"
_CLASSES = ("gpu",)
_REQUEST = PreferRequest(device_class="gpu", available=("gpu-7",), size=1)
_LOCKED = 'leafnodes { listen: "127.0.0.1:PORT", authorization { user: a, password: b } }'

T = TypeVar("T")


def _machine(node: str) -> bytes:
    return encode(Machine(node=node, numa_nodes=(), cpus=()))


def _content() -> NodeContent:
    node = "placeholder"
    inventory = Inventory(node=node, device_class="gpu", generation=1)
    return NodeContent(
        node=node,
        sayings=(
            Saying("machine", {}, _machine(node)),
            Saying("inventory", {"device_class": "gpu"}, encode(inventory)),
            Saying("ledger", {}, encode(Ledger(node=node))),
            Saying("health", {"device_class": "gpu", "device": "gpu-0"}, b"{}", {"Nats-Msg-Id": f"{node}-1"}),
        ),
    )


@asynccontextmanager
async def _real_leaf(hub: Hub, folder: Path) -> AsyncIterator[Client]:
    """Run a leaf server with a client behind it that listens to its node's asks as services do."""
    denied = f"deny_exports: {json.dumps(DENIED_EXPORTS)}, deny_imports: {json.dumps(DENIED_IMPORTS)}"
    config = (
        f"server_name: {_REAL}\nleafnodes {{ reconnect: 1, remotes: [ {{ urls: "
        f'["nats://127.0.0.1:{hub.leaf_port}"], {denied} }} ] }}'
    )
    # The block takes the place of the launcher's own, which has no domain.
    config += f'\njetstream {{ store_dir: "{folder}", domain: {domain_of(_REAL)} }}'
    async with NatsServer(parent=cheap_folder(), config=config) as server:
        client = await nats.connect(server.url, inbox_prefix=b"_INBOX.relay.nats", allow_reconnect=False)
        try:

            async def answer(message: Msg) -> None:
                is_ping = PING in (message.headers or {})
                await client.publish(
                    message.reply,
                    b"" if is_ping else encode(PreferReply(devices=("gpu-7",))),
                    headers={PING: _REAL} if is_ping else None,
                )

            for subject in asked_subjects(_REAL, _CLASSES):
                await client.subscribe(subject, cb=answer)
            yield client
        finally:
            await client.close()


def _interest(hub: Hub) -> dict[str, set[str]]:
    """What each leaf listens to, as the hub says it.

    What differs from connection to connection is left out.
    """
    with urllib.request.urlopen(f"http://127.0.0.1:{hub.monitor_port}/leafz?subs=1", timeout=30) as page:
        leaves = json.load(page)["leafs"]
    interest: dict[str, set[str]] = {}
    for leaf in leaves:
        subjects = {
            re.sub(r"^(_INBOX\.relay\.nats\.)[^.]+", r"\1random", subject) for subject in leaf["subscriptions_list"]
        }
        # Older servers do not name the leaf there: it is the node's to whose asks it listens.
        node = next(node for node in (_REAL, _SIMULATED) if PREFER.subject(node=node) in subjects)
        interest[node] = {subject.replace(node, "node") for subject in subjects if not subject.startswith("$LDS.")}
    return interest


async def _until(step: Callable[[], Awaitable[T | None]]) -> T:
    """Try until it succeeds: a leaf server connects to its hub, and hears what the hub listens to,
    in its own time.
    """
    async with asyncio.timeout(60):
        while (outcome := await step()) is None:
            await next_look()
    return outcome


async def test_simulated_leaf_is_to_the_hub_as_a_real_one(tmp_path: Path) -> None:
    """A real leaf server and a simulated leaf have the same interest at the hub, store the same,
    read the same back and answer an ask.
    """
    async with (
        Hub(parent=cheap_folder()) as hub,
        Bus.session(NatsSettings(url=hub.url), name="topobus-cli") as bus,
        _real_leaf(hub, tmp_path) as client,
    ):
        await bus.provision()

        async def say(subject: str, data: bytes) -> bytes | None:
            try:
                return (await client.request(subject, data, timeout=30)).data
            except NoRespondersError:
                return None

        async def hear(node: str) -> Answered | None:
            answer = await bus.is_answered(PREFER, timeout_s=30, node=node)
            return answer if isinstance(answer, Answered) else None

        simulated = SimulatedNode(_SIMULATED, _content(), "127.0.0.1", hub.leaf_port)
        await simulated.join()
        await simulated.say_all()
        acknowledged = await _until(lambda: say(up_subject(MACHINE, node=_REAL), _machine(_REAL)))
        await _until(lambda: hear(_REAL))

        replies = {node: await bus.ask(PREFER, _REQUEST, timeout_s=30, node=node) for node in (_REAL, _SIMULATED)}
        stored = {
            node: (await simulated.connection.request(up_stored_subject(MACHINE, node=node), b"", timeout_s=30)).data
            for node in (_REAL, _SIMULATED)
        }
        interest = _interest(hub)
        simulated.leave()

    assert b'"KV_topobus_machines"' in acknowledged
    assert replies == {_REAL: PreferReply(devices=("gpu-7",)), _SIMULATED: PreferReply(devices=())}
    assert stored == {node: _machine(node) for node in (_REAL, _SIMULATED)}
    # What remains is the leaf's own server, which answers for itself
    # ($SYS.REQ.…): no part of a node.
    assert {subject for subject in interest[_REAL] if not subject.startswith("$SYS.")} == interest[_SIMULATED]
    assert len(interest[_SIMULATED]) == len(asked_subjects("node", _CLASSES)) + 1


async def test_fleet_is_known_and_counted_when_its_processes_join(tmp_path: Path) -> None:
    """The benchmark's processes bring their nodes to the hub, whose watcher knows each of them
    whole and whose counts show them.
    """
    content = _content()
    async with (
        Hub(parent=cheap_folder()) as hub,
        Bus.session(NatsSettings(url=hub.url), name="topobus-cli") as bus,
    ):
        await bus.provision()
        async with Watcher(bus, content) as watcher, Crowd(hub.leaf_port, content, tmp_path) as crowd:
            reports = await crowd.order(Order(do="join", count=5))
            known_at = await watcher.wait_for([node_name(number) for number in range(5)])
            counts = await hub.counts()
            compared = await crowd.order(Order(do="compare"))
            with pytest.raises(RuntimeError, match="no such order"):
                await crowd.order(Order(do="sing"))

    assert sorted(report.done for report in reports) == [2, 3]
    assert sum(len(report.acknowledged_ms) for report in reports) == 5 * len(content.sayings)
    assert all(known_at)
    assert (counts.leaves, counts.leaf_messages_in) == (5, 5 * len(content.sayings))
    assert sum(len(report.acknowledged_ms) for report in compared) == 5 * 3


async def test_bench_measures_every_figure_when_the_fleet_is_small() -> None:
    """The benchmark comes to its end at its smallest size, hub restart included, with each figure
    that the plot draws but the controller's.
    """
    fleet = Fleet(
        nodes=2, content=_content(), rest_s=0.0, settle_s=0.0, change_s=0.0, has_controller=False, parent=cheap_folder()
    )

    row = await measure_fleet(fleet)

    drawn = draw_growth([row])
    assert drawn.count("<circle") == 4
    assert row["nodes"] == 2
    assert row["join: interest lines to a leaf"] > 0
    assert [name for name, value in row.items() if value is None] == []


async def test_simulated_leaf_says_why_when_the_hub_refuses_it_or_ends() -> None:
    """A hub that wants a password, and one that goes away in the middle, are errors that name node
    and hub's word.
    """
    async with NatsServer(parent=cheap_folder(), config=_LOCKED.replace("PORT", str(port := free_port()))):
        with pytest.raises(PeerUnavailable, match="refused the leaf: Authorization Violation"):
            await LeafConnection.open("127.0.0.1", port, name="n1")
    async with Hub(parent=cheap_folder()) as hub:
        connection = await LeafConnection.open("127.0.0.1", hub.leaf_port, name="n1")
        await hub.kill()
        await connection.ended
        with pytest.raises(NoAnswer, match="n1"):
            await connection.request("topobus.v1.up.n1.machine", b"{}", timeout_s=30)
    with pytest.raises(PeerUnavailable, match="cannot connect to the hub"):
        await LeafConnection.open("127.0.0.1", hub.leaf_port, name="n1")
