"""Decides what a node with a server of its own has to be told of the stand-alone claims that are allocated on it.

Flows in: the versions of those claims, and what the node has by its relay's note. Flows out: the places to write and to delete, each with the version that it replaces, cut
into requests that a server takes. Where both are equal there is nothing to say, so that a restart of this process, another replica and a cut ask for nothing by themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct

from topobus.contracts.messages import ApiObject
from topobus.domain.request import Owner, OwnerKind

__all__ = ["REQUEST_BYTES", "Difference", "cut", "difference_of", "is_there", "nodes_of"]

REQUEST_BYTES = 256 * 1024
"""How much of claims one request carries, unless a single one is larger: a quarter of what a server takes as one message, so that others get through between two."""


class Difference(Struct, frozen=True, kw_only=True):
    """What a node does not have as it should."""

    puts: tuple[tuple[str, str], ...] = ()
    """Places with the versions that are replaced; empty: none."""
    drops: tuple[tuple[str, str], ...] = ()
    """Places with the versions that go."""

    def __bool__(self) -> bool:
        """Say whether there is any difference."""
        return bool(self.puts or self.drops)


def difference_of(wanted: Mapping[str, str], held: Mapping[str, str], staying: Collection[str] = ()) -> Difference:
    """Compare what is allocated on a node with what the node has.

    Shapes: wanted, held — versions by place; staying — places of claims that are prepared there: they go when that is undone.
    Order:  by place.

    >>> difference_of({"a/new": "2-x"}, {"a/old": "1-y"})
    Difference(puts=(('a/new', ''),), drops=(('a/old', '1-y'),))
    """
    return Difference(
        puts=tuple((place, held.get(place, "")) for place in sorted(wanted) if wanted[place] != held.get(place)),
        drops=tuple((place, held[place]) for place in sorted(held.keys() - wanted.keys() - set(staying))),
    )


def cut(sizes: Mapping[str, int], places: Collection[str], limit_bytes: int = REQUEST_BYTES) -> tuple[str, ...]:
    """Choose so many places, in their order, that the claims fit into one request; the first one always.

    >>> cut({"a": 10, "b": 10, "c": 10}, ("a", "b", "c"), 25)
    ('a', 'b')
    """
    chosen: list[str] = []
    for place in places:
        limit_bytes -= sizes[place]
        if chosen and limit_bytes < 0:
            break
        chosen.append(place)
    return tuple(chosen)


def nodes_of(claim: ApiObject) -> frozenset[str]:
    """Name the pools of a claim's allocation, which for our drivers are nodes; what nobody can read names none.

    Shapes: claim — in the shape of resource.k8s.io/v1.
    """
    results = _inner(_inner(claim.status, "allocation"), "devices").get("results")
    pools = (result.get("pool") for result in results if isinstance(result, dict)) if isinstance(results, list) else ()
    return frozenset(pool for pool in pools if isinstance(pool, str) and pool)


def is_there(owner_keys: Collection[str], namespace: str, name: str) -> bool:
    """Say whether a claim of this place, whatever its uid, is among the owners (`Owner.key`)."""
    prefix = Owner(kind=OwnerKind.CLAIM, namespace=namespace, name=name, uid="").key
    return any(key.startswith(prefix) for key in owner_keys)


def _inner(value: Any, key: str) -> dict[str, Any]:
    inner = value.get(key) if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else {}
