"""Attacks across the accounts of a NATS server, on a real one: a hostile vendor's service, a
subscriber and another node change nothing that is not theirs.

The attacks are made from the catalogue (`support.account_attacks`); that they are real ones is
shown by the same attacks within one account, as users with rights alone leave it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from docpages.samples import sample
from integration.values import health
from support.account_attacks import Attack, Victim, attacks, eavesdropping, is_granted
from support.account_nats import LIMIT_S, AccountNats, StreamImage, account_nats, subject_of
from support.attacked_services import Answering, answering, say_up, until_answered, without_granted
from support.secured_nats import Attacker
from topobus.bus.bus import Bus
from topobus.bus.server_config.inboxes import is_imported_reply
from topobus.bus.server_config.nats_accounts import Account, Shape, User, accounts
from topobus.bus.server_config.nats_permissions import rights
from topobus.bus.server_config.principals import CLUSTER_WIDE, PRINCIPALS
from topobus.bus.server_config.streams import bucket_stream
from topobus.bus.server_config.up_subjects import up_mappings
from topobus.formats.messages.catalogue import HEALTH, LEDGER, RELEASE
from topobus.formats.messages.codec import encode

pytestmark = pytest.mark.integration

VICTIM = Victim()
# A vendor's service of another node, whose class the victim has, too; and a subscriber.
ATTACKERS = ("gpu-n2", "user")


@asynccontextmanager
async def attacked(nats: AccountNats, name_of: str) -> AsyncIterator[tuple[Answering, dict[str, StreamImage]]]:
    """All streams with something in each, and all services of the victim's node."""
    async with nats.bus("controller") as controller:
        await controller.provision()
    await nats.fill(name_of, VICTIM.node, VICTIM.classes[-1])
    async with answering(nats, name_of, VICTIM) as answers:
        yield answers, await nats.image()


async def _carry_out(attacker: Attacker, planned: Iterable[Attack]) -> None:
    for attack in planned:
        await attacker.client.publish(attack.subject, attack.data, headers=attack.headers, reply=attack.reply)
    await attacker.barrier()


@pytest.mark.parametrize("name", ATTACKERS)
async def test_nothing_changes_when_a_credential_attacks_across_accounts(nats_binary: Path, name: str) -> None:
    """Whatever a vendor of another node or a subscriber sends, streams, values, consumers and
    services of others are as before, and hear nothing.
    """
    described = accounts(Shape.CENTRAL, nodes=["n1", "n2"])
    async with (
        account_nats(described, binary=nats_binary) as nats,
        attacked(nats, "{}-n1") as (answers, before),
        nats.client(name) as attacker,
    ):
        granted = nats.users[name].rights["publish"]
        for subject in eavesdropping(VICTIM):
            await attacker.client.subscribe(subject)
        await attacker.barrier()
        denied = len(attacker.denials)
        await _carry_out(attacker, attacks(granted, VICTIM))
        await until_answered(nats, "{}-n1", VICTIM)

        assert without_granted(await nats.image(), granted) == without_granted(before, granted)
        assert (answers.handled, answers.dropped(), answers.unready()) == ([], 0, [])
        assert denied == len(eavesdropping(VICTIM))


async def test_nothing_changes_when_a_nodes_leaf_attacks_the_hub(nats_binary: Path) -> None:
    """A node says up what is its own and answers what it is asked.

    Of another node it can neither say, ask, answer nor overwrite anything at the hub.
    """
    described = accounts(Shape.HUB, nodes=["n1", "n2"])
    own = [hub.replace("*", "n2", 1) for _, hub in up_mappings()]
    asked: list[str] = []
    async with account_nats(described, binary=nats_binary, zones={"": "core"}) as nats, AsyncExitStack() as stack:
        controller = await stack.enter_async_context(nats.bus("controller"))
        await controller.provision()
        victim, attacker = [await stack.enter_async_context(nats.client(f"leaf-{node}")) for node in ("n1", "n2")]
        await say_up(victim, VICTIM)

        async def answer(message: Msg) -> None:
            if not is_imported_reply(message.reply):
                return
            asked.append(message.subject)
            await victim.client.publish(message.reply, encode(sample(RELEASE.reply)))

        await victim.client.subscribe(RELEASE.subject(node="n1"), cb=answer)
        before = await nats.image()
        for subject in eavesdropping(VICTIM):
            if not is_granted(nats.users["leaf-n2"].rights["subscribe"], subject):
                await attacker.client.subscribe(subject)
        for attack in attacks(nats.users["leaf-n2"].rights["publish"], VICTIM):
            await attacker.client.publish(attack.subject, attack.data, headers=attack.headers, reply=attack.reply)
        # Its own word is heard, and the server has seen all that was sent before.
        await say_up(attacker, Victim(node="n2"))

        assert without_granted(await nats.image(), own) == without_granted(before, own)
        assert asked == []
        # An ask of the hub, by the way that is there.
        assert await controller.ask(RELEASE, sample(RELEASE.request), node="n1", timeout_s=LIMIT_S) == sample(
            RELEASE.reply
        )
        assert asked == [RELEASE.subject(node="n1")]


def _one_account(nodes: Sequence[str]) -> tuple[Account, ...]:
    """Describe a server whose users have rights and no accounts, as deploy/nats/permissions.conf
    does.
    """
    users = tuple(
        User(
            name=principal if principal in CLUSTER_WIDE else f"{principal}-{node}",
            principal=principal,
            node=node,
            rights=rights(principal, node=node),
        )
        for principal in PRINCIPALS
        for node in (nodes if principal not in CLUSTER_WIDE else ("",))
    )
    return (
        Account(name="ALL", users=users, exports=(), imports=(), has_jetstream=True),
        Account(name="SYS", users=(), exports=(), imports=(), is_system=True),
    )


@pytest.mark.parametrize("name", ATTACKERS)
async def test_ledger_is_overwritten_when_all_share_an_account(nats_binary: Path, name: str) -> None:
    """With rights alone the same attacks succeed by what the server itself says and delivers, and
    only by that: accounts are what stops them.
    """
    async with (
        account_nats(_one_account(["n1", "n2"]), binary=nats_binary, zones={"": ""}) as nats,
        attacked(nats, "{}-n1") as (_, before),
        nats.client(name) as attacker,
    ):
        granted = nats.users[name].rights["publish"]
        planned = list(attacks(granted, VICTIM))
        await _carry_out(attacker, [attack for attack in planned if attack.kind not in ("reply", "consumer")])
        await until_answered(nats, "{}-n1", VICTIM)
        assert without_granted(await nats.image(), granted) == without_granted(before, granted)
        untouched = _ledgers(before)
        await _carry_out(attacker, [attack for attack in planned if attack.kind == "reply"])
        await _until(nats, lambda images: _ledgers(images)[-1:] != untouched[-1:])
        # What a consumer of the ledgers delivers to a ledger it would deliver again, for
        # ever. A vendor has no right to any.
        consumers = [attack for attack in planned if attack.kind == "consumer" and is_granted(granted, attack.subject)]
        await _carry_out(attacker, [attack for attack in consumers if "ledgers" not in attack.subject])
        await _until(nats, lambda images: not consumers or any(image.consumers for image in images.values()))


def _ledgers(images: dict[str, StreamImage]) -> list[tuple[int, str, bytes, bytes]]:
    """Give what the stream of ledgers holds under the victim's key."""
    return [
        message
        for message in images[bucket_stream(LEDGER)].messages
        if message[1] == subject_of(LEDGER, VICTIM.node, "")
    ]


async def _until(nats: AccountNats, has_happened: Callable[[dict[str, StreamImage]], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not has_happened(await nats.image()):
            pass


async def test_publish_stores_when_somebody_else_used_the_events_id(bus: Bus) -> None:
    """Who may write to the stream can guess another's id: that takes no event away, and a
    repetition is stored once all the same.
    """
    await bus.publish(HEALTH, health(1, "gpu-1"), event_id="guessed", node="n1", device_class="gpu", device="gpu-1")

    stored = await bus.publish(HEALTH, health(2), event_id="guessed", node="n1", device_class="gpu", device="gpu-0")

    (newest,) = await bus.last(HEALTH, limit=1, node="n1", device_class="gpu", device="gpu-0")
    assert (newest.sequence, newest.value.generation) == (stored, 2)
