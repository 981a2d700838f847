"""The standard functions and operators: arithmetic, comparison, conversion, texts, containers, time, optional values.

`==`, `!=`, `&&`, `||`, `?:` and `has` are built into the evaluation. Source: cel-spec, langdef.md, "List of Standard Definitions"; cel-go cel/library.go
(optional types).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from topobus.controller.expressions import patterns
from topobus.controller.expressions.errors import EvaluationError
from topobus.controller.expressions.registry import Library, overload
from topobus.controller.expressions.values import (
    EPOCH,
    Address,
    Network,
    OptionalValue,
    TypeValue,
    Uint,
    are_equal,
    as_key,
    compare,
    from_key,
    kind_of,
    look_up,
    some,
    whole,
)

__all__ = ["STANDARD", "total_of_durations", "write"]

_INT64 = 1 << 63
_DOUBLE = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|inf|infinity|nan)", re.IGNORECASE)
_BOOLEANS = {
    "1": True,
    "t": True,
    "true": True,
    "TRUE": True,
    "True": True,
    "0": False,
    "f": False,
    "false": False,
    "FALSE": False,
    "False": False,
}
_DURATION = re.compile(r"([+-]?)((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:h|ms|us|µs|ns|m|s))+")
_DURATION_PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(h|ms|us|µs|ns|m|s)")
_MICROSECONDS = {
    "h": Decimal(3_600_000_000),
    "m": Decimal(60_000_000),
    "s": Decimal(1_000_000),
    "ms": Decimal(1000),
    "us": Decimal(1),
    "µs": Decimal(1),
    "ns": Decimal("0.001"),
}
# A duration is a number of nanoseconds in 64 bits.
_LONGEST = timedelta(microseconds=_INT64 // 1000)
_OFFSET = re.compile(r"([+-]?)([0-9]{2}):([0-9]{2})")


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
        overload("_+_(timestamp, duration) -> timestamp", lambda a, b: _moment(lambda: a + b)),
        overload("_+_(duration, timestamp) -> timestamp", lambda a, b: _moment(lambda: a + b)),
        overload("_+_(duration, duration) -> duration", lambda a, b: _span(lambda: a + b)),
        overload("_-_(timestamp, timestamp) -> duration", lambda a, b: _span(lambda: a - b)),
        overload("_-_(timestamp, duration) -> timestamp", lambda a, b: _moment(lambda: a - b)),
        overload("_-_(duration, duration) -> duration", lambda a, b: _span(lambda: a - b)),
        overload("!_(bool) -> bool", lambda a: not a),
    )


def _moment(work: Callable[[], object]) -> object:
    try:
        return work()
    except OverflowError as err:
        raise EvaluationError("time out of range") from err


def total_of_durations(durations: Iterable[timedelta]) -> timedelta:
    """Sum durations up.

    Errors: raises EvaluationError beyond 292 years.
    """
    return _span(lambda: sum(durations, timedelta()))


def _span(work: Callable[[], timedelta]) -> timedelta:
    try:
        found = work()
    except OverflowError as err:
        raise EvaluationError("duration out of range") from err
    if abs(found) > _LONGEST:
        raise EvaluationError("duration out of range")
    return found


def _comparison() -> Library:
    tests: dict[str, Callable[[int], bool]] = {
        "_<_": lambda order: order < 0,
        "_<=_": lambda order: order <= 0,
        "_>_": lambda order: order > 0,
        "_>=_": lambda order: order >= 0,
    }
    pairs = [(one, one) for one in ("bool", "int", "uint", "double", "string", "bytes", "timestamp", "duration")]
    pairs += [(one, other) for one in ("int", "uint", "double") for other in ("int", "uint", "double") if one != other]

    def make(test: Callable[[int], bool]) -> Callable[[object, object], bool]:
        def work(a: object, b: object) -> bool:
            if (isinstance(a, float) and math.isnan(a)) or (isinstance(b, float) and math.isnan(b)):
                return False
            return test(compare(a, b))

        return work

    return tuple(overload(f"{name}({one}, {other}) -> bool", make(test)) for name, test in tests.items() for one, other in pairs)


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
        try:
            found = float(text)
        except ValueError as err:
            raise EvaluationError(f"type conversion error from 'string' to 'double': {text[:64]!r}") from err
        # Python's reading is wider than Go's: blanks and underscores; and what is too large is no infinity.
        if not _DOUBLE.fullmatch(text) or (math.isinf(found) and text[-1].isdigit()):
            raise EvaluationError(f"type conversion error from 'string' to 'double': {text[:64]!r}")
        return found

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
        overload("int(timestamp) -> int", lambda a: int((a - EPOCH).total_seconds() // 1)),
        overload("int(duration) -> int", lambda a: (a // timedelta(microseconds=1)) * 1000),
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
            overload(f"string({one}) -> string", write)
            for one in ("string", "int", "uint", "double", "bool", "timestamp", "duration", "IP", "CIDR")
        ),
        overload("string(bytes) -> string", decode),
        overload("bytes(bytes) -> bytes", lambda a: a),
        overload("bytes(string) -> bytes", lambda a: a.encode()),
        overload("dyn(A) -> dyn", lambda a: a),
        overload("type(A) -> type<A>", lambda a: TypeValue(kind_of(a))),
        overload("duration(string) -> duration", _read_duration),
        overload("duration(duration) -> duration", lambda a: a),
        overload("timestamp(string) -> timestamp", _read_timestamp),
        overload("timestamp(int) -> timestamp", lambda a: _moment(lambda: EPOCH + timedelta(seconds=a))),
        overload("timestamp(timestamp) -> timestamp", lambda a: a),
    )


def write(value: object) -> str:
    """Write a value as `string()` does."""
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return _write_double(value)
        case datetime():
            moment = value.astimezone(UTC)
            part = f".{moment.microsecond:06}".rstrip("0") if moment.microsecond else ""
            return f"{moment.year:04}-{moment:%m-%dT%H:%M:%S}{part}Z"
        case timedelta():
            seconds = f"{Decimal(value // timedelta(microseconds=1)) / 1_000_000:f}"
            return f"{seconds.rstrip('0').rstrip('.') if '.' in seconds else seconds}s"
        case Network():
            return f"{_address(value.address)}/{value.length}"
        case _:
            return str(int(value)) if isinstance(value, int) else str(value)


def _address(one: Address) -> str:
    return str(one)


def _write_double(value: float) -> str:
    """Write as Go's %g does: the fewest digits that tell it apart, with an exponent from 1e6 on and below 1e-4."""
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


def _read_duration(text: str) -> timedelta:
    if text in ("0", "+0", "-0"):
        return timedelta(0)
    if not _DURATION.fullmatch(text):
        raise EvaluationError(f"invalid duration: {text[:64]!r}")
    amount = sum(Decimal(number) * _MICROSECONDS[unit] for number, unit in _DURATION_PART.findall(text))
    return _span(lambda: timedelta(microseconds=int(-amount if text[0] == "-" else amount)))


def _read_timestamp(text: str) -> datetime:
    if not re.fullmatch(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", text, re.ASCII):
        raise EvaluationError(f"invalid timestamp: {text[:64]!r}")
    try:
        return datetime.fromisoformat(text.upper()).astimezone(UTC)
    except (ValueError, OverflowError) as err:
        raise EvaluationError(f"invalid timestamp: {text[:64]!r}") from err


def _texts_and_containers() -> Library:
    def within(value: object, values: list[object]) -> bool:
        return any(are_equal(value, one) for one in values)

    def has_key(key: object, container: dict[object, object]) -> bool:
        return as_key(key) in container

    def index(values: list[object], place: float) -> object:
        if place != int(place) or not 0 <= place < len(values):
            raise EvaluationError(f"index out of bounds: {write(place)}")
        return values[int(place)]

    def insert(container: dict[object, object], key: object, value: object) -> dict[object, object]:
        # The map is the macro's own, which nobody else has yet.
        if as_key(key) in container:
            raise EvaluationError(f"insert failed: key {key} already exists")
        container[as_key(key)] = value
        return container

    def merge(container: dict[object, object], entry: dict[object, object]) -> dict[object, object]:
        for key, value in entry.items():
            insert(container, from_key(key), value)
        return container

    return (
        overload("size(string) -> int", len),
        overload("size(bytes) -> int", len),
        overload("size(list<A>) -> int", len),
        overload("size(map<K, V>) -> int", len),
        overload("string.size() -> int", len),
        overload("bytes.size() -> int", len),
        overload("list<A>.size() -> int", len),
        overload("map<K, V>.size() -> int", len),
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


def _optionals() -> Library:
    def of_non_zero(value: object) -> OptionalValue:
        is_zero = value is None or value is False or (isinstance(value, int | float) and value == 0) or value in ("", b"", [], (), {})
        return OptionalValue() if is_zero else some(value)

    def value(one: OptionalValue) -> object:
        if not one.is_present:
            raise EvaluationError("optional.none() dereference")
        return one.value

    def present(values: list[OptionalValue]) -> list[object]:
        return [one.value for one in values if one.is_present]

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
        overload("list<A>.first() -> optional<A>", edge(0)),
        overload("list<A>.last() -> optional<A>", edge(-1)),
    )


def _times() -> Library:
    parts: dict[str, Callable[[datetime], int]] = {
        "getFullYear": lambda a: a.year,
        "getMonth": lambda a: a.month - 1,
        "getDate": lambda a: a.day,
        "getDayOfMonth": lambda a: a.day - 1,
        "getDayOfWeek": lambda a: a.isoweekday() % 7,
        "getDayOfYear": lambda a: a.timetuple().tm_yday - 1,
        "getHours": lambda a: a.hour,
        "getMinutes": lambda a: a.minute,
        "getSeconds": lambda a: a.second,
        "getMilliseconds": lambda a: a.microsecond // 1000,
    }
    spans: dict[str, Callable[[timedelta], int]] = {
        "getHours": lambda a: int(a.total_seconds() / 3600),
        "getMinutes": lambda a: int(a.total_seconds() / 60),
        "getSeconds": lambda a: int(a.total_seconds()),
        "getMilliseconds": lambda a: int(a.total_seconds() * 1000),
    }

    def there(part: Callable[[datetime], int]) -> Callable[[datetime, str], int]:
        return lambda moment, zone: part(_in_zone(moment, zone))

    return (
        *(overload(f"timestamp.{name}() -> int", part) for name, part in parts.items()),
        *(overload(f"timestamp.{name}(string) -> int", there(part)) for name, part in parts.items()),
        *(overload(f"duration.{name}() -> int", part) for name, part in spans.items()),
    )


def _shifted(moment: datetime, by: timedelta) -> datetime:
    try:
        return moment + by
    except OverflowError as err:
        raise EvaluationError("time out of range") from err


def _in_zone(moment: datetime, zone: str) -> datetime:
    offset = _OFFSET.fullmatch(zone)
    if offset is not None:
        shift = timedelta(hours=int(offset[2]), minutes=int(offset[3]))
        return _shifted(moment, -shift if offset[1] == "-" else shift)
    try:
        return moment.astimezone(ZoneInfo(zone or "UTC"))
    except OverflowError as err:
        raise EvaluationError("time out of range") from err
    except (ZoneInfoNotFoundError, ValueError, OSError) as err:
        raise EvaluationError(f"unknown time zone {zone[:64]!r}") from err


STANDARD: Library = (*_arithmetic(), *_comparison(), *_convert(), *_texts_and_containers(), *_optionals(), *_times())
