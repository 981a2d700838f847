"""What crosses from a node to the hub: subjects and their mappings, made from the catalogue."""

from __future__ import annotations

import re

import pytest

from docpages.nats_files import DENIED_EXPORTS, DENIED_IMPORTS, domain_of, render_hub
from topobus.bus.server_config.up_subjects import (
    up_branch,
    up_mappings,
    up_nouns,
    up_stored_subject,
    up_subject,
)
from topobus.formats.messages import catalogue
from topobus.formats.messages.nouns import Event, State
from topobus.values.errors import ContractError

_VALUES = {"node": "node1.example", "device_class": "gpu", "device": "gpu-0"}


def _is_match(pattern: str, subject: str) -> bool:
    """Match as a NATS server does: `*` is one token, `>` at the end is one or more."""
    wanted = pattern.split(".")
    tokens = subject.split(".")
    if wanted[-1] == ">":
        return len(tokens) >= len(wanted) and all(
            want in ("*", token) for want, token in zip(wanted[:-1], tokens, strict=False)
        )
    return len(tokens) == len(wanted) and all(want in ("*", token) for want, token in zip(wanted, tokens, strict=True))


def _mapped(subject: str) -> str:
    """Map a subject as the hub does: the n-th `*` of both patterns is the same token."""
    matches = [(up, hub) for up, hub in up_mappings() if _is_match(up, subject)]
    assert len(matches) == 1, f"{subject} is mapped by {matches}"
    ((up, hub),) = matches
    wild = iter([token for want, token in zip(up.split("."), subject.split("."), strict=True) if want == "*"])
    return ".".join(next(wild) if token == "*" else token for token in hub.split("."))


def test_up_nouns_are_all_states_and_events_of_a_node_when_the_catalogue_is_read() -> None:
    """What belongs to a node crosses, also what is added to the catalogue later.

    What belongs to no node does not.
    """
    crossing = [noun.name for noun in up_nouns()]

    assert crossing == [noun.name for noun in (*catalogue.STATES, *catalogue.EVENTS) if "node" in noun.parts]
    assert "object" not in crossing


@pytest.mark.parametrize("noun", up_nouns(), ids=lambda noun: noun.name)
def test_up_subject_is_mapped_to_the_nouns_own_when_the_hub_takes_it(noun: State[object] | Event[object]) -> None:
    """What a node says arrives under the key or the subject that the node's services use, and under
    no other.
    """
    parts = {part: _VALUES[part] for part in noun.parts}
    wanted = f"$KV.{noun.bucket}.{noun.key(**parts)}" if isinstance(noun, State) else noun.subject(**parts)

    assert _mapped(up_subject(noun, **parts)) == wanted


@pytest.mark.parametrize(
    "state", [noun for noun in up_nouns() if isinstance(noun, State)], ids=lambda state: state.name
)
def test_up_stored_subject_reads_one_key_when_the_hub_takes_it(state: State[object]) -> None:
    """The key stands in the subject, so that a node reads its own alone, whatever it sends."""
    parts = {part: _VALUES[part] for part in state.parts}

    assert (
        _mapped(up_stored_subject(state, **parts))
        == f"$JS.API.DIRECT.GET.KV_{state.bucket}.$KV.{state.bucket}.{state.key(**parts)}"
    )


@pytest.mark.parametrize("noun", up_nouns(), ids=lambda noun: noun.name)
def test_up_subject_is_of_its_nodes_branch_when_it_is_built(noun: State[object] | Event[object]) -> None:
    """One pattern is all that a node may say, and it says nothing for another."""
    subject = up_subject(noun, **{part: _VALUES[part] for part in noun.parts})

    assert _is_match(up_branch("node1.example"), subject)
    assert not _is_match(up_branch("node2.example"), subject)


def test_up_subject_is_refused_when_the_noun_belongs_to_no_node() -> None:
    """The stand-alone objects are the hub's own."""
    with pytest.raises(ContractError, match="belongs to no node"):
        up_subject(catalogue.OBJECT, kind="pods", namespace="default", name="a")


def test_up_mappings_keep_the_order_of_tokens_when_they_are_rendered() -> None:
    """Each pair has as many wildcards on both sides, and the node is the first: so an import of an
    account can say it, too.
    """
    for up, hub in up_mappings():
        assert up.count("*") == hub.count("*")
        assert up.startswith("topobus.v1.up.*.")
    rendered = re.findall(r'"([^"]+)": "([^"]+)"', render_hub())
    assert [(up, re.sub(r"\$\d", "*", hub)) for up, hub in rendered] == list(up_mappings())


def test_leaf_denies_what_is_local_when_it_talks_to_the_hub() -> None:
    """Only the relay's subjects leave the node, only questions to the node and answers to its relay
    come in.
    """
    exported = ["topobus.v1.up.n1.ledger", "_INBOX.controller.topology.a.b", "_INBOX.topobus-cli.topology.a.b"]
    imported = ["topobus.v1.place.n1", "topobus.v1.prepare.n1.gpu", "_INBOX.relay.nats.a.b"]

    def denied(subjects: tuple[str, ...], subject: str) -> bool:
        return any(_is_match(pattern, subject) for pattern in subjects)

    assert not [subject for subject in exported if denied(DENIED_EXPORTS, subject)]
    assert not [subject for subject in imported if denied(DENIED_IMPORTS, subject)]
    local = [
        "$KV.topobus_ledgers.n1",
        "$JS.API.STREAM.INFO.KV_topobus_ledgers",
        "topobus.v1.health.n1.gpu.gpu-0",
        "_INBOX.gateway.topology.a.b",
    ]
    assert [
        subject for subject in local if denied(DENIED_EXPORTS, subject) and denied(DENIED_IMPORTS, subject)
    ] == local
    assert denied(DENIED_EXPORTS, "topobus.v1.release.n2")
    # nats-server 2.15.1 takes a denied import for a denied export, too.
    assert not denied(DENIED_IMPORTS, "topobus.v1.up.n1.ledger")


def test_domain_is_a_name_that_a_server_takes_when_the_node_has_dots() -> None:
    """A JetStream domain is one token."""
    assert domain_of("node1.example.com") == "node-node1_example_com"
