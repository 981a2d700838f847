"""The entries that all open pages show, stored once for all of them, by topic and key, each with
the version at which it last changed.

A slow reader gets the newest of each entry and never a queue, so memory does not grow with readers.
Deleted keys are remembered for a while. A reader with an older version starts from the beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from msgspec import Struct

__all__ = ["Board", "Posted"]

# Deletions remembered. A reader that missed more than these reads everything again.
_MOST_DELETIONS = 4096


class Posted(Struct, frozen=True, kw_only=True):
    """An entry, or its deletion (`data` is None)."""

    version: int
    topic: str
    key: str
    data: bytes | None


class Board:
    """The entries. Version 0 is before everything.

    >>> board = Board()
    >>> board.post("nodes", "n1", b"{}"), board.post("nodes", "n1", b"{}"), board.drop("nodes", "n1")
    (True, False, True)
    >>> [(posted.key, posted.data) for posted in board.since(1) or ()], board.since(2)
    ([('n1', None)], [])
    """

    def __init__(self) -> None:
        self.version = 0
        self._posted: OrderedDict[tuple[str, str], Posted] = OrderedDict()
        """In order of version, the newest last."""
        self._deleted = 0
        self._complete_from = 0
        """Deletions up to this version may have been dropped."""

    def __len__(self) -> int:
        return len(self._posted) - self._deleted

    def post(self, topic: str, key: str, data: bytes) -> bool:
        """Store an entry. False when it is the same already."""
        before = self._posted.get((topic, key))
        if before is not None and before.data == data:
            return False
        if before is not None and before.data is None:
            self._deleted -= 1
        self._put(topic, key, data)
        return True

    def drop(self, topic: str, key: str) -> bool:
        """Delete an entry. False when there is none."""
        before = self._posted.get((topic, key))
        if before is None or before.data is None:
            return False
        self._put(topic, key, None)
        self._deleted += 1
        if self._deleted > _MOST_DELETIONS:
            self._forget_deletions()
        return True

    def get(self, topic: str, key: str) -> bytes | None:
        """Return an entry. None when there is none."""
        posted = self._posted.get((topic, key))
        return posted.data if posted is not None else None

    def keys(self, topic: str) -> tuple[str, ...]:
        """Name the entries of a topic, in the order in which they last changed."""
        return tuple(
            key for (of_topic, key), posted in self._posted.items() if of_topic == topic and posted.data is not None
        )

    def since(self, version: int) -> list[Posted] | None:
        """Return what changed after a version, oldest first.

        None when the deletions since then are no longer known, or the version is none of ours: then
        start with `all`.
        """
        if version < self._complete_from or version > self.version:
            return None
        newer: list[Posted] = []
        for posted in reversed(self._posted.values()):
            if posted.version <= version:
                break
            newer.append(posted)
        newer.reverse()
        return newer

    def all(self) -> Iterator[Posted]:
        """Return all entries, oldest change first."""
        return (posted for posted in tuple(self._posted.values()) if posted.data is not None)

    def _put(self, topic: str, key: str, data: bytes | None) -> None:
        self.version += 1
        self._posted[topic, key] = Posted(version=self.version, topic=topic, key=key, data=data)
        self._posted.move_to_end((topic, key))

    def _forget_deletions(self) -> None:
        """Drop the older half of the deletions."""
        deletions = [place for place, posted in self._posted.items() if posted.data is None]
        for place in deletions[: len(deletions) // 2]:
            self._complete_from = max(self._complete_from, self._posted.pop(place).version)
            self._deleted -= 1
