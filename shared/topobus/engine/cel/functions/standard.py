"""The standard functions and operators: arithmetic, comparison, conversion, texts, containers,
time, optional values.

`==`, `!=`, `&&`, `||`, `?:` and `has` are built into the evaluation. Source: cel-spec, langdef.md,
"List of Standard Definitions"; cel-go cel/library.go (optional types).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal

from topobus.engine.cel.errors import EvaluationError
from topobus.engine.cel.functions import patterns
from topobus.engine.cel.functions.times import TIMES, write_duration, write_timestamp
from topobus.engine.cel.registry import Library, overload
from topobus.engine.cel.values import (
    Address,
    Duration,
    Network,
    OptionalValue,
    TextMap,
    Timestamp,
    TypeValue,
    Uint,
    as_key,
    compare,
    from_key,
    is_same,
    kind_of,
    look_up,
    some,
    whole,
)
from topobus.values.errors import InvariantError

__all__ = ["STANDARD", "write"]

_INT64 = 1 << 63
_DECIMAL_DIGITS, _HEXADECIMAL_DIGITS = "[0-9](?:_?[0-9])*", "[0-9a-f](?:_?[0-9a-f])*"
_DOUBLE = re.compile(
    rf"[+-]?(?:(?:{_DECIMAL_DIGITS}\.?(?:{_DECIMAL_DIGITS})?|\.{_DECIMAL_DIGITS})(?:e[+-]?{_DECIMAL_DIGITS})?"
    rf"|0x_?(?:{_HEXADECIMAL_DIGITS}\.?(?:{_HEXADECIMAL_DIGITS})?|\.{_HEXADECIMAL_DIGITS})p[+-]?{_DECIMAL_DIGITS}|inf|infinity|nan)",
    re.IGNORECASE | re.ASCII,
)
_BOOLEANS = {
    "1": True,
    "t": True,
    "T": True,
    "true": True,
    "TRUE": True,
    "True": True,
    "0": False,
    "f": False,
    "F": False,
    "false": False,
    "FALSE": False,
    "False": False,
}


def _arithmetic() -> Library:
    def divide(a: int, b: int) -> int:
        if b == 0:
            raise EvaluationError("division by zero")
        quotient = abs(a) // abs(b)
        return quotient if (a < 0) == (b < 0) else -quotient

    def remainder(a: int, b: int) -> int:
        if b == 0:
            raise EvaluationError("modulus by zero")
        if b == -1:
            whole(-a)  # as Go: the smallest number has no opposite
        return int(math.fmod(a, b)) if max(abs(a), abs(b)) < 1 << 50 else (abs(a) % abs(b)) * (-1 if a < 0 else 1)

    def floating(a: float, b: float) -> float:
        if b == 0:
            return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)
        return a / b

    numbers: dict[str, Callable[[int, int], int]] = {
        "_+_": lambda a, b: a + b,
        "_-_": lambda a, b: a - b,
        "_*_": lambda a, b: a * b,
        "_/_": divide,
        "_%_": remainder,
    }
    doubles: dict[str, Callable[[float, float], float]] = {
        "_+_": lambda a, b: a + b,
        "_-_": lambda a, b: a - b,
        "_*_": lambda a, b: a * b,
        "_/_": floating,
    }

    def signed(work: Callable[[int, int], int]) -> Callable[[int, int], int]:
        return lambda a, b: whole(work(a, b))

    def unsigned(work: Callable[[int, int], int]) -> Callable[[int, int], int]:
        return lambda a, b: whole(work(int(a), int(b)), is_unsigned=True)

    return (
        *(overload(f"{name}(int, int) -> int", signed(work)) for name, work in numbers.items()),
        *(overload(f"{name}(uint, uint) -> uint", unsigned(work)) for name, work in numbers.items()),
        *(overload(f"{name}(double, double) -> double", work) for name, work in doubles.items()),
        overload("-_(int) -> int", lambda a: whole(-a)),
        overload("-_(double) -> double", lambda a: -a),
        overload("_+_(string, string) -> string", lambda a, b: a + b),
        overload("_+_(bytes, bytes) -> bytes", lambda a, b: a + b),
        overload("_+_(list<A>, list<A>) -> list<A>", lambda a, b: [*a, *b]),
        overload("!_(bool) -> bool", lambda a: not a),
    )


def _comparison() -> Library:
    tests: dict[str, Callable[[int], bool]] = {
        "_<_": lambda order: order < 0,
        "_<=_": lambda order: order <= 0,
        "_>_": lambda order: order > 0,
        "_>=_": lambda order: order >= 0,
    }
    numbers = {"int": ("int", "double", "uint"), "uint": ("uint", "double", "int"), "double": ("double", "int", "uint")}
    pairs = [("bool", "bool"), *((name, other) for name, others in numbers.items() for other in others)]
    pairs += [(name, name) for name in ("string", "bytes", "timestamp", "duration")]

    def make(test: Callable[[int], bool]) -> Callable[[object, object], bool]:
        def work(a: object, b: object) -> bool:
            return test(compare(a, b))

        return work

    return tuple(
        overload(f"{name}({first}, {second}) -> bool", make(test))
        for name, test in tests.items()
        for first, second in pairs
    )


def _convert() -> Library:
    def to_int(value: float) -> int:
        if math.isnan(value) or not -_INT64 < value < _INT64:
            raise EvaluationError("integer overflow")
        return int(value)

    def to_uint(value: float) -> int:
        if math.isnan(value) or not 0 <= value < 2 * _INT64:
            raise EvaluationError("unsigned integer overflow")
        return Uint(int(value))

    def read_int(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text) or len(text.lstrip("+-0")) > 20:
            raise EvaluationError(f"type conversion error from 'string' to 'int': {text[:64]!r}")
        return whole(int(text))

    def read_uint(text: str) -> int:
        if not re.fullmatch(r"[0-9]+", text) or len(text.lstrip("0")) > 20:
            raise EvaluationError(f"type conversion error from 'string' to 'uint': {text[:64]!r}")
        return whole(int(text), is_unsigned=True)

    def read_double(text: str) -> float:
        # Python's reading is wider than Go's; and what is too large is no infinity.
        if not _DOUBLE.fullmatch(text):
            raise EvaluationError(f"type conversion error from 'string' to 'double': {text[:64]!r}")
        digits = text.replace("_", "")
        try:
            number = float.fromhex(digits) if "x" in digits or "X" in digits else float(digits)
        except OverflowError:
            number = math.inf
        if math.isinf(number) and "n" not in digits.lower():
            raise EvaluationError(f"type conversion error from 'string' to 'double': {text[:64]!r}")
        return number

    def read_bool(text: str) -> bool:
        if text not in _BOOLEANS:
            raise EvaluationError(f"type conversion error from 'string' to 'bool': {text[:64]!r}")
        return _BOOLEANS[text]

    def decode(value: bytes) -> str:
        try:
            return value.decode()
        except UnicodeDecodeError as err:
            raise EvaluationError("invalid UTF-8 in bytes, cannot convert to string") from err

    return (
        overload("int(int) -> int", lambda a: a),
        overload("int(uint) -> int", lambda a: whole(int(a))),
        overload("int(double) -> int", to_int),
        overload("int(string) -> int", read_int),
        overload("uint(uint) -> uint", lambda a: a),
        overload("uint(int) -> uint", lambda a: whole(a, is_unsigned=True)),
        overload("uint(double) -> uint", to_uint),
        overload("uint(string) -> uint", read_uint),
        overload("double(double) -> double", lambda a: a),
        overload("double(int) -> double", float),
        overload("double(uint) -> double", float),
        overload("double(string) -> double", read_double),
        overload("bool(bool) -> bool", lambda a: a),
        overload("bool(string) -> bool", read_bool),
        *(
            overload(f"string({cel_type}) -> string", write)
            for cel_type in ("string", "int", "uint", "double", "bool", "timestamp", "duration", "IP", "CIDR")
        ),
        overload("string(bytes) -> string", decode),
        overload("bytes(bytes) -> bytes", lambda a: a),
        overload("bytes(string) -> bytes", lambda a: a.encode()),
        overload("dyn(A) -> dyn", lambda a: a),
        overload("type(A) -> type<A>", lambda a: TypeValue(kind_of(a))),
    )


def write(value: object) -> str:
    """Write a value as `string()` does."""
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return _write_double(value)
        case Timestamp():
            return write_timestamp(value)
        case Duration():
            return write_duration(value)
        case Network():
            return f"{_address(value.address)}/{value.length}"
        case _:
            return str(int(value)) if isinstance(value, int) else str(value)


def _address(address: Address) -> str:
    return str(address)


def _write_double(value: float) -> str:
    """Write as Go's %g does: the fewest digits that identify the number, with an exponent from 1e6
    on and below 1e-4.
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if not value:
        return "0" if math.copysign(1, value) > 0 else "-0"
    digits, _, power = f"{Decimal(repr(value)).normalize():e}".partition("e")
    exponent = int(power)
    if -4 <= exponent < 6:
        return f"{Decimal(repr(value)).normalize():f}"
    return f"{digits}e{'-' if exponent < 0 else '+'}{abs(exponent):02}"


def _texts_and_containers() -> Library:
    def within(value: object, values: list[object]) -> bool:
        return any(is_same(value, other_value) for other_value in values)

    def has_key(key: object, container: dict[object, object]) -> bool:
        kind = kind_of(key)
        if kind in ("bytes", "kubernetes.Semver") and not isinstance(container, TextMap):
            raise EvaluationError(f"internal error: hash of unhashable type {kind}")
        return (key is None or isinstance(key, bool | int | float | str)) and as_key(key) in container

    def index(values: list[object], place: float) -> object:
        if place != int(place) or not 0 <= place < len(values):
            raise EvaluationError(f"index out of bounds: {write(place)}")
        return values[int(place)]

    def insert(container: dict[object, object], key: object, value: object) -> dict[object, object]:
        # The map belongs to the macro and is not visible elsewhere yet.
        if as_key(key) in container:
            raise EvaluationError(f"insert failed: key {key} already exists")
        container[as_key(key)] = value
        return container

    def merge(container: dict[object, object], entry: dict[object, object]) -> dict[object, object]:
        for key, value in entry.items():
            insert(container, from_key(key), value)
        return container

    return (
        *(overload(f"size({cel_type}) -> int", len) for cel_type in ("bytes", "list<A>", "map<K, V>", "string")),
        *(overload(f"{cel_type}.size() -> int", len) for cel_type in ("bytes", "list<A>", "map<K, V>", "string")),
        overload("string.contains(string) -> bool", lambda a, b: b in a),
        overload("string.startsWith(string) -> bool", lambda a, b: a.startswith(b)),
        overload("string.endsWith(string) -> bool", lambda a, b: a.endswith(b)),
        overload("string.matches(string) -> bool", patterns.is_found),
        overload("matches(string, string) -> bool", patterns.is_found),
        overload("@in(A, list<A>) -> bool", within),
        overload("@in(K, map<K, V>) -> bool", has_key),
        overload("_[_](list<A>, int) -> A", index),
        overload("_[_](map<K, V>, K) -> V", look_up),
        overload("cel.@mapInsert(map<K, V>, K, V) -> map<K, V>", insert),
        overload("cel.@mapInsert(map<K, V>, map<K, V>) -> map<K, V>", merge),
    )


# Go's own zero of a time is the first moment of the year 1.
_YEAR_ONE = -62_135_596_800 * 1_000_000_000


def _built_in(*_: object) -> object:
    raise InvariantError("indices of optional values are built into the evaluation")


def _optionals() -> Library:
    def of_non_zero(value: object) -> OptionalValue:
        is_zero = (
            value == Duration(0)
            or value == Timestamp(_YEAR_ONE)
            or value is None
            or value is False
            or (isinstance(value, int | float) and value == 0)
            or value in ("", b"", [], (), {})
        )
        return OptionalValue() if is_zero else some(value)

    def value(optional_value: OptionalValue) -> object:
        if not optional_value.is_present:
            raise EvaluationError("optional.none() dereference")
        return optional_value.value

    def present(values: list[OptionalValue]) -> list[object]:
        return [optional_value.value for optional_value in values if optional_value.is_present]

    def edge(place: int) -> Callable[[list[object]], OptionalValue]:
        return lambda values: some(values[place]) if values else OptionalValue()

    return (
        overload("optional.of(V) -> optional<V>", lambda a: some(a)),
        overload("optional.ofNonZeroValue(V) -> optional<V>", of_non_zero),
        overload("optional.none() -> optional<V>", OptionalValue),
        overload("optional.unwrap(list<optional<V>>) -> list<V>", present),
        overload("list<optional<V>>.unwrapOpt() -> list<V>", present),
        overload("optional<V>.value() -> V", value),
        overload("optional<V>.hasValue() -> bool", lambda a: a.is_present),
        overload("optional<V>.or(optional<V>) -> optional<V>", lambda a, b: a if a.is_present else b),
        overload("optional<V>.orValue(V) -> V", lambda a, b: a.value if a.is_present else b),
        *(
            overload(f"_[?_]({container}, {key}) -> optional<V>", _built_in)
            for container, key in (
                ("list<V>", "int"),
                ("optional<list<V>>", "int"),
                ("map<K, V>", "K"),
                ("optional<map<K, V>>", "K"),
            )
        ),
        *(
            overload(f"_[_]({container}, {key}) -> optional<V>", _built_in)
            for container, key in (("optional<list<V>>", "int"), ("optional<map<K, V>>", "K"))
        ),
        overload("list<A>.first() -> optional<A>", edge(0)),
        overload("list<A>.last() -> optional<A>", edge(-1)),
    )


STANDARD: Library = (*_arithmetic(), *_comparison(), *_convert(), *_texts_and_containers(), *_optionals(), *TIMES)
