"""Functions and types that Kubernetes adds: quantities, semantic versions, patterns, sets, list
attributes.

Source: k8s.io/apiserver/pkg/cel/library (quantity.go, semverlib.go, regex.go), cel-go/ext/sets.go,
k8s.io/dynamic-resource-allocation/cel, 1.36.
"""

from __future__ import annotations

from collections.abc import Callable

from topobus.engine.cel.errors import EvaluationError
from topobus.engine.cel.functions import patterns
from topobus.engine.cel.registry import Library, overload
from topobus.engine.cel.semantic_version import SemanticVersion
from topobus.engine.cel.values import compare, is_same, whole
from topobus.formats.kubernetes.limits import MAX_ATTRIBUTE_VALUES
from topobus.values.quantity import Quantity

__all__ = ["KUBERNETES"]


def _can(parse: Callable[..., object]) -> Callable[..., bool]:
    def check(*given: object) -> bool:
        try:
            parse(*given)
        except (ValueError, EvaluationError):
            return False
        return True

    return check


def _read_quantity(text: str) -> Quantity:
    try:
        return Quantity.parse(text)
    except ValueError as err:
        raise EvaluationError(f"quantity: {err}") from err


def _read_version(text: str, is_loose: bool = False) -> SemanticVersion:  # called with CEL's own arguments
    try:
        return SemanticVersion.parse(text, is_loose=is_loose)
    except ValueError as err:
        raise EvaluationError(f"semver: {err}") from err


def _quantities() -> Library:
    def as_integer(quantity: Quantity) -> int:
        if not quantity.is_integer:
            raise EvaluationError(f"cannot convert value to integer: {quantity}")
        return whole(quantity.units)

    return (
        overload("quantity(string) -> Quantity", _read_quantity),
        overload("isQuantity(string) -> bool", _can(_read_quantity)),
        overload("sign(Quantity) -> int", lambda a: (a.nano > 0) - (a.nano < 0)),
        overload("Quantity.isGreaterThan(Quantity) -> bool", lambda a, b: a > b),
        overload("Quantity.isLessThan(Quantity) -> bool", lambda a, b: a < b),
        overload("Quantity.compareTo(Quantity) -> int", compare),
        overload("Quantity.asApproximateFloat() -> double", lambda a: a.approximate()),
        overload("Quantity.asInteger() -> int", as_integer),
        overload("Quantity.isInteger() -> bool", lambda a: a.is_integer),
        overload("Quantity.add(Quantity) -> Quantity", lambda a, b: a + b),
        overload("Quantity.add(int) -> Quantity", lambda a, b: a + Quantity.of(b)),
        overload("Quantity.sub(Quantity) -> Quantity", lambda a, b: a - b),
        overload("Quantity.sub(int) -> Quantity", lambda a, b: a - Quantity.of(b)),
    )


def _versions() -> Library:
    return (
        overload("semver(string) -> Semver", _read_version),
        overload("semver(string, bool) -> Semver", _read_version),
        overload("isSemver(string) -> bool", _can(_read_version)),
        overload("isSemver(string, bool) -> bool", _can(_read_version)),
        overload("Semver.isGreaterThan(Semver) -> bool", lambda a, b: a > b),
        overload("Semver.isLessThan(Semver) -> bool", lambda a, b: a < b),
        overload("Semver.compareTo(Semver) -> int", compare),
        overload("Semver.major() -> int", lambda a: a.numbers[0]),
        overload("Semver.minor() -> int", lambda a: a.numbers[1]),
        overload("Semver.patch() -> int", lambda a: a.numbers[2]),
    )


def _sets() -> Library:
    def contains(first: list[object], second: list[object]) -> bool:
        return all(any(is_same(wanted, item) for item in first) for wanted in second)

    def intersects(first: list[object], second: list[object]) -> bool:
        return any(is_same(wanted, item) for item in first for wanted in second)

    return (
        overload("sets.contains(list<A>, list<A>) -> bool", contains),
        overload("sets.intersects(list<A>, list<A>) -> bool", intersects),
        overload("sets.equivalent(list<A>, list<A>) -> bool", lambda a, b: contains(a, b) and contains(b, a)),
    )


def _includes(values: object, wanted: object) -> bool:
    """Say whether an attribute is the value or has it in its list."""
    if not isinstance(values, list | tuple):
        return is_same(values, wanted)
    if len(values) > MAX_ATTRIBUTE_VALUES:
        raise EvaluationError(
            f"'includes' function cannot be applied to lists longer than {MAX_ATTRIBUTE_VALUES} values"
        )
    return any(is_same(value, wanted) for value in values)


_PATTERNS: Library = (
    overload("string.find(string) -> string", patterns.find),
    overload("string.findAll(string) -> list<string>", patterns.find_all),
    overload("string.findAll(string, int) -> list<string>", patterns.find_all),
)
_ATTRIBUTES: Library = (overload("dyn.includes(dyn) -> bool", _includes),)

KUBERNETES: Library = (*_quantities(), *_versions(), *_sets(), *_PATTERNS, *_ATTRIBUTES)
