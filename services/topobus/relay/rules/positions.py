"""Decides from where a node's events are said to the hub, and which keys the hub may have, as the
note at the hub says it.

Flows in: the note (`NodeRelay`), the node's stream, the newest sequence at the hub. Flows out: a
new note, or where to begin. The note follows the events that it speaks of: a hub that was restored
from an older copy has an older note, too, and what came after it is said again.
"""

from __future__ import annotations

from msgspec.structs import replace

from topobus.formats.messages.relay_messages import EventPosition, NodeRelay

__all__ = ["advanced", "first_unsaid", "is_kept", "with_key", "without_key", "without_position"]


def first_unsaid(position: EventPosition | None, *, created: str, newest: int) -> int:
    """Give the sequence after which the node's events have to be said.

    Shapes: created, newest — of the node's stream. A stream that was made anew, or has fewer events
    than were said, is another one: it is said from its beginning.
    """
    if position is None or position.created != created or position.sequence > newest:
        return 0
    return position.sequence


def is_kept(position: EventPosition, hub_sequence: int) -> bool:
    """Say whether the hub still has the last event that it acknowledged.

    Shapes: hub_sequence — of the newest message under the event's subject now. A larger one is a
    later event: of ours, when its acknowledgement was lost, or (decisions) of a controller.
    """
    return hub_sequence >= position.hub_sequence


def advanced(note: NodeRelay, event: str, *, created: str, sequence: int, subject: str, hub_sequence: int) -> NodeRelay:
    """Note that the hub has an event, and so all before it."""
    before = note.events.get(event)
    if hub_sequence == 0 and before is not None:
        # Nothing was said: what cannot be said is passed over.
        subject, hub_sequence = before.subject, before.hub_sequence
    position = EventPosition(
        created=created, sequence=sequence, subject=subject if hub_sequence else "", hub_sequence=hub_sequence
    )
    return replace(note, events={**note.events, event: position})


def without_position(note: NodeRelay, event: str) -> NodeRelay:
    """Forget how far an event's copies are: the hub's stream was lost."""
    return replace(note, events={name: position for name, position in note.events.items() if name != event})


def with_key(note: NodeRelay, key: str) -> NodeRelay:
    """Note, before it is written, that the hub may have a key."""
    return note if key in note.keys else replace(note, keys=tuple(sorted((*note.keys, key))))


def without_key(note: NodeRelay, key: str) -> NodeRelay:
    """Note, after it was deleted, that the hub has a key no longer."""
    return replace(note, keys=tuple(listed for listed in note.keys if listed != key))
