"""Find how kubelet's `distribute-cpus-across-numa` shares CPUs over NUMA nodes.

`compatible` reproduces a defect: kubelet keeps slices that the enumeration later overwrites, so for
some widths it allocates on nodes that it never scored (k/k 141237).
Source: kubelet 1.36 cm/cpumanager/cpu_assignment.go, takeByTopologyNUMADistributed and
iterateCombinations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

__all__ = ["find_spread"]

# Node combinations scored at most; kubelet has no bound (C(64, 32) is 1.8e18).
# Beyond, the best so far is used.
_COMBINATION_BUDGET = 200_000


class _Slice:
    """A Go slice: a length over a backing array that others may share and overwrite."""

    __slots__ = ("array", "length")

    def __init__(self, array: list[int], length: int) -> None:
        self.array = array
        self.length = length

    def append(self, value: int) -> _Slice:
        """Append as Go does: in place while the array has room, else into a copy with twice the
        room (0, 1, 2, 4, 8 … for small arrays).
        """
        array = self.array
        if self.length == len(array):
            array = [*array, *([0] * max(1, len(array)))]
        array[self.length] = value
        return _Slice(array, self.length + 1)

    def values(self) -> list[int]:
        """The present values of the slice."""
        return self.array[: self.length]


def find_spread(
    amounts: Mapping[int, int],
    count: int,
    group: int,
    *,
    total_nodes: int,
    total_cpus: int,
    floor: int = 0,
    is_corrected: bool = False,
) -> list[tuple[int, int]] | None:
    """Share `count` CPUs in groups over as few nodes as give equal shares, best balance first.

    Shapes: amounts — free CPUs by node, in kubelet's order; total_* — of the whole machine; floor —
            fewest nodes to use.
    Result: (node, CPUs) in the order of taking. None when no combination works (the caller packs
            instead).
    """
    nodes = list(amounts)
    groups_a_node = ((total_cpus - 1) // group + 1 - 1) // total_nodes + 1
    groups_wanted = (count - 1) // group + 1
    most = min(groups_wanted, len(nodes))
    budget = _COMBINATION_BUDGET
    for width in range(min(max((groups_wanted - 1) // groups_a_node + 1, floor), most), most + 1):
        best_balance = math.inf
        best: tuple[_Slice, _Slice | None] | None = None
        for combination in _combinations(nodes, width, is_corrected=is_corrected):
            if best_balance == 0 or budget <= 0:
                break
            budget -= 1
            scored = _score(amounts, combination.values(), count, group, is_corrected=is_corrected)
            if scored is not None and scored[0] < best_balance:
                best_balance, remainder = scored
                best = (combination, remainder)
        if best is not None:
            return _shares(amounts, best[0].values(), best[1].values() if best[1] is not None else [], count, group)
    return None


def _combinations(nodes: Sequence[int], width: int, *, is_corrected: bool) -> Iterator[_Slice]:
    def descend(start: int, left: int, chosen: _Slice) -> Iterator[_Slice]:
        if left == 0:
            yield _Slice(chosen.values(), chosen.length) if is_corrected else chosen
            return
        for place in range(start, len(nodes) - left + 1):
            yield from descend(place + 1, left - 1, chosen.append(nodes[place]))

    yield from descend(0, width, _Slice([], 0))


def _score(
    amounts: Mapping[int, int], combination: Sequence[int], count: int, group: int, *, is_corrected: bool
) -> tuple[float, _Slice | None] | None:
    """The balance of the free CPUs after taking, and which nodes give the remainder.

    None when the combination cannot provide the CPUs.
    """
    if sum(amounts[node] // group for node in combination) * group < count:
        return None
    share = count // len(combination) // group * group
    if any(amounts[node] < share for node in combination):
        return None
    after = dict(amounts)
    for node in combination:
        after[node] -= share
    remainder = count - share * len(combination)
    if remainder == 0:
        return _deviation(list(after.values())), None
    givers = [node for node in combination if after[node] >= group]
    best: tuple[float, _Slice | None] = (math.inf, None)
    for width in range(len(givers), 0, -1):
        for subset in _combinations(givers, width, is_corrected=is_corrected):
            givers_in_turn = _givers_in_turn(after, subset.values(), remainder, group)
            if givers_in_turn is None:
                continue
            left = dict(after)
            for node in givers_in_turn:
                left[node] -= group
            balance = _deviation(list(left.values()))
            if balance < best[0]:
                best = (balance, subset)
    return best if best[1] is not None else None


def _givers_in_turn(after: Mapping[int, int], subset: Sequence[int], remainder: int, group: int) -> list[int] | None:
    """The nodes that give the remainder, a whole group each, in turn.

    kubelet 1.36 never leaves its loop where no node can give one. This function returns None
    instead.
    """
    wanted = -(-remainder // group)
    turns = (node for turn in range(wanted) for node in subset if after[node] // group > turn)
    givers = list(islice(turns, wanted))
    return givers if len(givers) == wanted else None


def _shares(
    amounts: Mapping[int, int], combination: Sequence[int], givers: Sequence[int], count: int, group: int
) -> list[tuple[int, int]] | None:
    share = count // len(combination) // group * group
    left = dict(amounts)
    for node in combination:
        left[node] -= share
    givers_in_turn = _givers_in_turn(left, givers, count - share * len(combination), group)
    shares = [(node, share) for node in combination]
    return [*shares, *((node, group) for node in givers_in_turn)] if givers_in_turn is not None else None


def _deviation(values: Sequence[int]) -> float:
    mean = _round3(sum(values) / len(values))
    return _round3(math.sqrt(sum((value - mean) * (value - mean) for value in values) / len(values)))


def _round3(value: float) -> float:
    # Go's math.Round goes half away from zero, Python's round to even.
    return math.floor(value * 1000 + 0.5) / 1000
