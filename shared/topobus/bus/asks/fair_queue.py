"""A bounded queue in which no asker waits behind the many requests of another one.

Each item belongs to an asker, has a weight, and each asker belongs to a group (its principal).
Items leave group by group in turn, within a group asker by asker, and for one asker in the order of
sending. When the queue is full, a newcomer takes the place of the newest item of the heaviest asker
in the heaviest group, unless that is the newcomer itself. No I/O and no clock: the order depends
only on the order of calls.

An asker chooses its own name, so one program may use several names. It then takes turns only from
askers of its own group, because the server's permissions prove the group.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Asker", "FairQueue"]

T = TypeVar("T")

Asker = tuple[str, str]
"""Group and name of who asks."""


@dataclass
class _Line(Generic[T]):
    """The waiting items of one asker."""

    items: deque[tuple[T, int]] = field(default_factory=deque)
    weight: int = 0


@dataclass
class _Group(Generic[T]):
    lines: OrderedDict[str, _Line[T]] = field(default_factory=OrderedDict)
    weight: int = 0


class FairQueue(Generic[T]):
    """Items that wait for their turn.

    Args: most — the weight of all that may wait together.

    >>> queue = FairQueue[str](most=3)
    >>> [queue.put(("cli", "greedy"), 1, f"g{number}") for number in range(3)], queue.put(("cli", "modest"), 1, "m0")
    ([[], [], []], ['g2'])
    >>> [queue.take() for _ in range(4)]
    ['g0', 'm0', 'g1', None]
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._groups: OrderedDict[str, _Group[T]] = OrderedDict()
        self._weight = 0
        self._count = 0

    def __len__(self) -> int:
        """Count the items that wait."""
        return self._count

    def put(self, asker: Asker, weight: int, item: T) -> list[T]:
        """Add an item, and return the items that lose their place, possibly the new one.

        Cost: O(1) while there is room; O(groups + askers of one group) for each item that must go.
        """
        lost: list[T] = []
        while self._weight + weight > self._most:
            heaviest = self._heaviest(asker, weight)
            if heaviest is None:
                return [*lost, item]
            lost.append(self._remove_newest(heaviest))
        group_name, name = asker
        group = self._groups.setdefault(group_name, _Group())
        line = group.lines.setdefault(name, _Line())
        line.items.append((item, weight))
        self._add(group, line, weight, 1)
        return lost

    def take(self) -> T | None:
        """Remove and return the next item. None when the queue is empty."""
        if not self._groups:
            return None
        group_name, group = next(iter(self._groups.items()))
        name, line = next(iter(group.lines.items()))
        item, weight = line.items.popleft()
        self._add(group, line, -weight, -1)
        # Behind all others of its kind; an empty one leaves, and comes back
        # at the end with its next item.
        group.lines.move_to_end(name)
        self._groups.move_to_end(group_name)
        self._drop_empty((group_name, name))
        return item

    def discard(self, asker: Asker, item: T) -> None:
        """Remove an item that waits no longer. An item that is not in the queue is no error."""
        group = self._groups.get(asker[0])
        line = group.lines.get(asker[1]) if group is not None else None
        if group is None or line is None:
            return
        for position, (waiting, weight) in enumerate(line.items):
            if waiting is item:
                del line.items[position]
                self._add(group, line, -weight, -1)
                self._drop_empty(asker)
                return

    def _heaviest(self, newcomer: Asker, weight: int) -> Asker | None:
        """Name the asker that loses a place to a newcomer.

        None when no asker has more weight waiting than the newcomer would have. A group, or an
        asker, must have more than the newcomer's would have afterwards. Otherwise two of one weight
        would replace each other without end.
        """
        own_group = self._groups.get(newcomer[0])
        own_weight = (own_group.weight if own_group is not None else 0) + weight
        group_name, group = max(self._groups.items(), key=lambda entry: entry[1].weight, default=("", None))
        if group is None:
            return None
        if group_name != newcomer[0] and group.weight > own_weight:
            return group_name, max(group.lines.items(), key=lambda entry: entry[1].weight)[0]
        if own_group is None:
            return None
        own_line = own_group.lines.get(newcomer[1])
        name, line = max(own_group.lines.items(), key=lambda entry: entry[1].weight)
        return (newcomer[0], name) if line.weight > (own_line.weight if own_line is not None else 0) + weight else None

    def _remove_newest(self, asker: Asker) -> T:
        group = self._groups[asker[0]]
        line = group.lines[asker[1]]
        item, weight = line.items.pop()
        self._add(group, line, -weight, -1)
        self._drop_empty(asker)
        return item

    def _add(self, group: _Group[T], line: _Line[T], weight: int, count: int) -> None:
        line.weight += weight
        group.weight += weight
        self._weight += weight
        self._count += count

    def _drop_empty(self, asker: Asker) -> None:
        group = self._groups[asker[0]]
        if not group.lines[asker[1]].items:
            del group.lines[asker[1]]
        if not group.lines:
            del self._groups[asker[0]]
