"""Durations and timestamps in nanoseconds: parsing, formatting, arithmetic and accessors.

Source: cel-go common/types/duration.go, timestamp.go and overflow.go; Go's time.ParseDuration and
time.Parse(RFC3339).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from topobus.engine.cel.errors import EvaluationError
from topobus.engine.cel.registry import Library, overload
from topobus.engine.cel.values import Duration, Timestamp

__all__ = ["TIMES", "total_of_durations", "write_duration", "write_timestamp"]

_INT64 = 1 << 63
_SECOND = 1_000_000_000
_DURATION = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:h|ms|us|µs|μs|ns|m|s))+")
_DURATION_PART = re.compile(r"([0-9]*)(?:\.([0-9]*))?(h|ms|us|µs|μs|ns|m|s)")
_UNITS = {
    "h": 3600 * _SECOND,
    "m": 60 * _SECOND,
    "s": _SECOND,
    "ms": 1_000_000,
    "us": 1000,
    "µs": 1000,
    "μs": 1000,
    "ns": 1,
}
# More digits than 64 bits hold are zeros before or nothing behind the point.
_MOST_DIGITS = 18
# Go also accepts a comma; hours may have one digit.
_TIMESTAMP = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})T([0-9]{1,2}):([0-9]{2}):([0-9]{2})(?:[.,]([0-9]+))?(?:Z|([+-])([0-9]{2}):([0-9]{2}))"
)
_MOST_OFFSET_HOURS, _MOST_OFFSET_MINUTES = 24, 60
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST = -62_135_596_800 * _SECOND
_LAST = 253_402_300_800 * _SECOND - 1
_OFFSET = re.compile(r"([+-]?[0-9]{1,9}):([+-]?[0-9]{1,9})")
_HERE = frozenset(["", "Local"])
"""Names of no zone; a scheduler's own zone is not known, and in its container it is UTC."""


def _moment(nanoseconds: int, offset_minutes: int = 0) -> Timestamp:
    if not _FIRST <= nanoseconds <= _LAST:
        raise EvaluationError("timestamp overflow")
    return Timestamp(nanoseconds, offset_minutes)


def _span(nanoseconds: int) -> Duration:
    if not -_INT64 <= nanoseconds < _INT64:
        raise EvaluationError("integer overflow")
    return Duration(nanoseconds)


def total_of_durations(durations: Iterable[Duration]) -> Duration:
    """Sum durations.

    Errors: raises EvaluationError beyond 292 years.
    """
    return _span(sum(duration.nanoseconds for duration in durations))


def write_duration(duration: Duration) -> str:
    """Write a duration in seconds, as a double has them: `1.5s`."""
    whole, rest = divmod(abs(duration.nanoseconds), _SECOND)
    seconds = float(whole) + rest / _SECOND
    return f"{'-' if duration.nanoseconds < 0 else ''}{_plain(seconds)}s"


def _plain(number: float) -> str:
    written = f"{Decimal(repr(number)):f}"
    return written.rstrip("0").rstrip(".") if "." in written else written


def write_timestamp(timestamp: Timestamp) -> str:
    """Write a timestamp as RFC 3339 in the zone in which it was read.

    A fraction has no zeros at its end.
    """
    seconds, rest = divmod(timestamp.nanoseconds, _SECOND)
    # Days and seconds are shifted apart, because a shift takes the first and last moments out of
    # the years that datetime can represent.
    days, second = divmod(seconds + timestamp.offset_minutes * 60, 86_400)
    year, month, day = _date(days)
    fraction = f".{rest:09}".rstrip("0") if rest else ""
    offset = timestamp.offset_minutes
    zone = f"{'-' if offset < 0 else '+'}{abs(offset) // 60:02}:{abs(offset) % 60:02}" if offset else "Z"
    return f"{year:04}-{month:02}-{day:02}T{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}{fraction}{zone}"


def _date(days: int) -> tuple[int, int, int]:
    """Return the date so many days after 1970-01-01.

    The last day of the year 0 and the first of 10000 also have one.
    """
    cycles = 400 * ((days < -719_162) - (days >= 2_932_897))
    date = _EPOCH + timedelta(days=days + (146_097 if cycles > 0 else -146_097 if cycles < 0 else 0))
    return date.year - cycles, date.month, date.day


def _read_duration(text: str) -> Duration:
    if text in ("0", "+0", "-0"):
        return Duration(0)
    if not _DURATION.fullmatch(text):
        raise EvaluationError(f"invalid duration: {text[:64]!r}")
    total = 0
    for whole, fraction, unit in _DURATION_PART.findall(text):
        digits = fraction[:_MOST_DIGITS]
        significant = whole.lstrip("0") or "0"
        if len(significant) > _MOST_DIGITS + 1:
            raise EvaluationError(f"invalid duration: {text[:64]!r}")
        total += int(significant) * _UNITS[unit] + (int(digits) * _UNITS[unit] // 10 ** len(digits) if digits else 0)
    try:
        return _span(-total if text[0] == "-" else total)
    except EvaluationError as err:
        raise EvaluationError(f"invalid duration: {text[:64]!r}") from err


def _read_timestamp(text: str) -> Timestamp:
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        raise EvaluationError(f"invalid timestamp: {text[:64]!r}")
    date, hour, minute, second, fraction, sign, hours, minutes = match.groups()
    offset = 0
    if sign is not None:
        if int(hours) > _MOST_OFFSET_HOURS or int(minutes) > _MOST_OFFSET_MINUTES:
            raise EvaluationError(f"invalid timestamp: {text[:64]!r}")
        offset = (int(hours) * 60 + int(minutes)) * (-1 if sign == "-" else 1)
    # The year 0 is right as long as the zone shifts the moment into the year 1.
    is_year_zero = date.startswith("0000")
    try:
        local = datetime.fromisoformat(
            f"{'0400' + date[4:] if is_year_zero else date}T{int(hour):02}:{minute}:{second}+00:00"
        )
    except ValueError as err:
        raise EvaluationError(f"invalid timestamp: {text[:64]!r}") from err
    since = local - _EPOCH
    seconds = since.days * 86_400 + since.seconds - offset * 60 - (146_097 * 86_400 if is_year_zero else 0)
    return _moment(seconds * _SECOND + int((fraction or "").ljust(9, "0")[:9]), offset)


def _datetime(timestamp: Timestamp) -> datetime:
    return _EPOCH + timedelta(microseconds=timestamp.nanoseconds // 1000)


def _in_zone(timestamp: Timestamp, zone: str) -> datetime:
    moment = _datetime(timestamp)
    try:
        if ":" in zone:
            offset = _OFFSET.fullmatch(zone)
            if offset is None:
                raise EvaluationError(f"unknown time zone {zone[:64]!r}")
            minutes = int(offset[2])
            return moment + timedelta(minutes=int(offset[1]) * 60 + (-minutes if zone[0] == "-" else minutes))
        return moment if zone in _HERE else moment.astimezone(ZoneInfo(zone))
    except OverflowError as err:
        raise EvaluationError("time out of range") from err
    except (ZoneInfoNotFoundError, ValueError, OSError) as err:
        raise EvaluationError(f"unknown time zone {zone[:64]!r}") from err


def _parts() -> Library:
    parts: dict[str, Callable[[datetime], int]] = {
        "getFullYear": lambda moment: moment.year,
        "getMonth": lambda moment: moment.month - 1,
        "getDate": lambda moment: moment.day,
        "getDayOfMonth": lambda moment: moment.day - 1,
        "getDayOfWeek": lambda moment: moment.isoweekday() % 7,
        "getDayOfYear": lambda moment: moment.timetuple().tm_yday - 1,
        "getHours": lambda moment: moment.hour,
        "getMinutes": lambda moment: moment.minute,
        "getSeconds": lambda moment: moment.second,
        "getMilliseconds": lambda moment: moment.microsecond // 1000,
    }
    units = {
        "getHours": 3600 * _SECOND,
        "getMinutes": 60 * _SECOND,
        "getSeconds": _SECOND,
        "getMilliseconds": 1_000_000,
    }

    def here(part: Callable[[datetime], int]) -> Callable[[Timestamp], int]:
        return lambda timestamp: part(_datetime(timestamp))

    def there(part: Callable[[datetime], int]) -> Callable[[Timestamp, str], int]:
        return lambda timestamp, zone: part(_in_zone(timestamp, zone))

    def count(unit: int) -> Callable[[Duration], int]:
        return lambda duration: abs(duration.nanoseconds) // unit * (-1 if duration.nanoseconds < 0 else 1)

    return (
        *(overload(f"timestamp.{name}() -> int", here(part)) for name, part in parts.items()),
        *(overload(f"timestamp.{name}(string) -> int", there(part)) for name, part in parts.items()),
        *(overload(f"duration.{name}() -> int", count(unit)) for name, unit in units.items()),
    )


def _no_duration(number: int) -> Duration:
    """Fail, as upstream does: it declares the conversion but cannot perform it."""
    raise EvaluationError("type conversion error from 'int' to 'google.protobuf.Duration'")


def _shifted(timestamp: Timestamp, by: int) -> Timestamp:
    return _moment(timestamp.nanoseconds + by, timestamp.offset_minutes)


TIMES: Library = (
    overload("_+_(timestamp, duration) -> timestamp", lambda a, b: _shifted(a, b.nanoseconds)),
    overload("_+_(duration, timestamp) -> timestamp", lambda a, b: _shifted(b, a.nanoseconds)),
    overload("_+_(duration, duration) -> duration", lambda a, b: _span(a.nanoseconds + b.nanoseconds)),
    overload("_-_(timestamp, timestamp) -> duration", lambda a, b: _span(a.nanoseconds - b.nanoseconds)),
    overload("_-_(timestamp, duration) -> timestamp", lambda a, b: _shifted(a, -b.nanoseconds)),
    overload("_-_(duration, duration) -> duration", lambda a, b: _span(a.nanoseconds - b.nanoseconds)),
    overload("int(timestamp) -> int", lambda a: a.nanoseconds // _SECOND),
    overload("int(duration) -> int", lambda a: a.nanoseconds),
    overload("duration(duration) -> duration", lambda a: a),
    overload("duration(int) -> duration", _no_duration),
    overload("duration(string) -> duration", _read_duration),
    overload("timestamp(string) -> timestamp", _read_timestamp),
    overload("timestamp(int) -> timestamp", lambda a: _moment(a * _SECOND)),
    overload("timestamp(timestamp) -> timestamp", lambda a: a),
    *_parts(),
)
