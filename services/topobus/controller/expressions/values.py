"""Values while an expression is evaluated: what stands for each type, when two are equal, and which is less.

bool, int, str, bytes, float and None stand for themselves (an int has 64 bits), lists are tuples or lists, maps are dicts whose boolean keys are wrapped, for
Python takes `True` and `1` for one key. Everything else has a class of its own.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from topobus.controller.expressions.errors import EvaluationError
from topobus.controller.semver import SemanticVersion
from topobus.domain.quantity import Quantity

__all__ = [
    "Address",
    "Bound",
    "DomainMap",
    "Network",
    "OptionalValue",
    "TypeValue",
    "Uint",
    "WebAddress",
    "are_equal",
    "as_key",
    "compare",
    "from_key",
    "kind_of",
    "look_up",
    "no_such_overload",
    "register_kind",
    "size_of",
    "some",
    "whole",
]

_INT64 = 1 << 63


class Uint(int):
    """An unsigned number of 64 bits."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Bound:
    """A boolean as the key of a map."""

    value: bool


@dataclass(frozen=True, slots=True)
class OptionalValue:
    """A value that may be absent."""

    value: object = None
    is_present: bool = False


def some(value: object) -> OptionalValue:
    """Make an optional value that is there."""
    return OptionalValue(value, is_present=True)


@dataclass(frozen=True, slots=True)
class TypeValue:
    """A type as a value."""

    name: str


@dataclass(frozen=True, slots=True)
class WebAddress:
    """A URL, taken apart."""

    scheme: str
    host: str
    path: str
    query: str
    text: str


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Network:
    """An address with the length of its prefix; bits behind the prefix may be set."""

    address: Address
    length: int


class DomainMap(dict[object, object]):
    """A map in which whoever looks something up finds an empty map where there is nothing; `in` and `size` see only what is there."""

    __slots__ = ()


_KINDS: dict[type, str] = {
    bool: "bool",
    int: "int",
    Uint: "uint",
    float: "double",
    str: "string",
    bytes: "bytes",
    type(None): "null_type",
    list: "list",
    tuple: "list",
    dict: "map",
    DomainMap: "map",
    OptionalValue: "optional_type",
    TypeValue: "type",
    Quantity: "kubernetes.Quantity",
    SemanticVersion: "kubernetes.Semver",
    WebAddress: "kubernetes.URL",
    Network: "net.CIDR",
    ipaddress.IPv4Address: "net.IP",
    ipaddress.IPv6Address: "net.IP",
    datetime: "google.protobuf.Timestamp",
    timedelta: "google.protobuf.Duration",
}
_NUMBERS = frozenset(["int", "uint", "double"])


def kind_of(value: object) -> str:
    """Name the type of a value, without its parameters."""
    return _KINDS.get(type(value), "dyn")


def register_kind(kind: type, name: str) -> None:
    """Name the values of one more class; called once, where the class is defined."""
    _KINDS[kind] = name


def no_such_overload(function: str, *values: object) -> EvaluationError:
    """Say that a function does not take these values."""
    return EvaluationError(f"no such overload: {function}({', '.join(map(kind_of, values))})")


def whole(value: int, *, is_unsigned: bool = False) -> int:
    """Keep a number within 64 bits.

    Errors: raises EvaluationError on overflow.
    """
    if is_unsigned:
        if not 0 <= value < 2 * _INT64:
            raise EvaluationError("unsigned integer overflow")
        return Uint(value)
    if not -_INT64 <= value < _INT64:
        raise EvaluationError("integer overflow")
    return value


def as_key(value: object) -> object:
    """Give a value the form in which maps keep it."""
    if isinstance(value, bool):
        return Bound(value)
    if isinstance(value, int | str | float):
        return value
    raise EvaluationError(f"unsupported key type: {kind_of(value)}")


def from_key(key: object) -> object:
    """Undo `as_key`."""
    return key.value if isinstance(key, Bound) else key


def look_up(container: Mapping[object, object], key: object) -> object:
    """Find a key.

    Errors: raises EvaluationError when it is not there.
    """
    found = container.get(as_key(key), _MISSING)
    if found is _MISSING:
        if isinstance(container, DomainMap):
            return {}
        raise EvaluationError(f"no such key: {_show(key)}")
    return found


_MISSING = object()


def _show(key: object) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def size_of(value: object) -> int:
    """Count what `size()` counts; one for everything that has no size."""
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 1


def are_equal(one: object, other: object) -> bool:
    """Say whether two values are equal; those of different types are not, but for numbers of one value."""
    left, right = kind_of(one), kind_of(other)
    if left != right:
        return left in _NUMBERS and right in _NUMBERS and one == other
    if left == "list":
        return isinstance(one, list | tuple) and isinstance(other, list | tuple) and _equal_lists(one, other)
    if left == "map":
        return isinstance(one, dict) and isinstance(other, dict) and _equal_maps(one, other)
    if isinstance(one, OptionalValue) and isinstance(other, OptionalValue):
        return one.is_present == other.is_present and are_equal(one.value, other.value)
    return one == other


def _equal_lists(one: Iterable[object], other: Iterable[object]) -> bool:
    left, right = list(one), list(other)
    return len(left) == len(right) and all(map(are_equal, left, right))


def _equal_maps(one: dict[object, object], other: dict[object, object]) -> bool:
    return len(one) == len(other) and all(key in other and are_equal(value, other[key]) for key, value in one.items())


def compare(one: object, other: object) -> int:
    """Order two values of one type: -1, 0 or 1.

    Errors: raises EvaluationError for what has no order.
    """
    left, right = kind_of(one), kind_of(other)
    if left != right and not (left in _NUMBERS and right in _NUMBERS):
        raise no_such_overload("compare", one, other)
    match one, other:
        case (str() as a, str() as b):
            return (a > b) - (a < b)
        case (int() | float() as a, int() | float() as b):
            if math.isnan(a) or math.isnan(b):
                raise EvaluationError("NaN values cannot be ordered")
            return (a > b) - (a < b)
        case (bytes() as a, bytes() as b):
            return (a > b) - (a < b)
        case (datetime() as a, datetime() as b):
            return (a > b) - (a < b)
        case (timedelta() as a, timedelta() as b):
            return (a > b) - (a < b)
        case (Quantity() as a, Quantity() as b):
            return (a > b) - (a < b)
        case (SemanticVersion() as a, SemanticVersion() as b):
            return (a > b) - (a < b)
        case _:
            raise no_such_overload("compare", one, other)


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
