"""The values of an evaluation: the Python type of each CEL type, equality and order.

bool, int, str, bytes, float and None represent themselves (an int has 64 bits), lists are tuples or
lists, maps are dicts whose boolean keys are wrapped, because Python takes `True` and `1` for one
key. Every other type has a class of its own.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from topobus.engine.cel.errors import EvaluationError
from topobus.engine.cel.semantic_version import SemanticVersion
from topobus.values.quantity import Quantity

__all__ = [
    "OPAQUE",
    "Address",
    "Bound",
    "DomainMap",
    "Duration",
    "Network",
    "OptionalValue",
    "TextMap",
    "Timestamp",
    "TypeValue",
    "Uint",
    "WebAddress",
    "are_equal",
    "as_key",
    "compare",
    "from_key",
    "is_key_of",
    "is_same",
    "keys_of",
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
    """Make an optional value that is present."""
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


@dataclass(frozen=True, slots=True, order=True)
class Duration:
    """A span of time, in nanoseconds of 64 bits."""

    nanoseconds: int


@dataclass(frozen=True, slots=True, order=True)
class Timestamp:
    """A moment, in nanoseconds since 1970 (UTC), in the years 1 to 9999.

    It is written in the zone in which it was read.
    """

    nanoseconds: int
    offset_minutes: int = field(default=0, compare=False)


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Network:
    """An address with the length of its prefix. Bits behind the prefix may be set."""

    address: Address
    length: int


class TextMap(dict[object, object]):
    """A map of names, as a device has them: only a text can be a key."""

    __slots__ = ()


class DomainMap(TextMap):
    """A map in which a look-up of an absent key finds an empty map. `in` and `size` see only the
    keys that are present.
    """

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
    TextMap: "map",
    DomainMap: "map",
    OptionalValue: "optional_type",
    TypeValue: "type",
    Quantity: "kubernetes.Quantity",
    SemanticVersion: "kubernetes.Semver",
    WebAddress: "kubernetes.URL",
    Network: "net.CIDR",
    ipaddress.IPv4Address: "net.IP",
    ipaddress.IPv6Address: "net.IP",
    Timestamp: "google.protobuf.Timestamp",
    Duration: "google.protobuf.Duration",
}
_NUMBERS = frozenset(["int", "uint", "double"])
_PLAIN = frozenset(["bool", "int", "uint", "double", "string"])
OPAQUE = frozenset(
    ["kubernetes.Quantity", "kubernetes.Semver", "kubernetes.URL", "kubernetes.NamedFormat", "net.IP", "net.CIDR"]
)


def kind_of(value: object) -> str:
    """Name the type of a value, without its parameters."""
    return _KINDS.get(type(value), "dyn")


def register_kind(kind: type, name: str) -> None:
    """Register the type name of a class. Called once, where the class is defined."""
    _KINDS[kind] = name


def no_such_overload(function: str, *values: object) -> EvaluationError:
    """Make the error that a function does not take these values."""
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
    """Convert a value to the form in which maps keep it.

    Errors: raises EvaluationError for a type that cannot be a key.
    """
    if isinstance(value, bool):
        return Bound(value)
    if value is None or isinstance(value, int | str | float):
        return value
    raise EvaluationError(f"unsupported key type: {kind_of(value)}")


def from_key(key: object) -> object:
    """Undo `as_key`."""
    return key.value if isinstance(key, Bound) else key


def look_up(container: Mapping[object, object], key: object) -> object:
    """Find a key.

    Errors: raises EvaluationError when it is not there.
    """
    value = container.get(as_key(key), _MISSING)
    if value is _MISSING:
        if isinstance(container, DomainMap):
            return {}
        raise EvaluationError(f"no such key: {_show(key)}")
    return value


_MISSING = object()


def _show(key: object) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def size_of(value: object) -> int:
    """Return what `size()` returns, or 1 for a value that has no size."""
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 1


def are_equal(first: object, second: object) -> bool:
    """Say whether two values are equal.

    Values of different types are not, except numbers of one value.

    Errors: raises EvaluationError when the first is of a type of Kubernetes' own and the second is
            not of that type (null apart), as upstream does.
    """
    left, right = kind_of(first), kind_of(second)
    if left != right:
        if left in _NUMBERS and right in _NUMBERS:
            return _equal_numbers(first, second)
        if left in OPAQUE and second is not None:
            raise EvaluationError("no such overload")
        return False
    if left == "list":
        return isinstance(first, list | tuple) and isinstance(second, list | tuple) and _equal_lists(first, second)
    if left == "map":
        return isinstance(first, dict) and isinstance(second, dict) and _equal_maps(first, second)
    if isinstance(first, OptionalValue) and isinstance(second, OptionalValue):
        return first.is_present == second.is_present and (not first.is_present or are_equal(first.value, second.value))
    return first == second


def is_same(first: object, second: object) -> bool:
    """Say whether two values are equal where an error counts as no: for `!=`, and for a look-up in
    a list.
    """
    try:
        return are_equal(first, second)
    except EvaluationError:
        return False


def _equal_numbers(first: object, second: object) -> bool:
    try:
        return compare(first, second) == 0
    except EvaluationError:
        return False  # not a number


def _maybe_equal(first: object, second: object) -> bool:
    """Compare the parts of two lists or maps: upstream treats parts that cannot be compared as
    equal.
    """
    try:
        return are_equal(first, second)
    except EvaluationError:
        return True


def _equal_lists(first: list[object] | tuple[object, ...], second: list[object] | tuple[object, ...]) -> bool:
    return len(first) == len(second) and all(map(_maybe_equal, first, second))


def _equal_maps(first: dict[object, object], second: dict[object, object]) -> bool:
    return len(first) == len(second) and all(
        key in second and _maybe_equal(value, second[key]) for key, value in first.items()
    )


def keys_of(values: Iterable[object]) -> frozenset[tuple[str, object]] | None:
    """List the values of a list of plain values, with each number in all types that hold it without
    loss.

    None when a value is not plain.
    """
    keys: set[tuple[str, object]] = set()
    for value in values:
        kind = kind_of(value)
        if kind not in _PLAIN:
            return None
        if not isinstance(value, float) or not math.isnan(value):
            keys.add((kind, value))
        if isinstance(value, int) and kind != "bool":
            keys.add(("double", float(value)))
        whole_number = (
            int(value)
            if isinstance(value, int | float) and kind != "bool" and math.isfinite(value) and value == int(value)
            else None
        )
        if whole_number is not None and -_INT64 <= whole_number < _INT64:
            keys.add(("int", whole_number))
        if whole_number is not None and 0 <= whole_number < 2 * _INT64:
            keys.add(("uint", whole_number))
    return frozenset(keys)


def is_key_of(value: object, keys: frozenset[tuple[str, object]]) -> bool:
    """Say whether a value is in a set made by `keys_of`.

    Errors: raises EvaluationError for bytes and versions, which upstream cannot look up.
    """
    kind = kind_of(value)
    if kind in ("bytes", "kubernetes.Semver"):
        raise EvaluationError(f"internal error: hash of unhashable type {kind}")
    return kind in _PLAIN and (kind, value) in keys


def compare(first: object, second: object) -> int:
    """Order two values of one type: -1, 0 or 1.

    Errors: raises EvaluationError for values without an order.
    """
    left, right = kind_of(first), kind_of(second)
    if left != right and not (left in _NUMBERS and right in _NUMBERS):
        raise no_such_overload("compare", first, second)
    match first, second:
        case (str() as a, str() as b):
            return (a > b) - (a < b)
        case (float() | int() as a, float() as b) | (float() as a, int() as b):
            return _compare_doubles(a, b)
        case (int() as a, int() as b):
            return (a > b) - (a < b)
        case (bytes() as a, bytes() as b):
            return (a > b) - (a < b)
        case (Timestamp() as a, Timestamp() as b):
            return (a > b) - (a < b)
        case (Duration() as a, Duration() as b):
            return (a > b) - (a < b)
        case (Quantity() as a, Quantity() as b):
            return (a > b) - (a < b)
        case (SemanticVersion() as a, SemanticVersion() as b):
            return (a > b) - (a < b)
        case _:
            raise no_such_overload("compare", first, second)


def _compare_doubles(first: float, second: float) -> int:
    """Order two numbers one of which is a double: as doubles, whatever a whole number loses.

    Beyond the range of its type a double is less or more.
    """
    if math.isnan(first) or math.isnan(second):
        raise EvaluationError("NaN values cannot be ordered")
    if isinstance(second, int):
        return _against_whole(first, second)
    if isinstance(first, int):
        return -_against_whole(second, first)
    return (first > second) - (first < second)


def _against_whole(double: float, number: int) -> int:
    least, most = (0.0, float(2 * _INT64)) if isinstance(number, Uint) else (float(-_INT64), float(_INT64))
    if double < least or double > most:
        return -1 if double < least else 1
    return (double > float(number)) - (double < float(number))
