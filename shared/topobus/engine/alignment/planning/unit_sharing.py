"""Share units of one resource among several takers who may use different ones: is there enough for
all, and how many of what does each take?

Units are of one kind when the same takers may use them. Exact: a maximum flow between takers and
kinds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

__all__ = ["Demand", "compositions", "share"]

Demand = tuple[int, int]
"""Units that would do (bits), and how many are wanted."""


def share(available: int, demands: Sequence[Demand]) -> list[dict[int, int]] | None:
    """Give every taker what it wants, or return None when that is impossible.

    Shapes: available — the units, as bits; demands — for each taker the units that it may use, as
            bits, and how many it wants.
    Result: one map for each taker: the units of a kind (bits) to how many of them it takes.
    Cost: O(takers x kinds) per path. Nothing is searched where one taker's units lie apart from all
            others'.

    >>> share(0b111, [(0b011, 1), (0b001, 1), (0b110, 1)])
    [{2: 1}, {1: 1}, {4: 1}]
    >>> share(0b011, [(0b011, 1), (0b001, 1), (0b010, 1)]) is None
    True
    """
    wanted = [count for _, count in demands]
    if sum(wanted) > available.bit_count() or any(
        count > (available & allowed).bit_count() for allowed, count in demands
    ):
        return None
    kinds = _kinds(available, {allowed for allowed, count in demands if count})
    remaining = [kind.bit_count() for kind in kinds]
    taken: list[dict[int, int]] = [{} for _ in demands]
    usable = [[place for place, kind in enumerate(kinds) if kind & allowed] for allowed, _ in demands]
    for taker, count in enumerate(wanted):
        left = count
        while left:
            moved = _augment(taker, left, usable, taken, remaining)
            if not moved:
                return None
            left -= moved
    return [{kinds[place]: count for place, count in sorted(kinds_taken.items()) if count} for kinds_taken in taken]


def compositions(kinds: Sequence[int], count: int) -> Iterator[dict[int, int]]:
    """Every way to take `count` units out of kinds (bits), as many as possible of the first ones
    first.

    >>> list(compositions([0b011, 0b100], 2))
    [{3: 2, 4: 0}, {3: 1, 4: 1}]
    """
    if not kinds:
        if count == 0:
            yield {}
        return
    for most in range(min(count, kinds[0].bit_count()), -1, -1):
        for rest in compositions(kinds[1:], count - most):
            yield {kinds[0]: most, **rest}


def _kinds(available: int, sets: set[int]) -> list[int]:
    """Split the units by the takers that may use them. Units that no taker may use are left out."""
    kinds = [available]
    union = 0
    for allowed in sorted(sets):
        union |= allowed
        kinds = [part for kind in kinds for part in (kind & allowed, kind & ~allowed) if part]
    return sorted(kind for kind in kinds if kind & union)


def _augment(
    start: int, most: int, usable: Sequence[Sequence[int]], taken: list[dict[int, int]], remaining: list[int]
) -> int:
    """Find a shortest way to a kind with room, moving other takers to other kinds.

    Move along it and return how many units were moved.
    """
    came_from: dict[int, tuple[int, int]] = {}
    reached: dict[int, int] = {}
    queue = deque([start])
    seen = {start}
    while queue:
        taker = queue.popleft()
        for kind in usable[taker]:
            if kind in reached:
                continue
            reached[kind] = taker
            if remaining[kind]:
                return _move(kind, start, most, came_from, reached, taken, remaining)
            for other, kinds_taken in enumerate(taken):
                if other not in seen and kinds_taken.get(kind):
                    seen.add(other)
                    came_from[other] = (taker, kind)
                    queue.append(other)
    return 0


def _move(
    kind: int,
    start: int,
    most: int,
    came_from: dict[int, tuple[int, int]],
    reached: dict[int, int],
    taken: list[dict[int, int]],
    remaining: list[int],
) -> int:
    steps: list[tuple[int, int, int | None]] = []
    taker, target = reached[kind], kind
    amount = min(most, remaining[kind])
    while taker != start:
        _, lost = came_from[taker]
        amount = min(amount, taken[taker][lost])
        steps.append((taker, target, lost))
        taker, target = came_from[taker][0], lost
    steps.append((taker, target, None))
    remaining[kind] -= amount
    for taker_of_step, gained, lost_ in steps:
        taken[taker_of_step][gained] = taken[taker_of_step].get(gained, 0) + amount
        if lost_ is not None:
            taken[taker_of_step][lost_] -= amount
    return amount
