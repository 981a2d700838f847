"""The extended functions of texts, version 2: positions count characters.

Source: cel-go/ext/strings.go and formatting.go.
"""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_lowercase, ascii_uppercase

from topobus.controller.expressions.errors import EvaluationError
from topobus.controller.expressions.registry import Library, overload
from topobus.controller.expressions.standard import write
from topobus.controller.expressions.values import TypeValue, from_key, kind_of

__all__ = ["TEXTS"]

# What Unicode calls white space, as Go's strings.TrimSpace takes it.
_BLANKS = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
_QUOTED = str.maketrans(
    {"\a": "\\a", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v", "\\": "\\\\", '"': '\\"'}
)
_LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)
_UPPER = str.maketrans(ascii_lowercase, ascii_uppercase)
_MAX_PRECISION = 1000


def _char_at(text: str, place: int) -> str:
    if not 0 <= place <= len(text):
        raise EvaluationError(f"index out of range: {place}")
    return text[place : place + 1]


def _index(text: str, part: str, start: int = 0) -> int:
    if not 0 <= start <= len(text):
        raise EvaluationError(f"index out of range: {start}")
    return text.find(part, start)


def _last_index(text: str, part: str, start: int | None = None) -> int:
    if start is None:
        return text.rfind(part)
    if not 0 <= start <= len(text):
        raise EvaluationError(f"index out of range: {start}")
    return text.rfind(part, 0, start + len(part))


def _join(values: list[object], separator: str = "") -> str:
    if not all(isinstance(one, str) for one in values):
        raise EvaluationError("no such overload: join of what is no text")
    return separator.join(str(one) for one in values)


def _split(text: str, separator: str, limit: int = -1) -> list[str]:
    if limit == 0:
        return []
    if limit == 1:
        return [text]
    if not separator:
        return list(text) if limit < 0 or limit >= len(text) else [*text[: limit - 1], text[limit - 1 :]]
    return text.split(separator, limit - 1 if limit > 0 else -1)


def _substring(text: str, start: int, end: int | None = None) -> str:
    last = len(text) if end is None else end
    if not 0 <= start <= len(text):
        raise EvaluationError(f"index out of range: {start}")
    if not 0 <= last <= len(text):
        raise EvaluationError(f"index out of range: {last}")
    if start > last:
        raise EvaluationError(f"invalid substring range. start: {start}, end: {last}")
    return text[start:last]


def _lower(text: str) -> str:
    return text.translate(_LOWER)


def _upper(text: str) -> str:
    return text.translate(_UPPER)


def _quote(text: str) -> str:
    return '"' + text.translate(_QUOTED) + '"'


def _format(text: str, values: list[object]) -> str:
    """Fill `%s`, `%d`, `%f`, `%e`, `%x`, `%X`, `%o` and `%b` in."""
    parts: list[str] = []
    rest = iter(values)
    place = 0
    while place < len(text):
        if text[place] != "%":
            parts.append(text[place])
            place += 1
            continue
        place += 1
        if text[place : place + 1] == "%":
            parts.append("%")
            place += 1
            continue
        precision = 6
        if text[place : place + 1] == ".":
            digits = ""
            place += 1
            while text[place : place + 1].isdecimal():
                digits += text[place]
                place += 1
            precision = int(digits or "0") if len(digits) < 6 else _MAX_PRECISION + 1
            if precision > _MAX_PRECISION:
                raise EvaluationError(f"precision {digits} exceeds maximum allowed precision")
        clause = text[place : place + 1]
        place += 1
        if clause not in _CLAUSES:
            raise EvaluationError(f"could not parse formatting clause: unrecognized formatting clause {clause!r}")
        try:
            value = next(rest)
        except StopIteration as err:
            raise EvaluationError("index out of range: there are fewer arguments than clauses") from err
        parts.append(_CLAUSES[clause](value, precision))
    return "".join(parts)


def _plain(value: object, precision: int = 6) -> str:
    match value:
        case list() | tuple():
            return "[" + ", ".join(map(_plain, value)) + "]"
        case dict():
            items = sorted((_plain(from_key(key)), _plain(one)) for key, one in value.items())
            return "{" + ", ".join(f"{key}: {one}" for key, one in items) + "}"
        case None:
            return "null"
        case TypeValue():
            return value.name
        case bytes():
            return value.decode("utf-8", "replace")
        case _:
            return write(value)


def _number(value: object, clause: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise EvaluationError(f"{clause} clause can only be used on integers, was given {kind_of(value)}")
    return value


def _decimal(value: object, precision: int) -> str:
    return _plain(value) if isinstance(value, float) else str(int(_number(value, "decimal")))


def _fixed(letter: str) -> Callable[[object, int], str]:
    def work(value: object, precision: int) -> str:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise EvaluationError(f"fixed-point clause can only be used on numbers, was given {kind_of(value)}")
        return f"{float(value):.{precision}{letter}}"

    return work


def _hexadecimal(letter: str) -> Callable[[object, int], str]:
    def work(value: object, precision: int) -> str:
        if isinstance(value, str | bytes):
            written = (value.encode() if isinstance(value, str) else value).hex()
            return written.upper() if letter == "X" else written
        return f"{int(_number(value, 'hex')):{letter}}"

    return work


def _binary(value: object, precision: int) -> str:
    return str(int(value)) if isinstance(value, bool) else f"{int(_number(value, 'binary')):b}"


_CLAUSES: dict[str, Callable[[object, int], str]] = {
    "s": _plain,
    "d": _decimal,
    "f": _fixed("f"),
    "e": _fixed("e"),
    "b": _binary,
    "o": lambda value, _: f"{int(_number(value, 'octal')):o}",
    "x": _hexadecimal("x"),
    "X": _hexadecimal("X"),
}

TEXTS: Library = (
    overload("string.charAt(int) -> string", _char_at),
    overload("string.indexOf(string) -> int", _index),
    overload("string.indexOf(string, int) -> int", _index),
    overload("string.lastIndexOf(string) -> int", _last_index),
    overload("string.lastIndexOf(string, int) -> int", _last_index),
    overload("list<string>.join() -> string", _join),
    overload("list<string>.join(string) -> string", _join),
    overload("string.lowerAscii() -> string", _lower),
    overload("string.upperAscii() -> string", _upper),
    overload("string.replace(string, string) -> string", lambda a, b, c: a.replace(b, c)),
    overload("string.replace(string, string, int) -> string", lambda a, b, c, d: a.replace(b, c, d if d >= 0 else -1)),
    overload("string.split(string) -> list<string>", _split),
    overload("string.split(string, int) -> list<string>", _split),
    overload("string.substring(int) -> string", _substring),
    overload("string.substring(int, int) -> string", _substring),
    overload("string.trim() -> string", lambda a: a.strip(_BLANKS)),
    overload("string.format(list<dyn>) -> string", _format),
    overload("strings.quote(string) -> string", _quote),
)
