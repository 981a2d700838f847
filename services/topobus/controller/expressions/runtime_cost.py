"""What a call costs, from the values that it got and gave.

Source: cel-go interpreter/runtimecost.go (standard functions); k8s.io/apiserver/pkg/cel/library/cost.go, CallCost (the others), 1.36.
"""

from __future__ import annotations

from typing import Protocol

from topobus.controller.expressions.values import Network, from_key, size_of

__all__ = ["charge_before", "cost_of_call"]


class _Account(Protocol):
    def charge(self, cost: int) -> None: ...


_WALKS = frozenset("startsWith endsWith url lowerAscii upperAscii substring trim cidr isIP isCIDR quantity isQuantity".split())  # noqa: SIM905
_WALKS_TWICE = frozenset(["replace", "split", "ip.isCanonical"])
_WALKS_VALUES = frozenset(["isSorted", "sum", "max", "min", "indexOf", "lastIndexOf"])
_PATTERNS = frozenset(["matches", "find", "findAll"])
_ORDERS = frozenset(["_<_", "_<=_", "_>_", "_>=_"])


def charge_before(account: _Account, name: str, values: tuple[object, ...]) -> None:
    """Refuse what would cost too much before the work is done; the cost itself is charged afterwards.

    Errors: raises CostExceeded.
    """
    if name in _PATTERNS:
        cost = _pattern_cost(values)
        account.charge(cost)
        account.charge(-cost)


def cost_of_call(name: str, signature: str, values: tuple[object, ...], result: object) -> int:
    """Give the cost of one call."""
    if not values:
        return 1
    first = size_of(values[0])
    if name in _WALKS or (name in ("bytes", "string") and isinstance(values[0], str | bytes)):
        return _tenth(first)
    if name in _ORDERS:
        return _tenth(min(first, size_of(values[1]))) if isinstance(values[0], str | bytes) else 1
    if name == "@in":
        return size_of(values[1]) if isinstance(values[1], list | tuple) else 1
    if name == "_+_":
        return _tenth(first + size_of(values[1])) if isinstance(values[0], str | bytes) else 1
    if name in _PATTERNS:
        return _pattern_cost(values)
    if name == "contains":
        return _tenth(first) * _tenth(size_of(values[1]))
    if name in _WALKS_VALUES:
        return _traversal(values[0])
    if name in _WALKS_TWICE:
        return _tenth(2 * first)
    if name == "join":
        return _tenth(2 * size_of(result))
    if name == "ip":
        return _tenth(first) if isinstance(values[0], str) else 1
    if name in ("containsIP", "containsCIDR"):
        return _network_cost(name, values)
    return 1


def _network_cost(name: str, values: tuple[object, ...]) -> int:
    size = _network_size(values[0])
    cost = _tenth(2 * size) + (_tenth(size) + 1 if name == "containsCIDR" else 0)
    return cost + (_tenth(len(values[1])) if isinstance(values[1], str) else 0)


def _network_size(value: object) -> int:
    return len(value.address.packed) if isinstance(value, Network) else 1


def _pattern_cost(values: tuple[object, ...]) -> int:
    # One more than the text is long: a pattern costs on an empty text, too. A quarter of the pattern: an element of one has about four characters.
    return _tenth(1 + size_of(values[0])) * -(-size_of(values[1]) // 4)


def _traversal(value: object) -> int:
    if isinstance(value, str | bytes):
        return (len(value.encode()) if isinstance(value, str) else len(value)) // 10
    if isinstance(value, list | tuple):
        return sum(map(_traversal, value))
    if isinstance(value, dict):
        return sum(_traversal(from_key(key)) + _traversal(one) for key, one in value.items())
    return 1


def _tenth(size: int) -> int:
    return (size + 9) // 10
