"""Malformed messages: bytes that are no message at all, and a good one with a single place spoilt,
for every place it has.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

__all__ = ["GARBAGE", "ODD_NAMES", "spoilt"]

# Deeper than any decoder's stack, and as large as the server takes.
_DEEP = 100_000
_LARGE = 900_000

GARBAGE: dict[str, bytes] = {
    "empty": b"",
    "no-json": b"this is no JSON",
    "cut-off": b'{"op_id": "x", "pod"',
    "no-text": b"\xff\xfe\x00\x80" * 50,
    "nul": b"\x00",
    "null": b"null",
    "number": b"5",
    "text": b'"text"',
    "list": b"[]",
    "no-fields": b"{}",
    "deep-lists": b"[" * _DEEP + b"]" * _DEEP,
    "deep-objects": b'{"a":' * _DEEP + b"1" + b"}" * _DEEP,
    "deep-in-a-field": b'{"pod":' + b"[" * _DEEP + b"]" * _DEEP + b"}",
    "oversized-text": b'{"op_id": "' + b"x" * _LARGE + b'"}',
    "oversized-list": b"[" + b"1," * (_LARGE // 2) + b"1]",
    "huge-number": b'{"count": ' + b"9" * 10_000 + b"}",
    "not-a-number": b'{"count": NaN}',
}
"""Bytes by name; none of them is any message of the catalogue."""

ODD_NAMES = ("", ".", "..", "a.b", "a/b", "*", ">", "$KV", "A_B", "-", "a b", "\x00", "ü", "x" * 5000)

# The last one becomes NaN, which json.dumps writes and no decoder here may take.
_NUMBERS: tuple[Any, ...] = (0, -1, 10**9, 2**63, 2**64 - 1, 10**30, 1.5, 1e308, math.nan)
_KINDS: tuple[Any, ...] = (None, True, -1, "text", [], {})


def spoilt(good: Any) -> Iterator[tuple[str, bytes]]:
    """Give every variant of a message (as dicts, lists and scalars) with one place spoilt: its path
    with what was done, and the bytes.
    """
    for path, value in _places(good):
        name = ".".join(map(str, path))
        for number, other in enumerate(_others(value)):
            changed = _put(good, path, other)
            shown = json.dumps(other, default=str)
            yield f"{name or 'all'}={shown if len(shown) < 30 else f'variant {number}'}", json.dumps(changed).encode()
        if path and isinstance(path[-1], str):
            yield f"{name} missing", json.dumps(_drop(good, path)).encode()


def _places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    yield path, value
    inner: Iterator[tuple[str | int, Any]] = iter(())
    if isinstance(value, dict):
        inner = iter(value.items())
    elif isinstance(value, list):
        # One element is enough for all: they have one type.
        inner = iter(enumerate(value[:1]))
    for key, inner_value in inner:
        yield from _places(inner_value, (*path, key))


def _others(value: Any) -> Iterator[Any]:
    yield from (kind for kind in _KINDS if type(kind) is not type(value))
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from _NUMBERS
    elif isinstance(value, str):
        yield from ODD_NAMES
    elif isinstance(value, list):
        yield from ([], value * 2, value * 300)
    elif isinstance(value, dict):
        yield from ({}, {**value, "a.b/*": next(iter(value.values()), None)})


def _put(good: Any, path: tuple[str | int, ...], other: Any) -> Any:
    if not path:
        return other
    changed = copy.deepcopy(good)
    _parent(changed, path)[path[-1]] = other
    return changed


def _drop(good: Any, path: tuple[str | int, ...]) -> Any:
    changed = copy.deepcopy(good)
    del _parent(changed, path)[path[-1]]
    return changed


def _parent(value: Any, path: tuple[str | int, ...]) -> Any:
    for part in path[:-1]:
        value = value[part]
    return value
