"""What the relay does next, as values: never an older state after a newer, and events from where
the hub really is.
"""

from __future__ import annotations

import pytest

from topobus.formats.messages.relay_messages import EventPosition, NodeRelay
from topobus.relay.rules.copies import NOTHING_THERE, Copy, Step, digest_of, next_step
from topobus.relay.rules.positions import advanced, first_unsaid, is_kept, with_key, without_key, without_position

_NEW, _OLD = digest_of(b"new"), digest_of(b"old")


@pytest.mark.parametrize(
    ("kept", "copy", "step"),
    [
        (_NEW, None, Step.READ),
        (NOTHING_THERE, None, Step.READ),
        (_NEW, Copy(sequence=3, digest=_NEW, is_certain=True), Step.NOTHING),
        (_NEW, Copy(sequence=3, digest=_NEW, is_certain=False), Step.COMPARE),
        (_NEW, Copy(sequence=3, digest=_OLD, is_certain=True), Step.WRITE),
        (_NEW, Copy(sequence=3, digest=_OLD, is_certain=False), Step.WRITE),
        (_NEW, Copy(sequence=0, digest=NOTHING_THERE, is_certain=True), Step.WRITE),
        (NOTHING_THERE, Copy(sequence=3, digest=_OLD, is_certain=True), Step.WRITE),
        (NOTHING_THERE, Copy(sequence=4, digest=NOTHING_THERE, is_certain=True), Step.NOTHING),
    ],
)
def test_next_step_is_what_brings_the_copies_together_when_they_differ(
    kept: str, copy: Copy | None, step: Step
) -> None:
    """What is unknown is read, what seems equal is compared, what differs is written, and what is
    equal is left alone.
    """
    assert next_step(kept, copy) is step


def test_digest_tells_a_deleted_key_from_an_empty_value_when_both_have_no_bytes() -> None:
    """A key that is not there is no value, not even the empty one."""
    assert digest_of(None) == NOTHING_THERE
    assert digest_of(b"") != NOTHING_THERE


@pytest.mark.parametrize(
    ("position", "behind"),
    [
        (None, 0),
        (EventPosition(created="then", sequence=7, subject="s", hub_sequence=20), 7),
        (EventPosition(created="before", sequence=7, subject="s", hub_sequence=20), 0),
        (EventPosition(created="then", sequence=11, subject="s", hub_sequence=20), 0),
    ],
    ids=["never", "goes-on", "another-stream", "rolled-back"],
)
def test_first_unsaid_begins_anew_when_the_nodes_stream_is_another(position: EventPosition | None, behind: int) -> None:
    """A node's stream that was made anew, or lost its end, has events that nobody has said."""
    assert first_unsaid(position, created="then", newest=10) == behind


@pytest.mark.parametrize(("at_hub", "is_there"), [(20, True), (25, True), (19, False), (0, False)])
def test_position_is_kept_when_the_hub_has_the_last_event_or_a_later(at_hub: int, is_there: bool) -> None:
    """A hub's stream that ends before what it acknowledged was lost or put back."""
    assert is_kept(EventPosition(created="then", sequence=7, subject="s", hub_sequence=20), at_hub) is is_there


def test_note_advances_by_one_event_when_it_is_acknowledged() -> None:
    """Each event's position is its own.

    What was passed over moves the position, and keeps what the hub was last seen to have.
    """
    note = advanced(NodeRelay(node="n1"), "health", created="then", sequence=3, subject="s", hub_sequence=9)
    note = advanced(note, "decision", created="then", sequence=1, subject="d", hub_sequence=4)
    note = advanced(note, "health", created="then", sequence=4, subject="t", hub_sequence=0)

    assert note.events == {
        "health": EventPosition(created="then", sequence=4, subject="s", hub_sequence=9),
        "decision": EventPosition(created="then", sequence=1, subject="d", hub_sequence=4),
    }
    assert set(without_position(note, "health").events) == {"decision"}


def test_note_names_each_key_once_when_it_is_said_again() -> None:
    """The keys are sorted and unique, so that the same keys are the same bytes."""
    note = with_key(
        with_key(with_key(NodeRelay(node="n1"), "inventory/n1.nic"), "inventory/n1.gpu"), "inventory/n1.nic"
    )

    assert note.keys == ("inventory/n1.gpu", "inventory/n1.nic")
    assert without_key(note, "inventory/n1.gpu").keys == ("inventory/n1.nic",)
    assert without_key(note, "inventory/n1.fpga") == note
