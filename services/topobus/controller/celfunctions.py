"""The functions that Kubernetes adds to CEL for DRA: quantities, versions, lists, sets.

The engine's opaque types are not usable from Python, so a quantity and a version travel as marked texts that no attribute can contain; the functions here
know them. The engine tells overloads apart by the outermost type only, so one overload serves lists of anything. A ValueError becomes CEL's run-time error.
Left out on purpose: `find` and `findAll`, whose patterns Python may match for ever (`matches` is the engine's own and safe).
Source: k8s.io/apiserver/pkg/cel/library (quantity.go, lists.go), k8s.io/dynamic-resource-allocation/cel, 1.36; cel-go/ext/sets.go.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from cel_expr_python import cel  # type: ignore[import-untyped]  # the package has no py.typed

from topobus.controller.core.selectors import FactValue, Version
from topobus.controller.semver import SemanticVersion
from topobus.domain.quantity import Quantity

__all__ = ["mark_quantity", "plain_value", "selector_functions"]

# Private-use characters: no attribute (64 printable characters) begins with one.
_QUANTITY = "\ue000"
_VERSION = "\ue001"

_Function = Callable[..., object]


def selector_functions() -> list[cel.FunctionDecl]:
    """Declare all functions with their implementations."""
    text, integer, boolean, double, dynamic = cel.Type.STRING, cel.Type.INT, cel.Type.BOOL, cel.Type.DOUBLE, cel.Type.DYN
    values = cel.Type.List(dynamic)
    return [
        _function("quantity", text, ((text,), lambda one: mark_quantity(Quantity.parse(one))), is_member=False),
        _function("isQuantity", boolean, ((text,), _can(Quantity.parse)), is_member=False),
        _function(
            "semver",
            text,
            ((text,), lambda one: _VERSION + str(SemanticVersion.parse(one))),
            ((text, boolean), lambda one, loose: _VERSION + str(SemanticVersion.parse(one, is_loose=loose))),
            is_member=False,
        ),
        _function("isSemver", boolean, ((text,), _can(SemanticVersion.parse)), is_member=False),
        _function("compareTo", integer, ((text, text), _compare)),
        _function("isGreaterThan", boolean, ((text, text), lambda one, other: _compare(one, other) > 0)),
        _function("isLessThan", boolean, ((text, text), lambda one, other: _compare(one, other) < 0)),
        _function("sign", integer, ((text,), lambda one: (_quantity(one).nano > 0) - (_quantity(one).nano < 0))),
        _function("isInteger", boolean, ((text,), lambda one: _quantity(one).is_whole)),
        _function("asInteger", integer, ((text,), _as_integer)),
        _function("asApproximateFloat", double, ((text,), lambda one: _quantity(one).nano / 1e9)),
        _function(
            "add",
            text,
            ((text, text), lambda one, other: mark_quantity(_quantity(one) + _quantity(other))),
            ((text, integer), lambda one, other: mark_quantity(_quantity(one) + Quantity.of(other))),
        ),
        _function(
            "sub",
            text,
            ((text, text), lambda one, other: mark_quantity(_quantity(one) - _quantity(other))),
            ((text, integer), lambda one, other: mark_quantity(_quantity(one) - Quantity.of(other))),
        ),
        _function("major", integer, ((text,), lambda one: _version(one).numbers[0])),
        _function("minor", integer, ((text,), lambda one: _version(one).numbers[1])),
        _function("patch", integer, ((text,), lambda one: _version(one).numbers[2])),
        _function(
            "includes",
            boolean,
            *(((kind, value), _includes) for value in (text, integer, boolean) for kind in (value, values)),
        ),
        _function("isSorted", boolean, ((values,), lambda one: all(_less_or_equal(a, b) for a, b in pairwise(one)))),
        _function("sum", dynamic, ((values,), _sum)),
        _function("min", dynamic, ((values,), lambda one: _extreme(one, is_max=False))),
        _function("max", dynamic, ((values,), lambda one: _extreme(one, is_max=True))),
        _function(
            "sets.contains", boolean, ((values, values), lambda one, other: all(_includes(one, part) for part in other)), is_member=False
        ),
        _function(
            "sets.intersects", boolean, ((values, values), lambda one, other: any(_includes(one, part) for part in other)), is_member=False
        ),
        _function(
            "sets.equivalent",
            boolean,
            (
                (values, values),
                lambda one, other: all(_includes(one, part) for part in other) and all(_includes(other, part) for part in one),
            ),
            is_member=False,
        ),
    ]


def plain_value(value: FactValue) -> object:
    """Give an attribute the form in which expressions see it."""
    if isinstance(value, Version):
        return _VERSION + value.text
    return [plain_value(one) for one in value] if isinstance(value, tuple) else value


def mark_quantity(one: Quantity) -> str:
    """Give a quantity the form in which expressions see it."""
    return f"{_QUANTITY}{one.nano}"


def _quantity(text: str) -> Quantity:
    if not text.startswith(_QUANTITY):
        raise ValueError(f"no such overload: {text!r} is no quantity")
    return Quantity(int(text[1:]))


def _version(text: str) -> SemanticVersion:
    if not text.startswith(_VERSION):
        raise ValueError(f"no such overload: {text!r} is no semantic version")
    return SemanticVersion.parse(text[1:])


def _compare(one: str, other: str) -> int:
    if one.startswith(_VERSION):
        left, right = _version(one), _version(other)
        return (left > right) - (left < right)
    first, second = _quantity(one), _quantity(other)
    return (first > second) - (first < second)


def _as_integer(one: str) -> int:
    found = _quantity(one)
    if not found.is_whole:
        raise ValueError(f"{found} is no whole number")
    return found.units


def _can(parse: Callable[[str], object]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            parse(text)
        except ValueError:
            return False
        return True

    return check


def _includes(values: object, wanted: object) -> bool:
    """Say whether an attribute is the value or has it in its list."""
    if isinstance(values, list):
        return any(type(one) is type(wanted) and one == wanted for one in values)
    return type(values) is type(wanted) and values == wanted


def _function(name: str, result: Any, *overloads: tuple[tuple[Any, ...], _Function], is_member: bool = True) -> cel.FunctionDecl:
    return cel.FunctionDecl(
        name,
        [
            cel.Overload(f"{name}_{index}", return_type=result, parameters=list(parameters), is_member=is_member, impl=implementation)
            for index, (parameters, implementation) in enumerate(overloads)
        ],
    )


def _less_or_equal(one: Any, other: Any) -> bool:
    if isinstance(one, bool) is not isinstance(other, bool) or isinstance(one, str) is not isinstance(other, str):
        raise ValueError("no such overload: the values of the list have different types")
    if isinstance(one, str) and one[:1] in (_QUANTITY, _VERSION):
        return _compare(one, other) <= 0
    return bool(one <= other)


def _sum(values: list[Any]) -> Any:
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
        raise ValueError("no such overload: wanted a list of numbers")
    return sum(values)


def _extreme(values: list[Any], *, is_max: bool) -> Any:
    if not values:
        raise ValueError("the list is empty")
    best = values[0]
    for one in values[1:]:
        if _less_or_equal(best, one) if is_max else not _less_or_equal(best, one):
            best = one
    return best
