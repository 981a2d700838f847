"""The text of a CEL expression: what it reads of a device, and the form in which absent domains are empty maps.

Flows in: an expression that compiles. Flows out: the same expression with `device.attributes[...]` reading from a second map that has every domain that the
expression may name, those domains, and what it reads: two devices that agree on that get the same verdict, so it is evaluated once for both.

This is a reading of tokens, not of a tree: where it cannot tell what is read it says so, and nothing is shared then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from topobus.controller.core.selectors import Reads

__all__ = ["Reading", "read_expression"]

# String literals, comments, identifiers and single characters: enough to find `device.attributes[` outside of strings.
_TOKEN = re.compile(
    r"""(?P<raw>[rR][bB]?|[bB][rR])?(?P<text>\"\"\"(?:\\.|[^\\])*?\"\"\"|'''(?:\\.|[^\\])*?'''|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
    r"|(?P<comment>//[^\n]*)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<space>\s+)|(?P<other>.)",
    re.DOTALL,
)
_SIMPLE_TEXT = re.compile(r"\"[^\"\\]*\"|'[^'\\]*'")
_MAPS = {"attributes": "attributes_", "capacity": "capacity_"}
_SCALARS = ("driver", "allowMultipleAllocations")


@dataclass(frozen=True)
class Reading:
    """An expression, read."""

    rewritten: str
    domains: frozenset[str]
    reads: frozenset[Reads] | None
    """None: it reads more than can be told."""


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    index: int


def read_expression(expression: str) -> Reading:
    """Read an expression.

    >>> sorted(read_expression('device.attributes["a.io"].numa == 1').reads or ())
    [Reads(part='attributes', domain='a.io', name='numa')]
    >>> read_expression('device.attributes.exists(d, d == "a.io")').reads is None
    True
    """
    parts = [one.group() for one in _TOKEN.finditer(expression)]
    kinds = [str(one.lastgroup) for one in _TOKEN.finditer(expression)]
    tokens = [
        _Token(kind, text, index) for index, (kind, text) in enumerate(zip(kinds, parts, strict=True)) if kind not in ("space", "comment")
    ]
    domains = {one.text.strip("\"'") for one in tokens if one.kind == "text"}
    reads: set[Reads] | None = set()
    for place, token in enumerate(tokens):
        if token.kind != "name" or token.text != "device" or (place and tokens[place - 1].text == "."):
            continue
        after = [one.text for one in tokens[place + 1 : place + 10]] + [""] * 9
        part = after[1] if after[0] == "." else ""
        found: Reads | None = None
        if part in _SCALARS:
            found = Reads(part)
        elif part in _MAPS:
            is_looked_into = after[2] == "[" or (after[2] == "." and after[4] != "(")
            if is_looked_into:
                domains.add(after[3])
                parts[tokens[place + 2].index] = _MAPS[part]
            found = _read_map(part, after[2:]) if is_looked_into else _read_membership(part, after[2], tokens, place)
        if found is None:
            reads = None
        elif reads is not None:
            reads.add(found)
    return Reading("".join(parts), frozenset(one for one in domains if one), frozenset(reads) if reads is not None else None)


def _read_map(part: str, after: list[str]) -> Reads | None:
    """Read `["domain"].name` or `[device.driver].name`, what follows `device.attributes`."""
    if after[0] == "[" and _SIMPLE_TEXT.fullmatch(after[1]) and after[2:4] == ["]", "."]:
        return Reads(part, after[1][1:-1], after[4]) if after[4].isidentifier() else None
    if after[:5] == ["[", "device", ".", "driver", "]"] and after[5] == "." and after[6].isidentifier():
        return Reads(part, None, after[6])
    return None


def _read_membership(part: str, following: str, tokens: list[_Token], place: int) -> Reads | None:
    """Read `"domain" in device.attributes`."""
    if following in (".", "[", "("):
        return None
    before = tokens[place - 2 : place] if place >= 2 else []
    if len(before) == 2 and before[1].text == "in" and _SIMPLE_TEXT.fullmatch(before[0].text):
        return Reads(part, before[0].text[1:-1])
    return None
