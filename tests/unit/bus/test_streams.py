"""What is said of a stream that exists: every field counts, also those
that nobody here asked for.
"""

from __future__ import annotations

from typing import Any

import pytest

from docpages.nats_files import render_server
from topobus.bus.server_config.streams import (
    REPUBLISH,
    DifferenceKind,
    differences,
    stream_names,
    total_bytes,
    wanted_streams,
)
from topobus.formats.messages.catalogue import EVENTS, STATES

_WANTED = {config["name"]: config for config in wanted_streams(1)}
_BUCKET = "KV_topobus_inventories"

# As nats-server 2.9.10, 2.10.27 and 2.15.1 give a stream that was made as the
# catalogue wants it: what they add.
_ADDED_BY_SERVERS: dict[str, dict[str, Any]] = {
    "2.9.10": {"mirror_direct": False, "sealed": False},
    "2.10.27": {"mirror_direct": False, "sealed": False, "compression": "none", "consumer_limits": {}},
    "2.15.1": {
        "mirror_direct": False,
        "sealed": False,
        "compression": "none",
        "consumer_limits": {},
        "allow_msg_ttl": False,
        "metadata": {"_nats.level": "5", "_nats.req.level": "0", "_nats.ver": "2.15.1"},
    },
}

_TAMPERED: dict[str, dict[str, Any]] = {
    "republish": {"republish": {"src": "$KV.topobus_inventories.attack.gpu", "dest": "$KV.topobus_ledgers.n1"}},
    "mirror": {"mirror": {"name": "ELSEWHERE"}},
    "sources": {"sources": [{"name": "ELSEWHERE"}]},
    "subject_transform": {"subject_transform": {"src": "$KV.topobus_inventories.>", "dest": "$KV.topobus_ledgers.>"}},
    "subjects": {"subjects": ["$KV.topobus_inventories.>", "topobus.v1.release.>"]},
    "sealed": {"sealed": True},
    "no_ack": {"no_ack": True},
    "consumer_limits": {"consumer_limits": {"inactive_threshold": 1}},
    "allow_msg_ttl": {"allow_msg_ttl": True},
    "first_seq": {"first_seq": 2**53},
    "persist_mode": {"persist_mode": "async"},
    "of-the-future": {"send_copies_to": "somebody"},
    "starving": {"max_bytes": 1024},
    "no-consumers": {"max_consumers": 1},
    "rollup": {"allow_rollup_hdrs": True},
    "silent": {REPUBLISH: None},
    "unbounded": {"max_bytes": -1},
    "refusing": {"discard": "new"},
}


@pytest.mark.parametrize("added", _ADDED_BY_SERVERS.values(), ids=_ADDED_BY_SERVERS.keys())
def test_stream_is_as_wanted_when_the_server_only_adds_its_defaults(added: dict[str, Any]) -> None:
    """What servers write for "not asked for" is no difference."""
    assert differences({**_WANTED[_BUCKET], **added}, _WANTED[_BUCKET]) == ()


@pytest.mark.parametrize("tampering", _TAMPERED.values(), ids=_TAMPERED.keys())
def test_stream_is_drift_when_a_field_was_set_that_nobody_here_sets(tampering: dict[str, Any]) -> None:
    """A stream that copies, is fed, renames, starves or has a field unknown to us is not ours, and
    the difference names the field.
    """
    found_differences = differences({**_WANTED[_BUCKET], **tampering}, _WANTED[_BUCKET])

    assert [(difference.kind, difference.field) for difference in found_differences] == [
        (DifferenceKind.DRIFT, next(iter(tampering)))
    ]


@pytest.mark.parametrize(
    "choice",
    [{"placement": {"tags": ["ssd"]}}, {"metadata": {"team": "platform"}}, {"compression": "s2"}, {"max_bytes": 2**40}],
    ids=["placement", "metadata", "compression", "a-larger-bound"],
)
def test_stream_is_left_alone_when_an_operator_chose_what_harms_nobody(choice: dict[str, Any]) -> None:
    """Where copies lie, how they are packed and how much they may take is the operator's: named,
    never refused.
    """
    found_differences = differences({**_WANTED[_BUCKET], **choice}, _WANTED[_BUCKET])

    assert [difference.kind for difference in found_differences] == [DifferenceKind.HARMLESS]


def test_bucket_says_that_a_key_was_written_and_never_what() -> None:
    """Each bucket's writes are said at the subjects of its noun, where the message is as empty as a
    forged one could be; an event is said again as it is.
    """
    for state in STATES:
        republish = _WANTED[f"KV_{state.bucket}"][REPUBLISH]
        parts = dict.fromkeys(state.parts, "x")

        assert republish == {"src": f"$KV.{state.bucket}.>", "dest": f"topobus.v1.{state.name}.>", "headers_only": True}
        assert state.subject(**parts) == republish["dest"].replace(">", state.key(**parts))
    for event in EVENTS:
        assert _WANTED[event.stream][REPUBLISH] == {
            "src": f"topobus.v1.{event.name}.>",
            "dest": f"topobus.v1.stored.{event.name}.>",
        }
    assert [name for name, config in _WANTED.items() if REPUBLISH not in config] == []


def test_streams_fit_the_shipped_store_when_all_are_full() -> None:
    """All bounds together stay below the shipped configuration's store, so that no stream's writers
    starve another's.

    Every stream has one.
    """
    assert "max_file_store: 4GB" in render_server()

    assert all(config["max_bytes"] > 0 and config["max_msg_size"] > 0 for config in _WANTED.values())
    assert sum(config["max_bytes"] for config in _WANTED.values()) == total_bytes() < 4_000_000_000


def test_streams_shrink_together_when_the_store_is_smaller() -> None:
    """A smaller store gives each stream its part.

    What another process makes so is no drift to one that was told nothing.
    """
    small = {config["name"]: config for config in wanted_streams(1, store_bytes=total_bytes() // 8)}

    assert sum(config["max_bytes"] for config in small.values()) <= total_bytes() // 8 + len(small) * 2**20
    assert {difference.kind for name in stream_names() for difference in differences(small[name], _WANTED[name])} == {
        DifferenceKind.HARMLESS
    }


def test_bucket_takes_its_largest_value_when_it_is_the_smallest_that_is_accepted() -> None:
    """Even a bound at the edge of what is accepted holds a key with all its history."""
    for state in STATES:
        assert state.max_bucket_bytes // 16 >= state.max_value_bytes * 2, state.name


def test_streams_are_told_apart_when_a_tool_lists_them() -> None:
    """`nats stream ls` shows a line of words for each, and no two have the same."""
    descriptions = [str(config["description"]) for config in wanted_streams(1)]

    assert len(set(descriptions)) == len(descriptions)
    assert all(text.endswith(".") and text.isascii() and len(text) < 180 for text in descriptions)
