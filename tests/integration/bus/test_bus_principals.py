"""What each login of a central server with accounts can do at worst, tried on a real server, is
what the page for operators says.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from docpages.samples import sample
from support.account_attacks import Victim, attacks, stored_subjects
from support.account_nats import AccountNats, account_nats
from support.attacked_services import Answering, answering, until_answered
from support.secured_nats import Attacker
from topobus.bus.server_config.inboxes import answerer_of, connection_name, inbox_branch
from topobus.bus.server_config.nats_accounts import Shape, accounts
from topobus.bus.server_config.nats_permissions import PRINCIPALS
from topobus.bus.server_config.streams import bucket_stream, stream_names
from topobus.formats.messages.catalogue import ASKS, EVENTS, STATES
from topobus.formats.messages.codec import encode
from topobus.formats.messages.device_classes import DEVICE_SERVICES

pytestmark = pytest.mark.integration

VICTIM = Victim()
_PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "secure-nats.md"
_HEAD = "| login | can change of what is stored | consumers | streams | can ask |"
_ALL, _NONE = "everything", "nothing"


def _documented() -> dict[str, tuple[str, str, str, str]]:
    """Read the page's table: by login what it can change, whether it can make consumers and
    streams, and what it can ask.
    """
    _, _, after = _PAGE.read_text(encoding="utf-8").partition(f"{_HEAD}\n")
    rows = {}
    for line in after.splitlines()[1:]:
        if not line.startswith("|"):
            break
        logins, changes, consumers, streams, asks = (
            cell.strip().replace("`", "") for cell in line.strip("|").split("|")
        )
        rows |= dict.fromkeys(logins.split(", "), (changes, consumers, streams, asks))
    return rows


_DOCUMENTED = _documented()


@pytest_asyncio.fixture
async def nats(nats_binary: Path) -> AsyncIterator[AccountNats]:
    """A central server with accounts and its streams."""
    async with account_nats(accounts(Shape.CENTRAL), binary=nats_binary) as server:
        async with server.bus("controller") as controller:
            await controller.provision()
        yield server


@pytest.mark.parametrize("principal", PRINCIPALS)
async def test_principal_can_do_at_worst_what_the_page_says(nats: AccountNats, principal: str) -> None:
    """By its own subjects, by reply subjects, consumers, streams and asks: no more, and no less,
    than its row of the page.
    """
    async with answering(nats, "{}", VICTIM) as answers, nats.client(principal) as attacker:
        consumers, streams = await _take_streams(nats, attacker)
        changes = await _overwrite(nats, attacker)
        asks = await _ask(nats, attacker, answers)

    assert (changes, consumers, streams, asks) == _DOCUMENTED[principal]


async def _overwrite(nats: AccountNats, attacker: Attacker) -> str:
    """Write at all subjects that are granted, and have the server's own words written to all keys
    and events.

    Names the nouns of which something changed.
    """
    granted = nats.users[attacker.principal].rights["publish"]
    own = [".".join("own" if token in ("*", ">") else token for token in pattern.split(".")) for pattern in granted]
    stored = stored_subjects(VICTIM)
    before = await _last_sequences(nats)
    for subject in own:
        if subject.startswith(("$KV.", "topobus.v1.")):
            await attacker.client.publish(subject, b"{}")
    # One of each verb and noun is answered as all of its kind are.
    for subject in {subject.rpartition(".")[0].partition(".KV_")[0]: subject for subject in own}.values():
        for target in stored:
            await attacker.client.publish(subject, b"{}", reply=target)
    await attacker.barrier()
    # What crosses accounts goes through the server's own clients: the services' answers
    # come by the same way, after it.
    await until_answered(nats, "{}", VICTIM)
    after = await _last_sequences(nats)
    nouns = {
        noun.name for noun in (*STATES, *EVENTS) if any(after[name] != before[name] for name in _streams_of(noun.name))
    }
    return _ALL if nouns == {noun.name for noun in (*STATES, *EVENTS)} else ", ".join(sorted(nouns)) or _NONE


async def _take_streams(nats: AccountNats, attacker: Attacker) -> tuple[str, str]:
    """Say whether it can make consumers that deliver to others, and streams."""
    planned = list(attacks((), VICTIM))
    for attack in planned:
        # What a consumer of ledgers delivers to a ledger it would deliver again, for ever.
        if attack.kind == "consumer" and "KV_topobus_ledgers" not in attack.subject:
            await attacker.client.publish(attack.subject, attack.data, reply=attacker.client.new_inbox())
    await attacker.client.publish("$JS.API.STREAM.CREATE.TOPOBUS_HEALTH", b"{}")
    streams = [subject for subject in nats.users[attacker.principal].rights["publish"] if ".STREAM.CREATE." in subject]
    await attacker.barrier()
    await until_answered(nats, "{}", VICTIM)
    async with nats.client("cli") as reader:
        infos = [json.loads((await reader.ask(f"$JS.API.STREAM.INFO.{stream}")).data) for stream in stream_names()]
    denied = any("$js.api.stream.create.topobus_health" in denial for denial in attacker.denials)
    assert denied == (not streams)
    return ("yes" if any(info["state"]["consumer_count"] for info in infos) else "no", "no" if denied else "yes")


async def _ask(nats: AccountNats, attacker: Attacker, answers: Answering) -> str:
    """Ask every ask of the victim's node, each with an inbox of its own, and name those that were
    done.
    """
    parts = {"node": VICTIM.node, "device_class": VICTIM.classes[0]}
    for ask in ASKS:
        subject = ask.subject(**{part: parts[part] for part in ask.parts})
        inbox = inbox_branch(connection_name(attacker.principal), answerer_of(ask, VICTIM.classes[0]))
        await attacker.client.publish(subject, encode(sample(ask.request)), reply=f"{inbox}.a.b")
    await attacker.barrier()
    await until_answered(nats, "{}", VICTIM)
    return ", ".join(sorted(set(answers.handled))) or _NONE


def _streams_of(noun: str) -> Sequence[str]:
    return next(
        [each.stream] if not hasattr(each, "buckets") else [bucket_stream(bucket) for bucket in each.buckets()]
        for each in (*STATES, *EVENTS)
        if each.name == noun
    )


async def _last_sequences(nats: AccountNats) -> dict[str, int]:
    async with nats.client("cli") as reader:
        return {
            stream: json.loads((await reader.ask(f"$JS.API.STREAM.INFO.{stream}")).data)["state"]["last_seq"]
            for stream in stream_names()
        }


def test_page_has_a_row_for_every_login() -> None:
    """No login is missing, and none of the page is unknown."""
    assert sorted(_DOCUMENTED) == sorted(PRINCIPALS)
    assert set(DEVICE_SERVICES) <= set(_DOCUMENTED)
