"""Raises Python's recursion limit while an expression is processed, so that the limit does not
decide which expressions are valid.

A rule of the grammar may nest 250 deep, and each level of an expression takes some Python calls to
parse, check, estimate and evaluate. Afterwards the limit is restored, because other code relies on
it (a parser of nested JSON uses the C stack for each level).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["DEEP", "room"]

# More than the deepest expression takes (measured: see tests/unit/controller/test_cel_depth.py); of
# C stack this is some 4 MB at most, where a thread has 8.
_CALLS = 9_000
DEEP = 30
"""Trees deeper than this are evaluated with more room."""


class _Room:
    """How many calls are inside now, and the limit before the first one entered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0

    def enter(self) -> None:
        """Raise the limit for the first one."""
        with self._lock:
            if not self._users:
                self._before = sys.getrecursionlimit()
                sys.setrecursionlimit(max(self._before, _CALLS))
            self._users += 1

    def leave(self) -> None:
        """Put the limit back after the last one."""
        with self._lock:
            self._users -= 1
            if not self._users:
                sys.setrecursionlimit(self._before)


_ROOM = _Room()


@contextmanager
def room() -> Iterator[None]:
    """Run the body with more room on the stack. Safe with several threads.

    Cost: a microsecond.
    """
    _ROOM.enter()
    try:
        yield
    finally:
        _ROOM.leave()
