"""The two phases of the merge where more nodes than a bitset holds are in play: search in the order of fitness, within a budget.

Both problems are knapsacks in general, and trivial on real machines, where many nodes are alike or empty. A search that its budget cuts says so
(`is_exact` False) and gives the best answer found, or a right one that is easy to find.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb

from topobus.domain.alignment.merge.hint_lists import Fit
from topobus.domain.alignment.merge.hint_rule import HintRule

__all__ = ["find_preferred", "find_reachable"]

# Masks or states looked at in one search, at about a microsecond each.
_BUDGET = 20_000
_TIED_SHOWN = 8


def find_preferred(families: Sequence[HintRule], order: Sequence[int], size: int, fit: Fit, *, is_closest: bool) -> tuple[list[int], bool]:
    """Find masks of `size` nodes that are feasible for all, fittest first: a few of them, or none."""
    if comb(len(order), size) <= _BUDGET:
        masks = [
            mask
            for chosen in combinations(order, size)
            if all(family.has(mask := sum(1 << node for node in chosen)) for family in families)
        ]
        return sorted(masks, key=fit)[: _TIED_SHOWN + 1], True
    search = _Lowest(families, order)
    mask = search.find(size)
    return ([mask] if mask else []), search.budget > 0 and not is_closest


class _Lowest:
    """The mask of smallest value with so many nodes that is feasible for all: decide node by node from the highest, leaving out where possible."""

    def __init__(self, families: Sequence[HintRule], order: Sequence[int]) -> None:
        self.families = families
        self.order = order
        self.budget = _BUDGET

    def find(self, size: int) -> int:
        """The mask, or 0."""
        return self._descend(len(self.order), size, 0)

    def _descend(self, left: int, size: int, chosen: int) -> int:
        """Choose `size` more out of the `left` lowest nodes."""
        self.budget -= 1
        if self.budget < 0 or size > left or not self._can(left, size, chosen):
            return 0
        if size == 0:
            return chosen
        return self._descend(left - 1, size, chosen) or self._descend(left - 1, size - 1, chosen | 1 << self.order[left - 1])

    def _can(self, left: int, size: int, chosen: int) -> bool:
        """Say whether each family alone could still be met: its musts, and its best nodes of those left."""
        for family in self.families:
            below = 0
            for node in self.order[:left]:
                below |= 1 << node
            if not all(must & (chosen | below) for must in family.musts):
                return False
            gains = sorted((family.free_in(chosen | 1 << node) - family.free_in(chosen) for node in self.order[:left]), reverse=True)
            if family.free_in(chosen) + sum(gains[:size]) < family.request:
                return False
        return True


def find_reachable(
    families: Sequence[HintRule], order: Sequence[int], size: int, fit: Fit, *, is_closest: bool, budget: int = _BUDGET
) -> tuple[int, bool]:
    """Find the fittest mask of `size` nodes that is an intersection of one mask from each family, and say whether that is proved.

    It exists, since families grow with width (lemma A). The nodes left out are shared among the families: each does without some.
    """
    sharing = _Sharing(families, order, budget)
    if is_closest and comb(len(order), size) <= budget:
        whole = sum(1 << node for node in order)
        masks = sorted((sum(1 << node for node in chosen) for chosen in combinations(order, size)), key=fit)
        for mask in masks:
            if sharing.can_leave_out(_split(whole & ~mask, order), 0, ()):
                return mask, sharing.is_exact
        return masks[0], False
    mask = sharing.lowest(size)
    return mask, sharing.is_exact and not is_closest


def _split(bits: int, order: Sequence[int]) -> list[int]:
    return [node for node in order if bits >> node & 1]


class _Sharing:
    """Which nodes can be left out together: each is charged to a family that can do without it."""

    def __init__(self, families: Sequence[HintRule], order: Sequence[int], budget: int) -> None:
        self.order = order
        self.budget = budget
        self.slack = tuple(family.free_in(family.candidates) - family.request for family in families)
        # A unit on several nodes would be charged to each of them: then the answer is a right one, but perhaps not the fittest.
        self.is_exact = all(family.is_simple and all(must & (must - 1) == 0 for must in family.musts) for family in families)
        self.amounts: dict[int, tuple[int | None, ...]] = {}
        for node in order:
            bit = 1 << node
            self.amounts[node] = tuple(
                None if any(must & bit for must in family.musts) else sum(unit.free for unit in family.units if unit.where & bit)
                for family in families
            )
        self.cost = {
            node: min((amount for amount in amounts if amount is not None), default=1 << 62) for node, amounts in self.amounts.items()
        }

    def can_leave_out(self, nodes: Sequence[int], more: int, rest: Sequence[int]) -> bool:
        """Say whether all of these nodes and so many more of the rest can be left out together."""
        # The nodes that are hardest to charge go first, the cheapest of the rest after them.
        hard = sorted(nodes, key=lambda node: (-self.cost[node], node))
        cheap = sorted(rest, key=lambda node: (self.cost[node], node))
        return self._charge(hard, cheap, 0, more, self.slack, set())

    def _charge(
        self,
        hard: Sequence[int],
        cheap: Sequence[int],
        place: int,
        more: int,
        slack: tuple[int, ...],
        failed: set[tuple[int, int, tuple[int, ...]]],
    ) -> bool:
        if place >= len(hard) and more == 0:
            return True
        if place - len(hard) + more > len(cheap) or (place, more, slack) in failed:
            return False
        self.budget -= 1
        if self.budget < 0:
            self.is_exact = False
            return False
        is_hard = place < len(hard)
        node = hard[place] if is_hard else cheap[place - len(hard)]
        for charged in self._charges(node, slack):
            if self._charge(hard, cheap, place + 1, more if is_hard else more - 1, charged, failed):
                return True
        if (
            not is_hard
            and self._reach(cheap[place - len(hard) + 1 :], slack) >= more
            and self._charge(hard, cheap, place + 1, more, slack, failed)
        ):
            return True
        failed.add((place, more, slack))
        return False

    def _reach(self, rest: Sequence[int], slack: tuple[int, ...]) -> int:
        """At most how many of the rest could be left out, each family taking its cheapest ones on its own."""
        reach = 0
        for which, left in enumerate(slack):
            for amount in sorted(one for node in rest if (one := self.amounts[node][which]) is not None):
                left -= amount
                if left < 0:
                    break
                reach += 1
        return min(reach, len(rest))

    def _charges(self, node: int, slack: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The slack left after charging the node to each family that can bear it; a free charge alone, when there is one."""
        found: list[tuple[int, ...]] = []
        for which, amount in enumerate(self.amounts[node]):
            if amount is None or amount > slack[which]:
                continue
            if amount == 0:
                return [slack]
            found.append((*slack[:which], slack[which] - amount, *slack[which + 1 :]))
        return sorted(set(found), key=lambda charged: -sum(1 for before, after in zip(slack, charged, strict=True) if after * 2 >= before))

    def lowest(self, size: int) -> int:
        """The reachable mask of smallest value: leave out from the highest node down wherever the rest can still be done."""
        kept: list[int] = []
        left_out: list[int] = []
        rest = list(self.order)
        wanted_out = len(self.order) - size
        while rest:
            node = rest.pop()
            missing = wanted_out - len(left_out)
            if missing > 0 and self.can_leave_out([*left_out, node], missing - 1, rest):
                left_out.append(node)
            else:
                kept.append(node)
        return sum(1 << node for node in kept)
