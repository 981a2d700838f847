"""NATS' services protocol on servers with users: the CLI's login sees the services of all accounts, and nobody gets a right by it that others have.

In each form that is shipped: rights in one account, accounts, and the servers of nodes behind a hub.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from support.account_nats import LIMIT_S, AccountNats, account_nats
from support.nats_tools import Tool, introduced
from support.secured_leaves import secured_leaves
from support.secured_nats import secured_nats
from topobus.contracts.catalogue import LEDGER
from topobus.contracts.nats_accounts import Account, Shape, accounts
from topobus.contracts.nats_permissions import PRINCIPALS, render_permissions
from topobus.contracts.service_protocol import is_service, service_name
from topobus.contracts.streams import STREAM_LISTS, stream_names
from topobus.runtime.readiness import Readiness
from topobus.testing.nats.shaped_servers import version_of

pytestmark = pytest.mark.integration

_NODE_SERVICES = ("cpu", "discovery", "fpga", "gateway", "gpu", "nic", "topology")
_FORMS = [
    pytest.param(Shape.CENTRAL, (), id="central"),
    pytest.param(Shape.CENTRAL, ("n1", "n2"), id="central-nodes"),
    pytest.param(Shape.LEAF, ("n1",), id="leaf"),
]


def _services(described: Sequence[Account]) -> list[tuple[str, str, str]]:
    """List all services as user, principal and node."""
    return sorted(
        (user.name, user.principal, user.node)
        for account in described
        for user in account.users
        if is_service(user.principal) and user.principal != "leaf"
    )


@asynccontextmanager
async def _all_introduced(nats: AccountNats, described: Sequence[Account]) -> AsyncIterator[list[Readiness]]:
    """Connect each service of each account, and let it say who it is."""
    async with AsyncExitStack() as stack:
        readinesses = []
        for name, _, node in _services(described):
            readiness = Readiness()
            bus = await stack.enter_async_context(nats.bus(name, readiness=readiness))
            await introduced(bus, node or "n1")
            readinesses.append(readiness)
        yield readinesses


@pytest.mark.parametrize(("shape", "nodes"), _FORMS)
async def test_cli_sees_the_services_of_all_accounts_when_it_asks_once(nats_binary: Path, shape: Shape, nodes: tuple[str, ...]) -> None:
    """One question is heard in each account, each service answers once, by name and by id, too, and all of them may."""
    described = accounts(shape, nodes=nodes)
    wanted = sorted((service_name(principal), node or "n1") for _, principal, node in _services(described))
    async with (
        account_nats(described, binary=nats_binary) as nats,
        _all_introduced(nats, described) as readinesses,
        nats.client("cli") as cli,
    ):
        tool = Tool(cli.client)
        pings = await tool.ask("PING", wanted=len(wanted))
        gpus = [ping for ping in pings if ping["name"] == "topobus-gpu"]
        by_name = await tool.ask("INFO", "topobus-gpu", wanted=len(gpus))
        (by_id,) = await tool.ask("STATS", "topobus-gpu", gpus[0]["id"], wanted=1)
        denials = list(cli.denials)

    assert sorted((ping["name"], ping["metadata"].get("node", "n1")) for ping in pings) == wanted
    assert [info["id"] for info in by_name] == [ping["id"] for ping in gpus]
    assert by_id["id"] == gpus[0]["id"]
    assert denials == []
    assert [report for report in (readiness.report() for readiness in readinesses) if "bus-permissions" in report] == []


async def test_vendor_answers_once_and_only_when_it_was_asked(nats_binary: Path) -> None:
    """A device service says nothing to a tool that did not ask, and nothing twice; it asks nobody, nor do subscribers; no other vendor hears its answers."""
    described = accounts(Shape.CENTRAL, nodes=["n1", "n2"])
    async with account_nats(described, binary=nats_binary) as nats, AsyncExitStack() as stack:
        names = ("cli", "gpu-n1", "nic-n1", "user", "topology-n1")
        cli, gpu, nic, user, topology = [await stack.enter_async_context(nats.client(name)) for name in names]
        tool = Tool(cli.client)
        eavesdropped: list[str] = []

        async def overhear(message: Msg) -> None:
            eavesdropped.append(message.subject)

        async def answer_twice(question: Msg) -> None:
            for text in ('"first"', '"second"'):
                await gpu.client.publish(question.reply, text.encode())

        for other in (nic, user):
            # Of these servers let a service have the second, for it may hear `$SRV.*`; no question to others comes into its account.
            for subject in ("_INBOX.TOOLS.>", "$SRV.>", "$SRV.*.topobus-gpu", "$SRV.*.*.*"):
                await other.client.subscribe(subject, cb=overhear)
            await other.barrier()
        await gpu.client.subscribe("$SRV.*.topobus-gpu", cb=answer_twice)
        await gpu.barrier()
        async with tool.listening() as (inbox, answers):
            await gpu.send(inbox, b'"uninvited"')
            for other in (gpu, nic, user):
                await other.send("$SRV.PING", reply=inbox)
            await cli.client.publish("$SRV.PING.topobus-gpu", b"", reply=inbox)
            said = [json.loads((await asyncio.wait_for(answers.get(), LIMIT_S)).data)]
            # The second was sent with the first; what comes now comes later.
            await gpu.barrier()
            await topology.send(inbox, b'"last"')
            said.append(json.loads((await asyncio.wait_for(answers.get(), LIMIT_S)).data))

        assert said == ["first", "last"]
        assert eavesdropped == []
        assert [len([denial for denial in other.denials if "publish" in denial]) for other in (gpu, nic, user)] == [3, 1, 1]


async def test_ledger_stays_as_it_is_when_a_question_names_it_as_the_place_for_answers(nats_binary: Path) -> None:
    """The CLI's login may write no ledger, and no service writes one for it: not that of its own account, nor that of a vendor's."""
    described = accounts(Shape.CENTRAL)
    async with (
        account_nats(described, binary=nats_binary) as nats,
        _all_introduced(nats, described),
        nats.bus("controller") as controller,
        nats.client("cli") as cli,
    ):
        await controller.provision()
        for reply in ("$KV.topobus_ledgers.n1", "$KV.topobus_inventories_gpu.n1.gpu", "topobus.v1.health.n1.gpu.gpu-0"):
            for verb in ("PING", "INFO", "STATS"):
                await cli.client.publish(f"$SRV.{verb}", b"", reply=reply)
        # All have looked at those when they have answered this.
        await Tool(cli.client).ask("PING", wanted=len(_services(described)))
        stored = {name: image.messages for name, image in (await nats.image()).items()}

    assert stored == dict.fromkeys(stream_names(), ())


async def test_cli_sees_all_services_when_users_share_one_account(nats_binary: Path, tmp_path: Path) -> None:
    """With rights alone each service answers by the right that it has; who is no CLI may not ask."""
    services = sorted(principal for principal in PRINCIPALS if is_service(principal))
    async with secured_nats(tmp_path, binary=nats_binary) as nats, AsyncExitStack() as stack:
        for principal in services:
            await introduced(await stack.enter_async_context(nats.bus(principal)), "n1")
        async with nats.attacker("cli") as cli, nats.attacker("gpu") as gpu, nats.attacker("user") as user:
            pings = await Tool(cli.client).ask("PING", wanted=len(services))
            for other in (gpu, user):
                await other.send("$SRV.PING", reply="_INBOX.TOOLS.x")

            assert [len(attacker.denials) for attacker in (cli, gpu, user)] == [0, 1, 1]
    assert [ping["name"] for ping in pings] == [service_name(principal) for principal in services]


async def test_service_stays_ready_when_the_server_has_the_users_of_an_older_release(nats_binary: Path, tmp_path: Path) -> None:
    """Services are updated before the file of users: until then tools do not see them, and all else is as before."""
    lines = render_permissions().splitlines()
    older = "\n".join(line for line in lines if "$SRV" not in line and "_INBOX.TOOLS" not in line)
    readiness = Readiness()
    async with (
        secured_nats(tmp_path, binary=nats_binary, permissions=older) as nats,
        nats.bus("controller") as controller,
        nats.bus("topology", readiness=readiness) as topology,
    ):
        await controller.provision()
        await topology.provision()
        await introduced(topology, "n1")
        # What the server said to the subscriptions came before this.
        assert await topology.get(LEDGER, node="n1") is None

    assert "bus-permissions" not in readiness.report()


async def test_lists_of_streams_are_given_to_the_cli_when_there_are_accounts(nats_binary: Path) -> None:
    """`nats stream ls` and `nats kv ls` work with the CLI's login, and with no other."""
    async with account_nats(accounts(Shape.CENTRAL), binary=nats_binary) as nats:
        async with nats.bus("controller") as controller:
            await controller.provision()
        async with nats.client("cli") as cli, nats.client("gpu") as gpu, nats.client("user") as user:
            listing, naming = STREAM_LISTS
            tool = Tool(cli.client)
            described = {stream["config"]["name"]: stream["config"]["description"] for stream in await tool.lists(listing, "streams")}
            names = await tool.lists(naming, "streams")
            for other in (gpu, user):
                await other.send(listing, b"{}")

            assert [len(attacker.denials) for attacker in (cli, gpu, user)] == [0, 1, 1]
    assert names == sorted(stream_names())
    assert sorted(described) == names
    assert all(described.values())


async def test_each_server_shows_its_own_services_when_nodes_have_servers_of_their_own(nats_binary: Path) -> None:
    """A question does not cross a link: at the hub a tool sees the hub's services, at a node that node's."""
    if version_of(nats_binary) < (2, 10):
        pytest.skip("a node's own server is 2.10 or later")
    async with secured_leaves(nats_binary, nodes=["n1", "n2"]) as shape, AsyncExitStack() as stack:
        for name in ("controller", "console"):
            await introduced(await stack.enter_async_context(shape.hub.bus(name)))
        for node, leaf in shape.leaves.items():
            for name in (*_NODE_SERVICES, "relay"):
                await introduced(await stack.enter_async_context(leaf.bus(name)), node)
        seen = {}
        for place, server in {"hub": shape.hub, **shape.leaves}.items():
            wanted = 2 if place == "hub" else len(_NODE_SERVICES) + 1
            cli = await stack.enter_async_context(server.client("cli"))
            async with Tool(cli.client).listening() as (inbox, answers):
                await cli.client.publish("$SRV.PING", b"", reply=inbox)
                async with asyncio.timeout(LIMIT_S):
                    seen[place] = [json.loads((await answers.get()).data) for _ in range(wanted)]
                # A second round is behind whatever the first one might still bring.
                await Tool(cli.client).ask("PING", wanted=wanted)
                assert answers.empty()

    nodes = {place: {answer["metadata"].get("node", "hub") for answer in said} for place, said in seen.items()}
    assert nodes == {"hub": {"hub"}, "n1": {"n1"}, "n2": {"n2"}}
    assert sorted(answer["name"] for answer in seen["n1"]) == sorted(service_name(name) for name in (*_NODE_SERVICES, "relay"))
