"""List functions: those of Kubernetes (`sum`, `min`, `isSorted`, ...) and cel-go's list library,
version 3 (`sort`, `distinct`, `slice`, ...).

Source: k8s.io/apiserver/pkg/cel/library/lists.go; cel-go ext/lists.go, in Kubernetes' base
environment since 1.34.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cmp_to_key
from itertools import pairwise

from topobus.engine.cel.errors import EvaluationError
from topobus.engine.cel.functions.times import total_of_durations
from topobus.engine.cel.registry import Library, overload
from topobus.engine.cel.values import (
    Duration,
    Uint,
    compare,
    is_same,
    kind_of,
    whole,
)

__all__ = ["LISTS"]

# The types whose values have an order.
_ORDERED = ("int", "uint", "double", "bool", "duration", "timestamp", "string", "bytes")
_ORDERED_KINDS = frozenset(
    ["int", "uint", "double", "bool", "string", "bytes", "google.protobuf.Duration", "google.protobuf.Timestamp"]
)


def _kubernetes_lists() -> Library:
    def ordered(name: str, values: list[object]) -> list[object]:
        if any(kind_of(value) not in _ORDERED_KINDS for value in values):
            raise EvaluationError(f"no such overload: {name} of what has no order")
        return values

    def is_sorted(values: list[object]) -> bool:
        return all(_order(first, second) <= 0 for first, second in pairwise(ordered("isSorted", values)))

    def extreme(name: str, sign: int) -> Callable[[list[object]], object]:
        def work(values: list[object]) -> object:
            if not values:
                raise EvaluationError(f"{name} called on empty list")
            best = ordered(name, values)[0]
            for value in values[1:]:
                if _order(value, best) * sign > 0:
                    best = value
            return best

        return work

    def total(values: list[object]) -> object:
        kinds = {type(value) for value in values}
        if len(kinds) > 1:
            raise EvaluationError("no such overload: sum of values of different types")
        match values:
            case [Uint(), *_]:
                return whole(sum(value for value in values if isinstance(value, int)), is_unsigned=True)
            case [float(), *_]:
                return sum(value for value in values if isinstance(value, float))
            case [Duration(), *_]:
                return total_of_durations([value for value in values if isinstance(value, Duration)])
            case [bool(), *_] | [str(), *_]:
                raise EvaluationError("no such overload: sum of what is no number")
            case _:
                return whole(sum(value for value in values if isinstance(value, int)))

    def place(values: list[object], wanted: object) -> int:
        return next((index for index, value in enumerate(values) if is_same(value, wanted)), -1)

    def last_place(values: list[object], wanted: object) -> int:
        return next((index for index in range(len(values) - 1, -1, -1) if is_same(values[index], wanted)), -1)

    return (
        *(overload(f"list<{cel_type}>.isSorted() -> bool", is_sorted) for cel_type in _ORDERED),
        *(
            overload(f"list<{cel_type}>.sum() -> {cel_type}", total)
            for cel_type in ("int", "uint", "double", "duration")
        ),
        *(overload(f"list<{cel_type}>.min() -> {cel_type}", extreme("min", -1)) for cel_type in _ORDERED),
        *(overload(f"list<{cel_type}>.max() -> {cel_type}", extreme("max", 1)) for cel_type in _ORDERED),
        overload("list<A>.indexOf(A) -> int", place),
        overload("list<A>.lastIndexOf(A) -> int", last_place),
    )


def _order(first: object, second: object) -> int:
    """Order two values.

    As upstream, those of which neither comes first (NaN, a text and a number) count as equal.
    """
    try:
        return compare(first, second)
    except EvaluationError:
        return 0


def _sort_by(values: list[object], keys: list[object]) -> list[object]:
    """Sort values by the keys at the same positions.

    Errors: raises EvaluationError for keys of no order or of several types.
    """
    if not values:
        return values
    kind = kind_of(keys[0])
    if kind not in _ORDERED_KINDS:
        raise EvaluationError("list elements must be comparable")
    if any(kind_of(key) != kind for key in keys):
        raise EvaluationError("list elements must have the same type")
    by_key = cmp_to_key(_order)
    return [values[place] for place in sorted(range(len(keys)), key=lambda place: by_key(keys[place]))]


def _slice(values: list[object], start: int, end: int) -> list[object]:
    if start < 0 or end < 0:
        raise EvaluationError(f"cannot slice({start}, {end}), negative indexes not supported")
    if start > end:
        raise EvaluationError(f"cannot slice({start}, {end}), start index must be less than or equal to end index")
    if len(values) < end:
        raise EvaluationError(f"cannot slice({start}, {end}), list is length {len(values)}")
    return list(values[start:end])


def _flatten(values: list[object], depth: int = 1) -> list[object]:
    if depth < 0:
        raise EvaluationError("level must be non-negative")
    flat: list[object] = []
    for value in values:
        if depth and isinstance(value, list | tuple):
            flat += _flatten(list(value), depth - 1)
        else:
            flat.append(value)
    return flat


def _distinct(values: list[object]) -> list[object]:
    kept: list[object] = []
    for value in values:
        if not any(is_same(value, other) for other in kept):
            kept.append(value)
    return kept


LISTS: Library = (
    *_kubernetes_lists(),
    *(
        overload(f"list<{cel_type}>.sort() -> list<{cel_type}>", lambda values: _sort_by(values, values))
        for cel_type in _ORDERED
    ),
    *(overload(f"list<A>.@sortByAssociatedKeys(list<{cel_type}>) -> list<A>", _sort_by) for cel_type in _ORDERED),
    overload("list<A>.slice(int, int) -> list<A>", _slice),
    overload("list<list<A>>.flatten() -> list<A>", _flatten),
    overload("list<dyn>.flatten(int) -> list<dyn>", _flatten),
    overload("list<A>.distinct() -> list<A>", _distinct),
    overload("list<A>.reverse() -> list<A>", lambda values: list(reversed(values))),
    overload("lists.range(int) -> list<int>", lambda count: list(range(count))),
)
