"""The subjects at which a node's relay reports to the hub what the node's own server stores, and
what the hub's server makes of each.

A subject is `topobus.v1.up.<node>.<noun>.<further tokens>`. The node is at one fixed position, so
that one pattern covers all that a node may publish. The hub's server maps each of these subjects to
that of the bucket or the stream, and sends its acknowledgement back: no process is in between. At
`topobus.v1.up.<node>.stored.<noun>.<further tokens>` it answers with what it has of a state
(docs/adr/0030).
"""

from __future__ import annotations

from typing import Any

from topobus.formats.messages.catalogue import ALL, EVENTS, STATES
from topobus.formats.messages.nouns import PREFIX, Event, State, to_token
from topobus.values.errors import ContractError

__all__ = [
    "OLDEST_LEAF",
    "up_branch",
    "up_mappings",
    "up_nouns",
    "up_stored_subject",
    "up_subject",
]

_UP = f"{PREFIX}.up"
# In the place of a noun's name. No noun may have this name.
_STORED = "stored"
assert _STORED not in {noun.name for noun in ALL}
assert "up" not in {noun.name for noun in ALL}

OLDEST_LEAF = (2, 10)
"""Earlier servers cannot sync each write, and on them a request across accounts that no process
answers waits its full timeout."""


def up_nouns() -> tuple[State[Any] | Event[Any], ...]:
    """Give what crosses from a node to the hub: each state and event whose first part is the node,
    in the catalogue's order.

    >>> [noun.name for noun in up_nouns()][:3]
    ['machine', 'inventory', 'ledger']
    """
    return tuple(noun for noun in (*STATES, *EVENTS) if noun.parts[0] == "node")


def up_subject(noun: State[Any] | Event[Any], **parts: str) -> str:
    """Build the subject at which a relay publishes a state or an event.

    Shapes: parts — all of the noun's parts by name.
    Errors: raises ContractError for a noun that belongs to no node, and for a part that no subject
    can hold.

    >>> from topobus.formats.messages.catalogue import HEALTH
    >>> up_subject(HEALTH, node="n1", device_class="gpu", device="gpu-0")
    'topobus.v1.up.n1.health.gpu.gpu-0'
    """
    node, *further = _tokens(noun, parts)
    return ".".join((_UP, node, noun.name, *further))


def up_stored_subject(state: State[Any], **parts: str) -> str:
    """Build the subject at which the hub's server answers with the newest value that it has of a
    key.

    Errors:  as `up_subject`.

    >>> from topobus.formats.messages.catalogue import INVENTORY
    >>> up_stored_subject(INVENTORY, node="n1", device_class="gpu")
    'topobus.v1.up.n1.stored.inventory.gpu'
    """
    node, *further = _tokens(state, parts)
    return ".".join((_UP, node, _STORED, state.name, *further))


def up_branch(node: str = "") -> str:
    """Return the pattern of all that a node publishes: what its leaf's user at the hub may publish.

    Without a node, of all that any node publishes.

    >>> up_branch("node1.example"), up_branch()
    ('topobus.v1.up.node1_example.>', 'topobus.v1.up.*.>')
    """
    return f"{_UP}.{to_token(node) if node else '*'}.>"


def up_mappings() -> tuple[tuple[str, str], ...]:
    """Pair each up pattern with the subject pattern at the hub: the n-th `*` of each is the same
    token.

    Shapes: the published nouns first, in the catalogue's order, then the queries of states.

    >>> up_mappings()[1]
    ('topobus.v1.up.*.inventory.*', '$KV.topobus_inventories.*.*')
    """
    said = tuple((_pattern(noun.name, noun), _hub_pattern(noun)) for noun in up_nouns())
    stored = tuple(
        (
            _pattern(f"{_STORED}.{state.name}", state),
            # JetStream's direct access to the newest message of one subject: the subject is part of
            # the request's, so that no payload chooses it.
            f"$JS.API.DIRECT.GET.KV_{state.bucket}.{_hub_pattern(state)}",
        )
        for state in up_nouns()
        if isinstance(state, State)
    )
    return (*said, *stored)


def _tokens(noun: State[Any] | Event[Any], parts: dict[str, str]) -> list[str]:
    if noun.parts[0] != "node":
        raise ContractError(f"{noun.name} belongs to no node: no relay sends it to the hub")
    if isinstance(noun, State):
        return noun.key(**parts).split(".")
    return noun.subject(**parts).removeprefix(f"{PREFIX}.{noun.name}.").split(".")


def _pattern(name: str, noun: State[Any] | Event[Any]) -> str:
    return ".".join((_UP, "*", name, *("*" for _ in noun.parts[1:])))


def _hub_pattern(noun: State[Any] | Event[Any]) -> str:
    return f"$KV.{noun.bucket}.{noun.key_pattern()}" if isinstance(noun, State) else noun.pattern()
