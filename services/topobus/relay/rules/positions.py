"""Decides from which position a node's events are sent to the hub, and which keys the hub may have
according to its note.

The note (`NodeRelay`) is written after the events that it records. So a hub that was restored from
an older copy also has an older note, and the events after it are sent again.
"""

from __future__ import annotations

from msgspec.structs import replace

from topobus.formats.messages.relay_messages import EventPosition, NodeRelay

__all__ = ["advanced", "first_unsaid", "is_kept", "with_key", "without_key", "without_position"]


def first_unsaid(position: EventPosition | None, *, created: str, newest: int) -> int:
    """Return the sequence after which the node's events have to be sent.

    Shapes: created, newest — of the node's stream. A stream with another creation time, or with
    fewer events than were sent, is a new stream: it is sent from its beginning.
    """
    if position is None or position.created != created or position.sequence > newest:
        return 0
    return position.sequence


def is_kept(position: EventPosition, hub_sequence: int) -> bool:
    """Return whether the hub still has the last event that it acknowledged.

    Shapes: hub_sequence — of the newest message under the event's subject. A larger one is a later
    event: one of ours whose acknowledgement was lost, or (decisions) one of a controller.
    """
    return hub_sequence >= position.hub_sequence


def advanced(note: NodeRelay, event: str, *, created: str, sequence: int, subject: str, hub_sequence: int) -> NodeRelay:
    """Note that the hub has an event and all before it."""
    before = note.events.get(event)
    if hub_sequence == 0 and before is not None:
        # Nothing was sent: an event that cannot be sent is skipped.
        subject, hub_sequence = before.subject, before.hub_sequence
    position = EventPosition(
        created=created, sequence=sequence, subject=subject if hub_sequence else "", hub_sequence=hub_sequence
    )
    return replace(note, events={**note.events, event: position})


def without_position(note: NodeRelay, event: str) -> NodeRelay:
    """Forget how far an event's copies are, because the hub's stream was lost."""
    return replace(note, events={name: position for name, position in note.events.items() if name != event})


def with_key(note: NodeRelay, key: str) -> NodeRelay:
    """Note that the hub may have a key. Called before the key is written."""
    return note if key in note.keys else replace(note, keys=tuple(sorted((*note.keys, key))))


def without_key(note: NodeRelay, key: str) -> NodeRelay:
    """Note that the hub no longer has a key. Called after it was deleted."""
    return replace(note, keys=tuple(listed for listed in note.keys if listed != key))
