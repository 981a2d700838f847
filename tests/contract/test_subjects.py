"""Subjects stand in the catalogue and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from topobus.formats.messages.catalogue import ALL, ASKS, EVENTS, NOTICES, STATES
from topobus.formats.messages.nouns import from_token, to_token
from topobus.values.errors import ContractError

ROOT = Path(__file__).resolve().parents[2]
_LITERAL = re.compile(
    r"""topobus\.v1|\$KV\.|\$JS\.|\$SRV|["'](?:TOPOBUS_HEALTH|TOPOBUS_DECISIONS|topobus_(?:machines|inventories|ledgers|objects))["']"""
)
_ALLOWED = ("shared/topobus/formats/messages/", "shared/topobus/bus/")


def test_code_writes_no_subject_when_it_is_outside_the_catalogue_and_runtime() -> None:
    """A literal subject, stream or bucket elsewhere would escape the permissions, the reference
    page and any change of the grammar.
    """
    literals = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for room in ("shared", "services")
        for file in sorted((ROOT / room).rglob("*.py"))
        if not str(file.relative_to(ROOT)).startswith(_ALLOWED)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if _LITERAL.search(line)
    ]

    assert not literals, "build subjects with topobus.formats.messages.catalogue instead:\n" + "\n".join(literals)


def test_nouns_are_unique_when_the_catalogue_is_read() -> None:
    """One noun is one message type; streams and buckets are not shared."""
    names = [noun.name for noun in ALL]
    stores = [state.bucket for state in STATES] + [event.stream for event in EVENTS]

    assert len(set(names)) == len(names) == len(STATES) + len(EVENTS) + len(NOTICES) + len(ASKS)
    assert len(set(stores)) == len(stores)


@pytest.mark.parametrize("name", ["n1", "node1.example.com", "gpu-0000-3b-00-0", "_", "ResourceClaim"])
def test_token_turns_back_into_the_name_when_it_is_one(name: str) -> None:
    """A name survives the way through a subject."""
    token = to_token(name)

    assert "." not in token
    assert from_token(token) == name


@pytest.mark.parametrize("name", ["", "a_b", "a b", "a*", "a>", "$x", "a\nb", "ü"])
def test_token_is_refused_when_it_would_change_a_subject(name: str) -> None:
    """No name can smuggle a wildcard, a separator or another subject in."""
    with pytest.raises(ContractError):
        to_token(name)
