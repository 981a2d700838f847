"""Regular expressions in time linear in the text, for every pattern: RE2, which has Go's syntax.

Python's `re` may backtrack for an exponential time, and a claim must not be able to stop the
controller. The library caches compiled patterns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import re2  # type: ignore[import-untyped]  # the package has no py.typed

from topobus.engine.cel.errors import EvaluationError

__all__ = ["find", "find_all", "is_found", "problem_of"]

_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
# Memory for one compiled pattern. Go's own limit is of this size.
_OPTIONS.max_mem = 8 << 20


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re2._Regexp | str:
    try:
        return re2.compile(pattern, _OPTIONS)
    except re2.error as err:
        detail = err.args[0] if err.args else ""
        return detail.decode("utf-8", "replace") if isinstance(detail, bytes) else str(detail)


def problem_of(pattern: str) -> str:
    """Explain what is wrong with a pattern. Empty when it is right."""
    compiled = _compiled(pattern)
    return compiled if isinstance(compiled, str) else ""


def _use(pattern: str) -> re2._Regexp:
    compiled = _compiled(pattern)
    if isinstance(compiled, str):
        raise EvaluationError(f"illegal regex: {compiled}")
    return compiled


def is_found(text: str, pattern: str) -> bool:
    """Say whether the pattern occurs in the text."""
    return _use(pattern).search(text) is not None


def find(text: str, pattern: str) -> str:
    """Return the first occurrence, empty when there is none."""
    match = _use(pattern).search(text)
    return str(match.group(0)) if match is not None else ""


def find_all(text: str, pattern: str, limit: int = -1) -> list[str]:
    """Return all occurrences, or the first `limit`."""
    iterate: Callable[[str], object] = _use(pattern).finditer
    matches: list[str] = []
    if limit == 0:
        return matches
    last = -1
    for match in iterate(text):  # type: ignore[attr-defined]  # untyped library
        # As in Go, an empty match right behind a match does not count.
        if match.start() == match.end() == last:
            continue
        last = match.end()
        matches.append(str(match.group(0)))
        if len(matches) == limit:
            break
    return matches
