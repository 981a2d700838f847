"""What a node's relay notes at the hub: how far the hub's copies of the node's events are, and
which of its keys the hub may have.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["EventPosition", "LinkRequest", "NodeRelay"]


class EventPosition(Struct, frozen=True, kw_only=True):
    """The last event of one stream that the hub acknowledged."""

    created: str
    """When the node's stream was made, by its server: another time is another stream."""
    sequence: int
    """In the node's stream. All up to here has been sent, or was gone before that."""
    subject: str = ""
    """The subject of the event at the hub; empty when none was sent yet."""
    hub_sequence: int = 0
    """In the hub's stream."""


class NodeRelay(Struct, frozen=True, kw_only=True):
    """How far a node's relay is.

    It is written only after the hub has acknowledged its content, or before a key that it names is
    written.
    """

    node: str
    events: dict[str, EventPosition] = {}
    """By the event's noun."""
    keys: tuple[str, ...] = ()
    """`<noun>/<key>` of what a node may have several of; sorted. The hub has no others of this
    node."""
    id_ending: str = ""
    """With what the ids of this node's events (`Nats-Msg-Id`) end at the hub: random and
    secret, because a client that could guess an id would use it first. Empty: none yet."""


class LinkRequest(Struct, frozen=True, kw_only=True):
    """Ask a node's relay how far it is."""
