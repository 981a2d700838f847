"""Notices on the bus: said once to whoever may listen, over the accounts of a real server, and
never waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from support.account_nats import LIMIT_S, AccountNats, account_nats
from support.looks import until
from topobus.bus.bus import Bus
from topobus.bus.server_config.nats_accounts import Shape, accounts
from topobus.bus.streams import events
from topobus.formats.messages.catalogue import HINTS
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import GivenHints, HintsEvent

pytestmark = pytest.mark.integration


@pytest.fixture
async def nats(nats_binary: Path) -> AsyncIterator[AccountNats]:
    """A server with the accounts as shipped."""
    async with account_nats(accounts(Shape.CENTRAL), binary=nats_binary) as server:
        yield server


def _hints(op_id: str, *, node: str = "n1", device_class: str = "gpu") -> HintsEvent:
    lists = (GivenHints(resource=device_class, hints=None),)
    return HintsEvent(
        node=node, device_class=device_class, op_id=op_id, by="test", lists=lists, time="2026-11-28T00:00:00Z"
    )


async def _say(bus: Bus, *given: HintsEvent) -> None:
    await bus.notify(HINTS, {hints.op_id: hints for hints in given})


async def test_notice_is_heard_once_by_each_listener_when_writers_are_in_other_accounts(nats: AccountNats) -> None:
    """What a device service says in its own account and topology in the core's reaches commands and
    subscribers, each once.
    """
    async with (
        nats.bus("gpu") as gpu,
        nats.bus("topology") as topology,
        nats.bus("cli") as cli,
        nats.client("user") as user,
    ):
        heard: dict[str, list[str]] = {"cli": [], "user": []}

        async def hear(message: object) -> None:
            heard["user"].append(message.headers["ce-id"])  # type: ignore[attr-defined]

        await user.client.subscribe("topobus.v1.hints.>", cb=hear)
        await user.barrier()
        async with aclosing(cli.listen(HINTS)) as notices:
            async with asyncio.timeout(LIMIT_S):
                said = asyncio.ensure_future(anext(notices))
                place = 0
                while not said.done():
                    # What is said before the server knows of a listener is heard by nobody.
                    await _say(gpu, _hints(f"early-{place}"))
                    await asyncio.wait([said], timeout=0.05)
                    place += 1
                for bus, op_id in ((gpu, "by-gpu"), (topology, "by-topology")):
                    await _say(bus, _hints(op_id))
                while not {"by-gpu", "by-topology"} <= {*heard["cli"]}:
                    heard["cli"].append((await anext(notices)).op_id)
                while not {"by-gpu", "by-topology"} <= {*heard["user"]}:
                    await user.barrier()

        assert user.denials == []
    for who in ("cli", "user"):
        assert len(heard[who]) == len(set(heard[who])), who


async def test_notices_of_a_decision_are_each_at_the_subject_of_their_class(nats: AccountNats) -> None:
    """They are sent together, and who listens for one class hears that of this class alone."""
    async with (
        nats.bus("topology") as topology,
        nats.bus("cli") as cli,
        aclosing(cli.listen(HINTS, device_class="nic")) as notices,
    ):
        async with asyncio.timeout(LIMIT_S):
            said = asyncio.ensure_future(anext(notices))
            while not said.done():
                await _say(topology, *(_hints(f"op-{name}", device_class=name) for name in ("cpu", "gpu", "nic")))
                await asyncio.wait([said], timeout=0.05)

        assert (said.result().device_class, said.result().op_id) == ("nic", "op-nic")


async def test_notice_is_dropped_when_it_says_another_node_than_its_subject(nats: AccountNats) -> None:
    """Readers keep what they hear by the names inside: a notice at another node's subject is not
    given to them.
    """
    async with nats.client("topology") as topology, nats.bus("cli") as cli, aclosing(cli.listen(HINTS)) as notices:
        async with asyncio.timeout(LIMIT_S):
            said = asyncio.ensure_future(anext(notices))
            while not said.done():
                for hints in (_hints("lie", node="n2"), _hints("truth")):
                    await topology.client.publish(HINTS.subject(node="n1", device_class="gpu"), encode(hints))
                await asyncio.wait([said], timeout=0.05)

        assert said.result().op_id == "truth"


async def test_listener_hears_how_many_it_missed_when_more_came_than_it_read(
    nats: AccountNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a slow reader has no room for is dropped, counted, and told in its place: before the
    next one that it gets.
    """
    monkeypatch.setattr(events, "_UNREAD_NOTICES", 2)
    missed: list[int] = []
    async with (
        nats.bus("topology") as topology,
        nats.bus("cli") as cli,
        aclosing(cli.listen(HINTS, on_missed=missed.append)) as notices,
    ):
        async with asyncio.timeout(LIMIT_S):
            first = asyncio.ensure_future(anext(notices))
            said = 0
            while not first.done():
                await _say(topology, _hints(str(said)))
                said += 1
                await asyncio.wait([first], timeout=0.05)
            for place in range(20):
                await _say(topology, _hints(f"flood-{place}"))
            # Room for two, and nobody reads until all are there; then
            # there is room for the last one.
            for bus in (topology, cli):
                await bus._connection.barrier()
            got = [first.result(), *[await anext(notices) for _ in range(2)]]
            # What was said before the server knew of the listener is missed by nobody.
            said -= int(got[0].op_id)
            await _say(topology, _hints("last"))
            last = await anext(notices)

        assert last.op_id == "last"
        assert missed == [said + 20 - len(got)]


async def test_notice_raises_nothing_when_the_server_is_away(nats: AccountNats) -> None:
    """Nobody waits for a notice, and nobody fails by it."""
    async with nats.bus("topology") as topology:
        await nats.server.stop()
        await until(lambda: not topology.is_connected)

        await _say(topology, _hints("lost"))
