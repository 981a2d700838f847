"""What a hostile credential of one account tries against the others, made from the catalogue: a new
noun, stream or ask is attacked without a word here.

Each attack is one message. The attacker is somebody of node `n2`; what it attacks is `n1`'s, of
another class and of its own, and the cluster's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from docpages.samples import sample
from support.account_nats import parts_of, subject_of
from topobus.bus.server_config.inboxes import answerer_of, askers_of, inbox_branch
from topobus.bus.server_config.streams import stream_names, wanted_streams
from topobus.bus.server_config.up_subjects import up_nouns, up_subject
from topobus.bus.streams.jetstream import API
from topobus.formats.messages.catalogue import ASKS, EVENTS, LEDGER, STATES
from topobus.formats.messages.codec import encode
from topobus.formats.messages.nouns import CLUSTER, PREFIX, Event, State

__all__ = ["Attack", "Victim", "attacks", "eavesdropping", "is_granted"]


class Attack(msgspec.Struct, frozen=True):
    """One message, by what it tries."""

    kind: str
    subject: str
    data: bytes = b""
    headers: dict[str, str] | None = None
    reply: str = ""


class Victim(msgspec.Struct, frozen=True):
    """Whose keys, subjects and asks are attacked."""

    node: str = "n1"
    classes: tuple[str, ...] = ("gpu", "nic")


_PREFIXES = (API, "$JS.topobus.API", "$JS.hub.API", "$JS.node-n1.API")
_STREAM_VERBS = ("UPDATE", "DELETE", "PURGE", "MSG.DELETE", "SNAPSHOT", "RESTORE", "LEADER.STEPDOWN", "PEER.REMOVE")


def is_granted(granted: Sequence[str], subject: str) -> bool:
    """Say whether one of these patterns matches a subject."""
    return any(_matches(pattern.split("."), subject.split(".")) for pattern in granted)


def _matches(pattern: list[str], tokens: list[str]) -> bool:
    for place, wanted in enumerate(pattern):
        if wanted == ">":
            return len(tokens) > place
        if place >= len(tokens) or wanted not in ("*", tokens[place]):
            return False
    return len(pattern) == len(tokens)


def attacks(granted: Sequence[str], victim: Victim) -> Iterator[Attack]:
    """Make all attacks of somebody who may publish at these patterns."""
    targets = [subject for subject in _targets(victim) if not is_granted(granted, subject)]
    yield from _direct(victim, granted)
    yield from _answers(victim, granted)
    yield from _requests_to_jetstream(victim)
    for subject in _own_subjects(granted):
        # The server's own answer to a message goes to the reply subject: an acknowledgement becomes
        # a ledger.
        for target in targets:
            yield Attack("reply", subject, b"{}", reply=target)
        for target in stored_subjects(victim):
            yield Attack("trace", subject, b"{}", {"Nats-Trace-Dest": target})
        for what in ("all", "sub"):
            yield Attack("rollup", subject, b"{}", {"Nats-Rollup": what})
        yield Attack(
            "schedule",
            subject,
            b"{}",
            {"Nats-Schedule": "@at 2020-01-01T00:00:00Z", "Nats-Schedule-Target": targets[0]},
        )


def stored_subjects(victim: Victim) -> list[str]:
    """List the subjects under which streams keep what is the victim's."""
    return sorted(
        {subject_of(noun, victim.node, device_class) for noun in (*STATES, *EVENTS) for device_class in victim.classes}
    )


def eavesdropping(victim: Victim) -> tuple[str, ...]:
    """List subscriptions that only the owner, or no client at all, may have."""
    return (
        ">",
        "_INBOX.>",
        "_INBOX.gateway.>",
        "_R_.>",
        "$KV.>",
        "$SYS.>",
        f"{API}.>",
        f"{PREFIX}.>",
        f"{PREFIX}.up.>",
        *(f"{PREFIX}.{ask.name}.{victim.node}.>" for ask in ASKS if len(ask.parts) > 1),
        *(ask.subject(node=victim.node) for ask in ASKS if ask.parts == ("node",)),
    )


def _ask_subjects(victim: Victim) -> list[str]:
    return sorted(
        {
            ask.subject(
                **{"node": node, "device_class": device_class} if "device_class" in ask.parts else {"node": node}
            )
            for ask in ASKS
            for device_class in victim.classes
            for node in (victim.node, CLUSTER)
        }
    )


def _targets(victim: Victim) -> list[str]:
    """List what a server's own words could do harm at: stores, services, inboxes, JetStream's
    interface.
    """
    return [
        *stored_subjects(victim),
        *_ask_subjects(victim),
        *(".".join((PREFIX, state.name, *_parts(victim, state).values())) for state in STATES),
        *(f"{API}.STREAM.{verb}.{stream}" for verb in ("PURGE", "DELETE") for stream in stream_names()),
        "$SYS.REQ.SERVER.PING",
        "_INBOX.gateway.nic.guess.guess",
        "_R_.guess1.guess2",
    ]


def _direct(victim: Victim, granted: Sequence[str]) -> Iterator[Attack]:
    """Write, delete and purge each key, forge each event, ask each service, publish what another
    node publishes.
    """
    stored = stored_subjects(victim)
    for subject in stored:
        if not is_granted(granted, subject):
            yield Attack("write", subject, b"{}")
            yield Attack("delete", subject, b"", {"KV-Operation": "DEL"})
            yield Attack("purge", subject, b"", {"KV-Operation": "PURGE", "Nats-Rollup": "sub"})
        for prefix in _PREFIXES:
            yield Attack("prefixed-write", f"{prefix}.{subject}", b"{}")
    for event in EVENTS:
        for device_class in victim.classes:
            subject = subject_of(event, victim.node, device_class)
            if not is_granted(granted, subject):
                yield Attack("forged-event", subject, encode(sample(event.message)), {"Nats-Msg-Id": "forged"})
    for ask in ASKS:
        for subject in _ask_subjects(victim):
            if subject.startswith(f"{PREFIX}.{ask.name}.") and not is_granted(granted, subject):
                for asker in askers_of(ask):
                    yield Attack(
                        "forged-ask", subject, encode(sample(ask.request)), reply=f"{inbox_branch(asker, 'nats')}.a.b"
                    )
                yield Attack("forged-ask", subject, encode(sample(ask.request)), reply="_R_.guess1.guess2")
    for noun in up_nouns():
        yield Attack("forged-up", up_subject(noun, **_parts(victim, noun)), encode(sample(noun.message)))
    for noun in (*STATES, *EVENTS):
        # What a server publishes of a write, and what a stream republishes.
        for branch in (f"{PREFIX}.{noun.name}", f"{PREFIX}.stored.{noun.name}"):
            subject = ".".join((branch, *_parts(victim, noun).values()))
            if not is_granted(granted, subject):
                yield Attack("forged-hint", subject, b"{}")


def _parts(victim: Victim, noun: State[Any] | Event[Any]) -> dict[str, str]:
    return parts_of(noun, victim.node, victim.classes[-1])


def _answers(victim: Victim, granted: Sequence[str]) -> Iterator[Attack]:
    """Answer in others' places."""
    for ask in ASKS:
        for device_class in victim.classes:
            for asker in askers_of(ask):
                subject = f"{inbox_branch(asker, answerer_of(ask, device_class))}.guess.guess"
                if not is_granted(granted, subject):
                    yield Attack("forged-answer", subject, encode(sample(ask.reply)))
    yield Attack("forged-answer", "_R_.guess1.guess2", b"{}")


def _requests_to_jetstream(victim: Victim) -> Iterator[Attack]:
    """Change streams, and make the server deliver stored messages where no client may write."""
    target = subject_of(LEDGER, victim.node, "")
    for prefix in _PREFIXES:
        for stream, (subjects,) in {config["name"]: config["subjects"] for config in wanted_streams(1)}.items():
            config = {"name": stream, "subjects": [target], "republish": {"src": ">", "dest": target}}
            for verb in _STREAM_VERBS:
                yield Attack("stream", f"{prefix}.STREAM.{verb}.{stream}", json.dumps(config | {"seq": 1}).encode())
            for deliver_subject in (target, _ask_subjects(victim)[0]):
                yield from _consumers(prefix, stream, subjects, deliver_subject)
            for verb in ("DELETE", "PAUSE", "LEADER.STEPDOWN", "MSG.NEXT", "RESET"):
                yield Attack("consumer-change", f"{prefix}.CONSUMER.{verb}.{stream}.others", b"{}")
        mirror = {"name": "ATTACK", "mirror": {"name": "KV_topobus_ledgers"}}
        republishing = {"name": "ATTACK", "subjects": ["attack.>"], "republish": {"src": "attack.>", "dest": target}}
        for config in (mirror, republishing):
            yield Attack("stream", f"{prefix}.STREAM.CREATE.ATTACK", json.dumps(config).encode())
        for verb in ("ACCOUNT.PURGE.NODE", "SERVER.REMOVE", "META.LEADER.STEPDOWN", "STREAM.TEMPLATE.CREATE.ATTACK"):
            yield Attack("server", f"{prefix}.{verb}", b"{}")
    for subject in (
        "$SYS.REQ.SERVER.PING",
        "$SYS.REQ.ACCOUNT.NODE.CONNZ",
        "$SYS.ACCOUNT.NODE.CONNECT",
        "$SYS.REQ.CLAIMS.UPDATE",
        "$JSC.R.attack",
    ):
        yield Attack("server", subject, b"{}")
    for subject in ("$JS.ACK.KV_topobus_ledgers.attack.1.1.1.1.0", "$JS.FC.KV_topobus_ledgers.attack.1"):
        yield Attack("server", subject, b"+TERM")


def _consumers(prefix: str, stream: str, subjects: str, deliver_subject: str) -> Iterator[Attack]:
    """Make a consumer that delivers to a subject, by each of the requests
    that servers take for it.
    """
    config = {
        "deliver_subject": deliver_subject,
        "ack_policy": "none",
        "deliver_policy": "all",
        "replay_policy": "instant",
    }
    named = json.dumps({"stream_name": stream, "config": {**config, "name": "attack"}}).encode()
    filtered = json.dumps(
        {"stream_name": stream, "config": {**config, "name": "attack", "filter_subject": subjects}}
    ).encode()
    durable = json.dumps({"stream_name": stream, "config": {**config, "durable_name": "attack"}}).encode()
    yield Attack(
        "consumer", f"{prefix}.CONSUMER.CREATE.{stream}", json.dumps({"stream_name": stream, "config": config}).encode()
    )
    yield Attack("consumer", f"{prefix}.CONSUMER.CREATE.{stream}.attack", named)
    yield Attack("consumer", f"{prefix}.CONSUMER.CREATE.{stream}.attack.{subjects}", filtered)
    yield Attack("consumer", f"{prefix}.CONSUMER.DURABLE.CREATE.{stream}.attack", durable)


def _own_subjects(granted: Sequence[str]) -> Iterator[str]:
    """Give one subject for each pattern that the attacker may publish at."""
    for pattern in granted:
        up = re.fullmatch(rf"{re.escape(PREFIX)}\.up\.([^.]+)\.>", pattern)
        if up is not None:
            yield from (
                up_subject(noun, **{part: {"node": up[1]}.get(part, "own") for part in noun.parts})
                for noun in up_nouns()
            )
        else:
            yield ".".join("own" if token in ("*", ">") else token for token in pattern.split("."))
