"""The lexer: splits an expression into names, constants and signs, each with its position.

Source: cel-spec, langdef.md, "Syntax".
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from topobus.engine.cel.errors import CompileError
from topobus.engine.cel.values import Uint

__all__ = ["Token", "fail_at", "split"]

_INT64 = 1 << 63
_MOST_DIGITS = 20
_WORDS = re.compile(
    r"(?P<space>[ \t\n\f\r]+|//[^\n]*)"
    r"|(?P<text>(?:[rR]|[bB][rR]?)?(?:\"\"\"(?:\\.|[^\\])*?\"\"\"|'''(?:\\.|[^\\])*?'''|\"(?:\\.|[^\"\\\r\n])*\"|'(?:\\.|[^'\\\r\n])*'))"
    r"|(?P<rawtext>[rR](?:\"[^\"\r\n]*\"|'[^'\r\n]*'))"
    r"|(?P<double>\d+\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\.\d+(?:[eE][+-]?\d+)?)"
    r"|(?P<whole>0x[0-9a-fA-F]+[uU]?|\d+[uU]?)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<sign>==|!=|<=|>=|&&|\|\||[-+*/%<>!?:.,()\[\]{}])",
    re.DOTALL | re.ASCII,
)
_RAW = re.compile(r"([rR]|[bB][rR])(\"\"\"(.*?)\"\"\"|'''(.*?)'''|\"([^\"\r\n]*)\"|'([^'\r\n]*)')", re.DOTALL)
_PREFIX = re.compile(r"[rRbB]*")
_ESCAPE = re.compile(
    r"\\(?:([abfnrtv\\'\"`?])|[xX]([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-3][0-7]{2})|(.)|$)",
    re.DOTALL,
)
_SIMPLE = {
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "`": "`",
    "?": "?",
}


class Token(NamedTuple):
    """One token: `name`, `constant`, `sign` or `end`."""

    kind: str
    text: str
    offset: int
    value: object = None


def fail_at(expression: str, offset: int, message: str) -> CompileError:
    """Make an error that names line and column."""
    line = expression.count("\n", 0, offset) + 1
    return CompileError(message, line, offset - (expression.rfind("\n", 0, offset) + 1) + 1)


def split(expression: str) -> list[Token]:
    """Split an expression into its tokens.

    Errors: raises CompileError.

    >>> [token.text for token in split('a.b >= 0x1F')]
    ['a', '.', 'b', '>=', '0x1F', '']
    """
    tokens: list[Token] = []
    offset = 0
    while offset < len(expression):
        raw = _RAW.match(expression, offset)
        word = _WORDS.match(expression, offset)
        if raw is not None:
            content = next(part for part in raw.groups()[2:] if part is not None)
            is_bytes = "b" in raw[1].lower()
            tokens.append(Token("constant", raw[0], offset, content.encode() if is_bytes else content))
            offset = raw.end()
            continue
        if word is None:
            raise fail_at(
                expression, offset, f"Syntax error: token recognition error at: {expression[offset : offset + 16]!r}"
            )
        kind, text = str(word.lastgroup), word[0]
        if kind in ("text", "rawtext"):
            tokens.append(Token("constant", text, offset, _read_text(expression, offset, text)))
        elif kind == "double":
            tokens.append(Token("constant", text, offset, _read_double(expression, offset, text)))
        elif kind == "whole":
            # Kept as a number without a sign: a minus before it makes the smallest number possible.
            tokens.append(Token("whole", text, offset, _read_whole(expression, offset, text)))
        elif kind in ("name", "sign"):
            tokens.append(Token(kind, text, offset))
        offset = word.end()
    tokens.append(Token("end", "", len(expression)))
    return tokens


def _read_double(expression: str, offset: int, text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise fail_at(expression, offset, f"Syntax error: invalid double literal {text[:32]}")
    return value


def _read_whole(expression: str, offset: int, text: str) -> int:
    digits = text.rstrip("uU")
    is_hexadecimal = digits[:2] == "0x"
    # Python reads no more than some thousand digits, and 64 bits have 20.
    short = digits[2:].lstrip("0") if is_hexadecimal else digits.lstrip("0")
    if len(short) > _MOST_DIGITS:
        raise fail_at(expression, offset, f"Syntax error: invalid int literal {text[:32]}")
    value = int(short or "0", 16 if is_hexadecimal else 10)
    if text[-1] in "uU":
        if value >= _INT64 * 2:
            raise fail_at(expression, offset, f"Syntax error: invalid uint literal {text[:32]}")
        return Uint(value)
    if value > _INT64:
        raise fail_at(expression, offset, f"Syntax error: invalid int literal {text[:32]}")
    return value


def _read_text(expression: str, offset: int, text: str) -> str | bytes:
    r"""Read a text with its escapes: in bytes `\\x41` is one byte, in text it is one character."""
    prefix = _PREFIX.match(text)
    length = prefix.end() if prefix is not None else 0
    is_bytes = "b" in text[:length].lower()
    quote = 3 if text[length : length + 3] in ('"""', "'''") else 1
    content = text[length + quote : len(text) - quote]
    parts: list[bytes] = []
    last = 0
    for match in _ESCAPE.finditer(content):
        parts.append(content[last : match.start()].encode("utf-8", "surrogatepass"))
        last = match.end()
        simple, pair, short, long, octal, _ = match.groups()
        if simple is not None:
            parts.append(_SIMPLE[simple].encode())
        elif pair is not None or octal is not None:
            number = int(pair, 16) if pair is not None else int(octal, 8)
            parts.append(bytes([number]) if is_bytes else chr(number).encode())
        elif (short is not None or long is not None) and not is_bytes:
            number = int(short if short is not None else long, 16)
            if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
                raise fail_at(expression, offset, f"Syntax error: invalid unicode code point in {text[:32]}")
            parts.append(chr(number).encode())
        else:
            raise fail_at(expression, offset, f"Syntax error: invalid escape {match[0]!r}")
    parts.append(content[last:].encode("utf-8", "surrogatepass"))
    joined = b"".join(parts)
    return joined if is_bytes else joined.decode("utf-8", "replace")
