"""The text function `format`, version 1 of cel-go: `'%s has %d'.format(['x', 1])`.

Numbers are written for en_US, whose exponents are `×10⁰³` and whose infinity is `∞`, without digit
grouping in whole numbers (`%d`) and with it in doubles.
Source: cel-go ext/formatting.go; golang.org/x/text/message as far as `%f` and `%e` use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from topobus.engine.cel.errors import EvaluationError
from topobus.engine.cel.functions.standard import write
from topobus.engine.cel.values import (
    Duration,
    Timestamp,
    TypeValue,
    from_key,
    kind_of,
)

__all__ = ["ESCAPES", "Clause", "FormatError", "format_text", "split_format"]

_DEFAULT_PRECISION = 6
_DIGITS = frozenset("0123456789")
# No double has more nonzero digits after the point (5e-324). Upstream has no limit here, but a text
# of gigabytes is never wanted.
_MAX_PRECISION = 1100


class FormatError(Exception):
    """The text is malformed, or has more clauses than values."""


@dataclass(frozen=True, slots=True)
class Clause:
    """One clause of a format: its letter, its precision (None when none is written), and the types
    that it accepts.
    """

    letter: str
    precision: int | None

    @property
    def kinds(self) -> frozenset[str]:
        """The types that it accepts before the evaluation.

        For `%f` and `%e` a text may still be a number's name (`NaN`).
        """
        return _CLAUSES[self.letter][1]

    @property
    def wants(self) -> str:
        """Describe the types that the clause accepts."""
        return _CLAUSES[self.letter][2]


def split_format(text: str) -> Iterator[str | Clause]:
    """Split a format into texts and clauses, as far as it is well-formed.

    Errors: raises FormatError where it is not.
    """
    start = place = 0
    while (place := text.find("%", place)) >= 0:
        yield text[start:place]
        if text[place + 1 : place + 2] == "%":
            start, place = place + 1, place + 2  # the second one is literal
            continue
        letter, precision, start = _read_clause(text, place + 1)
        yield Clause(letter, precision)
        place = start
    yield text[start:]


def _read_clause(text: str, place: int) -> tuple[str, int | None, int]:
    if place >= len(text):
        raise FormatError("unexpected end of string")
    precision: int | None = None
    if text[place] == ".":
        end = place + 1
        while end < len(text) and text[end] in _DIGITS:
            end += 1
        digits = text[place + 1 : end]
        if end >= len(text):
            raise FormatError("could not parse formatting clause: could not find end of precision specifier")
        if not digits:
            raise FormatError("could not parse formatting clause: the precision has no digits")
        precision = int(digits) if len(digits) < _DEFAULT_PRECISION else _MAX_PRECISION + 1
        if precision > _MAX_PRECISION:
            raise FormatError(f"precision {digits[:32]} exceeds the largest one, {_MAX_PRECISION}")
        place = end
    letter = text[place]
    if letter not in _CLAUSES:
        raise FormatError(f'could not parse formatting clause: unrecognized formatting clause "{letter}"')
    return letter, precision, place + 1


def format_text(text: str, values: list[object]) -> str:
    """Write values into a format.

    Errors: raises EvaluationError for a malformed format, a missing value, or a value that does not
            suit its clause.
    """
    parts: list[str] = []
    used = 0
    try:
        for part in split_format(text):
            if isinstance(part, str):
                parts.append(part)
                continue
            if used >= len(values):
                raise FormatError(f"index {used} out of range")
            parts.append(_CLAUSES[part.letter][0](values[used], part))
            used += 1
    except FormatError as err:
        raise EvaluationError(str(err)) from err
    return "".join(parts)


def _unsuited(clause: Clause, value: object) -> FormatError:
    return FormatError(f"error during formatting: {clause.wants}, was given {kind_of(value)}")


def _plain(value: object, clause: Clause) -> str:
    match value:
        case list() | tuple():
            return "[" + ", ".join(_within(item, clause) for item in value) + "]"
        case dict():
            items = sorted((_key(from_key(key), clause), _within(item, clause)) for key, item in value.items())
            return "{" + ", ".join(f"{key}:{item}" for key, item in items) + "}"
        case None:
            return "null"
        case TypeValue():
            return value.name
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError as err:
                raise FormatError("error during formatting: invalid UTF-8 in bytes, cannot convert to string") from err
        case bool() | int() | float() | str() | Timestamp() | Duration():
            return write(value)
        case _:
            raise _unsuited(clause, value)


def _within(value: object, clause: Clause) -> str:
    """Write a value within a list or map, as one would write it in an expression."""
    match value:
        case str():
            return _quote(value)
        case bytes():
            return "b" + _quote(_plain(value, clause))
        case float():
            return f"{value:.{_DEFAULT_PRECISION}f}" if math.isfinite(value) else _quote(write(value))
        case Timestamp():
            return f"timestamp({_quote(write(value))})"
        case Duration():
            return f"duration({_quote(write(value))})"
        case _:
            return _plain(value, clause)


def _key(value: object, clause: Clause) -> str:
    if isinstance(value, str | int):
        return _within(value, clause)
    raise FormatError(f"no formatting function for map key of type {kind_of(value)}")


ESCAPES = {
    "\a": "\\a",
    "\b": "\\b",
    "\f": "\\f",
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
    "\v": "\\v",
    "\\": "\\\\",
    '"': '\\"',
}


def _quote(text: str) -> str:
    """Quote as Go's %q does."""
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(letter: str) -> str:
    if letter in ESCAPES:
        return ESCAPES[letter]
    if letter.isprintable():
        return letter
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _number(value: object, clause: Clause) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _unsuited(clause, value)
    return int(value)


def _double(value: object, clause: Clause) -> float:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if not isinstance(value, float):
        raise _unsuited(clause, value)
    return value


def _special(value: float) -> str:
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"


def _fixed(value: object, clause: Clause) -> str:
    number = _double(value, clause) or 0.0  # a zero has no sign
    precision = clause.precision if clause.precision is not None else _DEFAULT_PRECISION
    return f"{number:,.{precision}f}" if math.isfinite(number) else _special(number)


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _scientific(value: object, clause: Clause) -> str:
    """Write with an exponent.

    Upstream takes the written precision for the width, so six digits follow the point in any case.
    """
    number = _double(value, clause) or 0.0
    width = clause.precision if clause.precision is not None else _DEFAULT_PRECISION
    if not math.isfinite(number):
        return _special(number).rjust(width)
    digits, _, power = f"{number:.{_DEFAULT_PRECISION}e}".partition("e")
    return f"{digits}×10{power.removeprefix('+').translate(_RAISED)}".rjust(width)


def _hexadecimal(value: object, clause: Clause) -> str:
    if isinstance(value, str | bytes):
        written = (value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value).hex()
        return written.upper() if clause.letter == "X" else written
    return f"{_number(value, clause):{clause.letter}}"


def _binary(value: object, clause: Clause) -> str:
    return str(int(value)) if isinstance(value, bool) else f"{_number(value, clause):b}"


_Writer = Callable[[object, Clause], str]
_WHOLE = frozenset(["int", "uint"])
_DOUBLES = frozenset(["double", "string"])
_ANY = frozenset(
    [
        "list",
        "map",
        "int",
        "uint",
        "double",
        "bool",
        "string",
        "bytes",
        "type",
        "null_type",
        "google.protobuf.Timestamp",
        "google.protobuf.Duration",
    ]
)
_HEXADECIMAL = frozenset([*_WHOLE, "string", "bytes"])
_CLAUSES: dict[str, tuple[_Writer, frozenset[str], str]] = {
    "s": (
        _plain,
        _ANY,
        "string clause can only be used on strings, bools, bytes, ints, doubles, maps, lists, types, "
        "durations, and timestamps",
    ),
    "d": (lambda value, clause: str(_number(value, clause)), _WHOLE, "decimal clause can only be used on integers"),
    "f": (_fixed, _DOUBLES, "fixed-point clause can only be used on doubles"),
    "e": (_scientific, _DOUBLES, "scientific clause can only be used on doubles"),
    "b": (_binary, frozenset([*_WHOLE, "bool"]), "only integers and bools can be formatted as binary"),
    "o": (lambda value, clause: f"{_number(value, clause):o}", _WHOLE, "octal clause can only be used on integers"),
    "x": (_hexadecimal, _HEXADECIMAL, "only integers, byte buffers, and strings can be formatted as hex"),
    "X": (_hexadecimal, _HEXADECIMAL, "only integers, byte buffers, and strings can be formatted as hex"),
}
