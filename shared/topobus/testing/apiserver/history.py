"""The changes of the API server simulator's objects in order, and events for the watchers of a
kind.

The next change of a kind sets the event of its watchers.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence

from msgspec import Struct

from topobus.testing.apiserver.values import Object

__all__ = ["Change", "History", "Key"]

Key = tuple[str, str, str, str]
"""Group, plural, namespace, name."""


class Change(Struct, frozen=True, kw_only=True):
    """One change of one object."""

    version: int
    key: Key
    before: Object | None
    after: Object | None
    """None: deleted."""
    last: Object
    """The object as the event shows it."""


class History:
    """All changes of one store."""

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._grown: dict[tuple[str, str], asyncio.Event] = {}
        """Group and plural to the event that wakes its watchers at a change."""

    def __len__(self) -> int:
        return len(self._changes)

    def add(self, change: Change) -> None:
        """Add a change, and wake only the watchers of its kind."""
        self._changes.append(change)
        grown = self._grown.pop(change.key[:2], None)
        if grown is not None:
            grown.set()

    def since(self, version: int) -> Sequence[Change]:
        """List the changes after a version. Cost: O(log changes) and the result."""
        return self._changes[bisect_right(self._changes, version, key=lambda change: change.version) :]

    def grown(self, group: str, plural: str) -> asyncio.Event:
        """Return the event that the next change of a kind sets."""
        return self._grown.setdefault((group, plural), asyncio.Event())

    def forget_from(self, count: int) -> None:
        """Remove all changes but the first ones."""
        del self._changes[count:]
