"""Attacks on asks with the credential of a principal, on a real server with the shipped
permissions: none has an effect, each is counted.

The server delivers what it is told to deliver, to any subject, with rights of its own: stored
messages by a consumer's `deliver_subject`, and what it says itself (acknowledgements, answers of
JetStream's interface) at a message's reply subject.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs
from prometheus_client import CollectorRegistry

from docpages.samples import sample
from support.alignment_nodes import container, dgx_facts, pod
from support.asking import ask_patiently
from support.running import Service, service
from support.secured_nats import Attacker, SecuredNats, secured_nats
from topobus.bus.bus import Bus
from topobus.bus.connection.reply_inbox import new_token
from topobus.bus.server_config.inboxes import answerer_of
from topobus.bus.server_config.nats_permissions import render_permissions
from topobus.bus.server_config.streams import stream_names
from topobus.bus.streams.events import Start
from topobus.engine.health.silence import Answered
from topobus.formats.messages.catalogue import (
    ASKS,
    DECISION,
    HINT,
    INVENTORY,
    LEDGER,
    LINK,
    MACHINE,
    PLACE,
    PREPARE,
    PROVISIONER,
    RELEASE,
)
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import PlaceRequest
from topobus.formats.messages.nouns import Ask
from topobus.values.ledger import Ledger
from topobus.values.outcome import Placement

pytestmark = pytest.mark.integration

NODE = "demo-node"
LIMIT_S = 30.0
TRAINER = pod("trainer", container(cpus=16, gpu=2, nic=2))
# Where the gpu service may write: a key of its class's bucket.
_OWN_KEY = "$KV.topobus_inventories_gpu.attack.gpu"
_OWN_STREAM = "KV_topobus_inventories_gpu"


def _parts(ask: Ask[Any, Any]) -> dict[str, str]:
    return {part: {"node": NODE, "device_class": "gpu"}[part] for part in ask.parts}


def _asker_of(ask: Ask[Any, Any]) -> str:
    return "gateway" if "gateway" in ask.readers else "cli"


class Answering:
    """An ask answered under its own principal, with what its handler was given and what was dropped
    before it.
    """

    def __init__(self, ask: Ask[Any, Any]) -> None:
        self.ask = ask
        self.handled: list[object] = []
        self.registry = CollectorRegistry()

    async def handle(self, request: object) -> object:
        """Note the request."""
        self.handled.append(request)
        return sample(self.ask.reply)

    def dropped(self) -> int:
        """Count what came to the ask's subject and was no request."""
        counts = (
            self.registry.get_sample_value("topobus_bus_strays_total", {"noun": self.ask.name, "why": why})
            for why in ("subject", "reply")
        )
        return sum(int(count or 0) for count in counts)


@asynccontextmanager
async def answering(nats: SecuredNats, ask: Ask[Any, Any]) -> AsyncIterator[Answering]:
    """Answer an ask as its writer does."""
    principal = answerer_of(ask, "gpu")
    answerer = Answering(ask)
    async with nats.bus(principal, registry=answerer.registry) as bus:
        await bus.provision()
        await bus.answer(ask, answerer.handle, **_parts(ask))
        yield answerer


async def _until_seen(nats: SecuredNats, answerer: Answering, count: int) -> None:
    """Have one who may ask exchange signs of life with the answerer until it has seen so many
    messages, which the server brings in its own time.
    """
    async with nats.bus(_asker_of(answerer.ask)) as asker, asyncio.timeout(LIMIT_S):
        while len(answerer.handled) + answerer.dropped() < count:
            sign = await asker.is_answered(answerer.ask, timeout_s=LIMIT_S, **_parts(answerer.ask))
            assert isinstance(sign, Answered)


@pytest_asyncio.fixture
async def nats(nats_binary: Path, tmp_path: Path) -> AsyncIterator[SecuredNats]:
    """A server with the shipped permissions."""
    async with secured_nats(tmp_path, binary=nats_binary) as server:
        yield server


# Whose answerer is a user of a central server; a node's own server is
# attacked in test_leaf_attacks.py.
_ASKS = [ask for ask in ASKS if ask is not LINK]


@pytest.mark.parametrize("ask", _ASKS, ids=lambda ask: ask.name)
async def test_ask_is_not_served_when_the_server_delivers_a_stored_message(
    nats: SecuredNats, ask: Ask[Any, Any]
) -> None:
    """A request stored under the attacker's own key, and a sign of life and a twin's question,
    reach the ask's subject and nothing happens.
    """
    subject = ask.subject(**_parts(ask))
    async with answering(nats, ask) as answerer, nats.attacker("gpu") as attacker, nats.attacker("cli") as reader:
        inbox = f"_INBOX.{_asker_of(ask)}.{answerer_of(ask, 'gpu')}.{new_token()}"
        for headers in ({}, {"Topobus-Ping": inbox}, {"Topobus-Twin": "attacker"}):
            await attacker.ask(_OWN_KEY, encode(sample(ask.request)), headers=headers)
        # A device service may make no consumer; somebody who reads inventories by one may.
        answer = await reader.deliver(
            _OWN_STREAM, "$KV.topobus_inventories_gpu.>", subject, deliver_group=ask.queue_group
        )
        assert b'"error"' not in answer
        await _until_seen(nats, answerer, 3)

        assert (len(answerer.handled), answerer.dropped()) == (0, 3)


@pytest.mark.parametrize("ask", _ASKS, ids=lambda ask: ask.name)
@pytest.mark.parametrize("principal", ["gpu", "user"])
async def test_ask_is_not_served_when_the_server_answers_at_its_subject(
    nats: SecuredNats, ask: Ask[Any, Any], principal: str
) -> None:
    """What JetStream says to a request whose reply subject is the ask's is no request, and no sign
    of life is given for it.
    """
    async with answering(nats, ask) as answerer, nats.attacker(principal) as attacker:
        await attacker.send(
            "$JS.API.STREAM.NAMES" if principal == "user" else _OWN_KEY, b"{}", reply=ask.subject(**_parts(ask))
        )
        await _until_seen(nats, answerer, 1)

        assert attacker.denials == []
        assert (len(answerer.handled), answerer.dropped()) == (0, 1)


@pytest.mark.parametrize("ask", [PREPARE, HINT], ids=lambda ask: ask.name)
async def test_ask_is_not_served_when_its_own_service_asks_for_more_than_a_twin(
    nats: SecuredNats, ask: Ask[Any, Any]
) -> None:
    """Who answers an ask may publish there to look for a twin, and cannot use that to ask, nor to
    be answered in another's inbox.
    """
    subject = ask.subject(**_parts(ask))
    request = encode(sample(ask.request))
    async with answering(nats, ask) as answerer, nats.attacker("gpu") as attacker:
        await attacker.send(subject, request, reply=f"_INBOX.gpu.gpu.{new_token()}")
        await attacker.send(subject, request)
        await attacker.send(subject, request, reply=_OWN_KEY)
        await attacker.send(subject, request, reply="_INBOX.nic.gpu.x", headers={"Topobus-Twin": "attacker"})
        await _until_seen(nats, answerer, 4)

        assert attacker.denials == []
        assert (len(answerer.handled), answerer.dropped()) == (0, 4)


@asynccontextmanager
async def _topology(nats: SecuredNats) -> AsyncIterator[tuple[Service, Bus]]:
    """The real topology service of the demo machine, with a pod placed, and the gateway's bus."""
    machine, inventories = dgx_facts()
    async with AsyncExitStack() as stack:
        discovery = await stack.enter_async_context(nats.bus("discovery"))
        gateway = await stack.enter_async_context(nats.bus("gateway"))
        async with nats.bus(PROVISIONER) as provisioner:
            await provisioner.provision()
        await discovery.put(MACHINE, machine, node=NODE)
        for device_class, inventory in inventories.items():
            async with nats.bus(device_class) as owner:
                await owner.put(INVENTORY, inventory, node=NODE, device_class=device_class)
        topology = await stack.enter_async_context(service("topology", nats.url, nats.environment()))
        placed = await ask_patiently(gateway, PLACE, PlaceRequest(op_id="op-1", pod=TRAINER), node=NODE)
        assert isinstance(placed.result, Placement)
        yield topology, gateway


async def _ledger(bus: Bus) -> Ledger:
    entry = await bus.get(LEDGER, node=NODE)
    assert entry is not None
    return entry.value


async def _release_by_decisions(attacker: Attacker) -> None:
    """A decision event has `op_id` and `owner`, so it reads as a ReleaseRequest."""
    assert b'"error"' not in await attacker.deliver(
        "TOPOBUS_DECISIONS", "topobus.v1.decision.>", RELEASE.subject(node=NODE)
    )


@pytest.mark.parametrize("principal", ["discovery", "gpu"])
@pytest.mark.parametrize("nodes", [{}, {"gpu": "node-a", "discovery": "node-a"}], ids=["any-node", "one-node"])
async def test_device_service_can_make_no_consumer_when_the_server_knows_it(
    nats_binary: Path, tmp_path: Path, principal: str, nodes: dict[str, str]
) -> None:
    """Who reads key by key needs no consumer, and has no right to one: nothing that it stored is
    delivered to a subject of its choice.
    """
    async with (
        secured_nats(tmp_path, binary=nats_binary, permissions=render_permissions(nodes=nodes)) as nats,
        nats.attacker(principal) as attacker,
    ):
        wanted = [f"$JS.API.CONSUMER.CREATE.{name}" for name in stream_names()]
        wanted += [f"$JS.API.CONSUMER.CREATE.{name}.attack.$KV.topobus_inventories.>" for name in stream_names()]
        for subject in wanted:
            await attacker.send(subject, b"{}")

        # nats-py writes what the server says in small letters.
        denials = "\n".join(attacker.denials).lower()
        assert [subject for subject in wanted if f'"{subject}"'.lower() not in denials] == []


async def test_ledger_is_unchanged_when_a_credential_makes_the_server_ask_for_release(nats: SecuredNats) -> None:
    """Nobody but the catalogue's askers can take a running pod's devices away, whatever its
    credential lets the server deliver.
    """
    async with _topology(nats) as (topology, gateway):
        # A dry run, whose operation is in no ledger: its event would read as a fresh request.
        await gateway.ask(PLACE, PlaceRequest(op_id="dry", pod=TRAINER, is_dry_run=True), node=NODE)
        async with nats.bus("cli") as cli, asyncio.timeout(LIMIT_S):
            async for event in cli.follow(DECISION, start=Start.ALL, node=NODE):
                if event.value.op_id == "dry":
                    break
        before = await _ledger(gateway)
        async with nats.attacker("user") as attacker:
            await _release_by_decisions(attacker)
        await topology.logged("ask.dropped", where=lambda line: line["noun"] == "release")
        # Asked by one who may, after the attack: the answer comes after what
        # the attack would have written.
        after = await gateway.ask(PLACE, PlaceRequest(op_id="op-1", pod=TRAINER), node=NODE)

        assert isinstance(after.result, Placement)
        assert structs.asdict(await _ledger(gateway)) == structs.asdict(before)
        assert list(before.allocations) == [TRAINER.owner.key]
