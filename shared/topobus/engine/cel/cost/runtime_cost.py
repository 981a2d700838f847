"""The actual cost of a call, from its arguments and its result.

Source: cel-go interpreter/runtimecost.go (standard functions);
k8s.io/apiserver/pkg/cel/library/cost.go, CallCost (the others), 1.36.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from topobus.engine.cel.values import (
    Network,
    OptionalValue,
    from_key,
    size_of,
)

__all__ = ["charge_before", "cost_of_call", "weigh"]


class _Account(Protocol):
    def charge(self, cost: int) -> None: ...
    def labour(self, work: int) -> None: ...


_WALKS = frozenset(
    [
        "format",
        "semver",
        "isSemver",
        "startsWith",
        "endsWith",
        "url",
        "lowerAscii",
        "upperAscii",
        "substring",
        "trim",
        "cidr",
        "isIP",
        "isCIDR",
        "quantity",
        "isQuantity",
    ]
)
_WALKS_TWICE = frozenset(["replace", "split", "ip.isCanonical"])
_WALKS_VALUES = frozenset(["isSorted", "sum", "max", "min", "indexOf", "lastIndexOf"])
_PATTERNS = frozenset(["matches", "find", "findAll"])
_SETS = {"sets.contains": 1, "sets.intersects": 1, "sets.equivalent": 2}
_LOOKS = frozenset(
    [
        "@in",
        "includes",
        "isSorted",
        "sum",
        "max",
        "min",
        "indexOf",
        "lastIndexOf",
        "format",
        "optional.ofNonZeroValue",
        "slice",
        "reverse",
        "flatten",
    ]
)
_MADE_LISTS = frozenset(["slice", "reverse", "lists.range"])
_NEW_LIST = 11
"""A call and a list."""
_PLAIN = frozenset([bool, int, float, type(None)])
_SELF_COMPARISONS = frozenset(["distinct", "sort", "@sortByAssociatedKeys"])
_ORDERS = frozenset(["_<_", "_<=_", "_>_", "_>=_"])


def charge_before(account: _Account, name: str, values: tuple[object, ...]) -> None:
    """Refuse a call that would cost too much, before its work is done.

    The cost itself is charged afterwards.

    Errors: raises CostExceeded.
    """
    if name in _PATTERNS:
        cost = _pattern_cost(values)
        account.charge(cost)
        account.charge(-cost)
    elif name in _SETS:
        first, other = values
        rounds = weigh(first) * max(size_of(other), 1)
        account.labour(rounds if _SETS[name] == 1 else rounds + weigh(other) * max(size_of(first), 1))
    elif name in _SELF_COMPARISONS:
        account.labour(weigh(values[-1]) * (size_of(values[-1]) if name == "distinct" else 1))
    elif name == "lists.range":
        _charge_range(account, values[0])
    elif name in _LOOKS:
        account.labour(weigh(*values))
    elif name in _LENGTHS:
        account.labour(_LENGTHS[name](*values) // 10)


def _charge_range(account: _Account, count: object) -> None:
    """Refuse a list that is too long before it is made."""
    cost = max(count, 0) if isinstance(count, int) else 0
    account.charge(cost)
    account.charge(-cost)


def weigh(*values: object) -> int:
    """Count all values within values, and tens of characters.

    An item that occurs twice counts twice, because it is visited twice.
    """
    weights: dict[int, int] = {}
    return sum(_weight(value, weights) for value in values)


def _weight(value: object, weights: dict[int, int]) -> int:
    if isinstance(value, str | bytes):
        return 1 + len(value) // 10
    if isinstance(value, OptionalValue):
        return 1 + _weight(value.value, weights)
    if not isinstance(value, list | tuple | dict):
        return 1
    weight = weights.get(id(value))
    if weight is None:
        items = list(value.values()) if isinstance(value, dict) else value
        is_plain = set(map(type, items)) <= _PLAIN
        weight = weights[id(value)] = 1 + (len(items) if is_plain else sum([_weight(item, weights) for item in items]))
    return weight


def _length_of_replaced(text: str, old: str, new: str, limit: int = -1) -> int:
    count = text.count(old)
    return len(text) + (count if limit < 0 else min(count, limit)) * len(new)


def _length_of_joined(values: list[object], separator: str = "") -> int:
    return sum(len(value) for value in values if isinstance(value, str)) + len(separator) * len(values)


def _length_of_sum(first: object, second: object) -> int:
    # Ten for each item: what is charged here is a tenth.
    return (
        10 * (len(first) + len(second)) if isinstance(first, list | tuple) and isinstance(second, list | tuple) else 0
    )


_LENGTHS: dict[str, Callable[..., int]] = {
    "_+_": _length_of_sum,
    "replace": _length_of_replaced,
    "join": _length_of_joined,
    "strings.quote": lambda text: 2 * len(text),
}


def cost_of_call(name: str, signature: str, values: tuple[object, ...], result: object) -> int:
    """Compute the cost of one call."""
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
    if name in _SETS:
        return 1 + _SETS[name] * first * size_of(values[1])
    if name == "contains":
        return _tenth(first) * _tenth(size_of(values[1]))
    if name in _WALKS_VALUES:
        return _traversal(values[0])
    if name in _SELF_COMPARISONS:
        return _self_comparison(values[-1])
    if name in _MADE_LISTS:
        return size_of(result) + _NEW_LIST
    if name == "flatten":
        return int(first * float(values[1] if len(values) == 2 and isinstance(values[1], int) else 1)) + _NEW_LIST
    if name in _WALKS_TWICE:
        return _tenth(2 * first)
    if name == "join":
        return _tenth(2 * size_of(result))
    if name == "ip":
        return _tenth(first) if isinstance(values[0], str) else 1
    if name in ("containsIP", "containsCIDR"):
        return _network_cost(name, values)
    return 1


def _self_comparison(values: object) -> int:
    """Charge two for each pair of items, and a little more for texts."""
    count = size_of(values)
    is_text = isinstance(values, list | tuple) and bool(values) and isinstance(values[0], str | bytes)
    return int(count * count * (2.1 if is_text else 2.0)) + _NEW_LIST


def _network_cost(name: str, values: tuple[object, ...]) -> int:
    size = _network_size(values[0])
    cost = _tenth(2 * size) + (_tenth(size) + 1 if name == "containsCIDR" else 0)
    return cost + (_tenth(len(values[1])) if isinstance(values[1], str) else 0)


def _network_size(value: object) -> int:
    return len(value.address.packed) if isinstance(value, Network) else 1


def _pattern_cost(values: tuple[object, ...]) -> int:
    # One more than the length of the text, because a pattern has a cost even on an empty text. A
    # quarter of the pattern, because one of its elements has about four characters.
    return _tenth(1 + size_of(values[0])) * -(-size_of(values[1]) // 4)


def _traversal(value: object) -> int:
    if isinstance(value, str | bytes):
        return (len(value.encode()) if isinstance(value, str) else len(value)) // 10
    if isinstance(value, list | tuple):
        return sum(map(_traversal, value))
    if isinstance(value, dict):
        return sum(_traversal(from_key(key)) + _traversal(inner) for key, inner in value.items())
    return 1


def _tenth(size: int) -> int:
    return (size + 9) // 10
