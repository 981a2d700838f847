"""Computes by how much counters that only grow have risen since the last look.

The rise is the evidence, so the first look only records the count. A count that fell was reset (a
driver was loaded again): it has not risen.
"""

from __future__ import annotations

__all__ = ["CounterRises"]


class CounterRises:
    """The counts of the last look. One instance per driver, kept over looks."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def rise(self, key: str, count: int | None) -> int:
        """Return the rise since the last look with this key.

        0 at the first one, and when nothing is known.

        >>> counters = CounterRises()
        >>> [counters.rise("ue", count) for count in (4, 4, 6, None, 7, 1, 2)]
        [0, 0, 2, 0, 1, 0, 1]
        """
        if count is None:
            return 0
        before = self._counts.get(key)
        self._counts[key] = count
        return max(0, count - before) if before is not None else 0
