"""Attacks over real links of leaves: another node's server, one that somebody made, a vendor's
service and a subscriber change nothing that is not theirs, at no server.

The attacks are those of `support.account_attacks`, made from the catalogue, against the
configurations that deploy/nats ships for the leaf shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import nats
import pytest
from nats.aio.msg import Msg

from lab.servers.shaped_servers import version_of
from support.account_attacks import Attack, Victim, attacks, eavesdropping
from support.account_nats import LIMIT_S, AccountNats, StreamImage
from support.attacked_services import Answering, answering, say_up, until_answered, without_granted
from support.looks import next_look, until
from support.secured_leaves import HubAndLeaves, foreign_leaf, secured_leaves
from support.secured_nats import Attacker
from topobus.bus.server_config.inboxes import inbox_branch
from topobus.bus.server_config.up_subjects import up_mappings
from topobus.formats.messages.catalogue import MACHINE, PODS
from topobus.values.errors import PeerUnavailable

pytestmark = pytest.mark.integration

_VICTIM = Victim(node="n1")
# Of the attacking node, but not of the attacking class: a service may write what its class stores.
_NEIGHBOUR = Victim(node="n2", classes=("gpu", "fpga"))
_OWN_AT_HUB = [hub.replace("*", "n2", 1) for _, hub in up_mappings()]


class _Attacked:
    """A hub and two nodes with something in each stream, and all their services."""

    def __init__(self, shape: HubAndLeaves, answers: Sequence[Answering]) -> None:
        self.shape = shape
        self._answers = answers
        self._servers = {"hub": shape.hub, **shape.leaves}

    async def images(self) -> dict[str, dict[str, StreamImage]]:
        """Read all streams of all servers."""
        return {name: await server.image() for name, server in self._servers.items()}

    async def until_answered(self) -> None:
        """Exchange a sign of life with all services, from their own servers and from the hub: what
        came before has been looked at.
        """
        for victim in (_VICTIM, _NEIGHBOUR):
            await until_answered(self.shape.hub, "{}", victim)
            await until_answered(self.shape.leaves[victim.node], "{}", victim)

    def noticed(self) -> tuple[list[str], float, list[str]]:
        """Say what services handled, dropped, and miss."""
        return (
            [name for answers in self._answers for name in answers.handled],
            sum(answers.dropped() for answers in self._answers),
            [why for answers in self._answers for why in answers.unready()],
        )


async def _until_linked(leaf: AccountNats, node: str) -> None:
    async with leaf.bus("relay") as relay:
        uplink = relay.uplink()
        while True:
            with suppress(PeerUnavailable):
                await uplink.sequence_at_hub(MACHINE, node=node)
                return
            await next_look()


@asynccontextmanager
async def _attacked(binary: Path) -> AsyncIterator[_Attacked]:
    if version_of(binary) < (2, 10):
        pytest.skip("a node's own server is 2.10 or later")
    async with asyncio.timeout(3 * LIMIT_S), AsyncExitStack() as stack:
        shape = await stack.enter_async_context(secured_leaves(binary, nodes=["n1", "n2"]))
        async with shape.hub.bus("controller") as controller:
            await controller.provision()
        answers = []
        for victim in (_VICTIM, _NEIGHBOUR):
            leaf = shape.leaves[victim.node]
            async with leaf.bus("topology") as topology:
                await topology.provision()
            for device_class in victim.classes:
                await leaf.fill("{}", victim.node, device_class)
            await _until_linked(leaf, victim.node)
            async with leaf.client("relay") as relay:
                await say_up(relay, victim)
            answers += [
                await stack.enter_async_context(answering(server, "{}", victim)) for server in (leaf, shape.hub)
            ]
        attacked = _Attacked(shape, answers)
        await attacked.until_answered()
        yield attacked


async def _send(attacker: Attacker, planned: Sequence[Attack]) -> None:
    for attack in planned:
        await attacker.client.publish(attack.subject, attack.data, headers=attack.headers, reply=attack.reply)
    await attacker.barrier()


@pytest.mark.parametrize("where", ["n2", "hub"])
async def test_nothing_changes_when_a_subscriber_attacks(nats_binary: Path, where: str) -> None:
    """At its node's server and at the hub, whatever it sends: no stream of any server changes, and
    no service hears anything.
    """
    async with _attacked(nats_binary) as attacked:
        at = attacked.shape.hub if where == "hub" else attacked.shape.leaves[where]
        before = await attacked.images()
        async with at.client("user") as attacker:
            granted = at.users["user"].rights["publish"]
            for victim in (_VICTIM, _NEIGHBOUR):
                await _send(attacker, list(attacks(granted, victim)))
            await attacked.until_answered()

        assert await attacked.images() == before
        assert attacked.noticed() == ([], 0, [])


async def test_nothing_changes_when_a_vendors_service_attacks_at_its_node(nats_binary: Path) -> None:
    """What its class of its node stores at its node's server is its own.

    Nothing else there, at the hub, or at another node.
    """
    async with _attacked(nats_binary) as attacked:
        at = attacked.shape.leaves["n2"]
        granted = at.users["nic"].rights["publish"]
        before = await attacked.images()
        async with at.client("nic") as attacker:
            for victim in (_VICTIM, _NEIGHBOUR):
                await _send(attacker, list(attacks(granted, victim)))
            await attacked.until_answered()

        after = await attacked.images()
        assert without_granted(after["n2"], granted) == without_granted(before["n2"], granted)
        assert {name: after[name] for name in ("hub", "n1")} == {name: before[name] for name in ("hub", "n1")}
        assert attacked.noticed() == ([], 0, [])


async def test_nothing_changes_when_a_server_of_somebody_else_comes_as_a_nodes(nats_binary: Path) -> None:
    """Who took over a node has its user and a server of its own, which denies nothing: it says what
    its node may say, hears what its node may hear, and that is all.
    """
    async with AsyncExitStack() as stack:
        attacked = await stack.enter_async_context(_attacked(nats_binary))
        shape = attacked.shape
        granted = shape.hub.users["leaf-n2"].rights["publish"]
        # Beside the node's own server, whose services answer still.
        before = await attacked.images()
        server = await stack.enter_async_context(foreign_leaf(nats_binary, shape.link_url("leaf-n2")))
        client = await nats.connect(
            server.url, inbox_prefix=inbox_branch("relay", "nats").encode(), allow_reconnect=False
        )
        stack.push_async_callback(client.close)
        attacker = Attacker("relay", client)
        heard: list[tuple[str, str]] = []

        async def hear(message: Msg) -> None:
            heard.append((message.subject, message.reply))

        for subject in eavesdropping(_VICTIM):
            await client.subscribe(subject, cb=hear)
        await attacker.barrier()
        await until(lambda: len(shape.linked()) >= 3)
        await _send(attacker, list(attacks(granted, _VICTIM)))
        # What it says of its own goes through: the hub has seen all that was sent before.
        await say_up(attacker, _NEIGHBOUR)
        await attacked.until_answered()

        after = await attacked.images()
        assert without_granted(after["hub"], _OWN_AT_HUB) == without_granted(before["hub"], _OWN_AT_HUB)
        assert {name: after[name] for name in ("n1", "n2")} == {name: before[name] for name in ("n1", "n2")}
        assert attacked.noticed() == ([], 0, [])

        # What the other node says and is asked meanwhile it does not hear; its own node
        # is asked last, by the same link.
        await attacker.barrier()
        heard.clear()
        async with shape.leaves["n1"].client("relay") as relay:
            await say_up(relay, _VICTIM)
        await until_answered(shape.hub, "{}", _VICTIM)
        await until_answered(shape.hub, "{}", _NEIGHBOUR)
        await until(lambda: any(subject == PODS.subject(node="n2") for subject, _ in heard))
        # Its own server goes on trying to mirror what it was told to.
        crossed = [subject for subject, _ in heard if subject.startswith(("topobus.", "_R_.", "_INBOX.", "$KV."))]
        assert [subject for subject in crossed if subject.split(".")[3:4] != ["n2"]] == []
