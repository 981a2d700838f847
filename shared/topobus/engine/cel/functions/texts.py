"""The extended text functions, version 2: positions count characters.

Source: cel-go/ext/strings.go.
"""

from __future__ import annotations

from string import ascii_lowercase, ascii_uppercase

from topobus.engine.cel.errors import EvaluationError
from topobus.engine.cel.functions.text_formats import ESCAPES, format_text
from topobus.engine.cel.registry import Library, overload

__all__ = ["TEXTS"]

# The white space of Unicode, as Go's strings.TrimSpace removes it.
_BLANKS = (
    "\t\n\v\f\r "
    "\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)
_QUOTED = str.maketrans(ESCAPES)
_LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)
_UPPER = str.maketrans(ascii_lowercase, ascii_uppercase)


def _char_at(text: str, place: int) -> str:
    if not 0 <= place <= len(text):
        raise EvaluationError(f"index out of range: {place}")
    return text[place : place + 1]


def _index(text: str, part: str, start: int = 0) -> int:
    """Find a part from a position on. Beyond the end of the text there is none.

    As upstream, the empty part is found at any position.
    """
    if not part:
        return start
    if start < 0:
        raise EvaluationError(f"index out of range: {start}")
    return text.find(part, start)


def _last_index(text: str, part: str, start: int | None = None) -> int:
    """Find the last part that begins at a position or before it.

    A position beyond the end of the text finds none.
    """
    if not part:
        return len(text) if start is None else start
    if start is None:
        return text.rfind(part)
    if start < 0:
        raise EvaluationError(f"index out of range: {start}")
    return text.rfind(part, 0, start + len(part)) if start < len(text) else -1


def _join(values: list[object], separator: str = "") -> str:
    if not all(isinstance(value, str) for value in values):
        raise EvaluationError("no such overload: join of what is no text")
    return separator.join(str(value) for value in values)


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
    overload("string.format(list<dyn>) -> string", format_text),
    overload("strings.quote(string) -> string", _quote),
)
