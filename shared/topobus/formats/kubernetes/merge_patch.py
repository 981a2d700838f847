"""Merge patches (RFC 7386), made from two versions of an object and applied to one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["merge_patch", "merged"]


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch from `before` to `after`. Empty when they are equal.

    >>> merge_patch({"a": 1, "b": {"c": 2, "d": 3}, "e": [1]}, {"a": 1, "b": {"c": 4}, "e": [1, 2]})
    {'b': {'c': 4, 'd': None}, 'e': [1, 2]}
    """
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            if changes := merge_patch(old, value):
                patch[key] = changes
        elif key not in before or old != value:
            patch[key] = value
    return dict(sorted(patch.items()))


def merged(plain: Mapping[str, Any], patch: Mapping[str, Any], *, named: Collection[str] = ()) -> dict[str, Any]:
    """Apply a merge patch. The result shares what it can with both.

    Shapes: named — lists whose elements are changed by their names, as `kubectl patch` does it; any
            other list is replaced.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"b": None, "d": 3}})
    {'a': {'c': 2, 'd': 3}}
    >>> merged({"containers": [{"name": "a", "image": "x"}]}, {"containers": [{"name": "a", "tty": True}]}, named=["containers"])
    {'containers': [{'name': 'a', 'image': 'x', 'tty': True}]}
    """  # noqa: E501
    result = dict(plain)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            inner = result.get(key)
            result[key] = merged(inner if isinstance(inner, Mapping) else {}, value, named=named)
        elif key in named:
            changed = {each["name"]: each for each in value}
            result[key] = [merged(each, changed.get(each["name"], {}), named=named) for each in result[key]]
        else:
            result[key] = value
    return result
