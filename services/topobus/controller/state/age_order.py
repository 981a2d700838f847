"""Keeps keys of objects in order of age, so that a round need not sort all of them. Keys of the
same age are in order of the keys.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from topobus.engine.claims.stored import ObjectKey

__all__ = ["AgeOrder"]


class AgeOrder:
    """Keys in order of age.

    >>> order = AgeOrder()
    >>> order.put(ObjectKey("pod", "default", "b"), "2026-01-01")
    >>> order.put(ObjectKey("pod", "default", "a"), "2026-01-02")
    >>> [key.name for key in order]
    ['b', 'a']
    """

    def __init__(self) -> None:
        self._created: dict[ObjectKey, str] = {}
        self._order: list[tuple[str, ObjectKey]] = []

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._created

    def __iter__(self) -> Iterator[ObjectKey]:
        """Iterate over the keys of this moment. Later changes do not affect the iteration."""
        return iter([key for _, key in self._order])

    def put(self, key: ObjectKey, created: str) -> None:
        """Add a key, or change its time. Cost: O(log n) comparisons.

        Does nothing if the key has this time already.
        """
        if self._created.get(key) == created:
            return
        self.drop(key)
        self._created[key] = created
        insort(self._order, (created, key))

    def drop(self, key: ObjectKey) -> None:
        """Remove a key, if it is there. Cost: O(log n) comparisons."""
        created = self._created.pop(key, None)
        if created is not None:
            del self._order[bisect_left(self._order, (created, key))]
