"""The strategy beyond bitset width: search in the order of fitness, within a budget.

Both phases are knapsacks in general, and trivial on real machines, where many nodes are alike or
empty. A search that its budget cuts reports that, and returns the best answer found, or a valid one
that is easy to find. Up to bitset width the search runs first with a small budget, because where it
proves its answer it is faster than the bitset.

Combinations grow with width, so the target width is always reached
(docs/knowledge/topology-merge.md#lemma-a) and the question is only which nodes can be left out
together. Extras and lists do not grow: their masks are tried one by one beside it, and the answer
is marked as not proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb

from topobus.engine.alignment.merge.fitness import Fit, width_class
from topobus.engine.alignment.merge.hint_list import HintMasks
from topobus.engine.alignment.merge.hint_rule import HintRule
from topobus.engine.alignment.merge.mask_algebra import positions

__all__ = ["SEARCH_BUDGET", "find_combined", "find_common", "find_reachable"]

SEARCH_BUDGET = 20_000
"""Masks or states looked at in one search, at about a microsecond each."""
# Masks of lists and extras that are kept at most, the fittest ones.
_MASKS = 2_000


def find_common(
    rules: Sequence[HintRule], common: int, size: int, fit: Fit, most: int, *, is_closest: bool
) -> tuple[list[int], bool]:
    """Find masks of `size` nodes that are hints of all rules, fittest first.

    Shapes: common — bits of the nodes that all rules reach; result — at most `most` masks, and
            whether the first is proved the fittest.
    """
    masks = {
        mask
        for rule in rules
        for mask in rule.extras
        if mask.bit_count() == size and all(other.has(mask) for other in rules)
    }
    for rule in rules:
        common &= rule.nodes
    order = positions(common)
    is_exact = True
    if comb(len(order), size) <= SEARCH_BUDGET:
        sets = (sum(1 << node for node in chosen) for chosen in combinations(order, size))
        masks |= {mask for mask in sets if all(rule.has(mask) for rule in rules)}
    else:
        search = _Lowest(rules, order)
        lowest = search.find(size)
        masks |= {lowest} - {0}
        is_exact = search.budget > 0 and not is_closest
    return sorted(masks, key=fit)[:most], is_exact


class _Lowest:
    """The combination of smallest value with so many nodes for all rules: decide node by node from
    the highest, leaving out where possible.
    """

    def __init__(self, rules: Sequence[HintRule], order: Sequence[int]) -> None:
        self.rules = rules
        self.order = order
        self.budget = SEARCH_BUDGET

    def find(self, size: int) -> int:
        """The mask, or 0."""
        return self._descend(len(self.order), size, 0)

    def _descend(self, left: int, size: int, chosen: int) -> int:
        """Choose `size` more out of the `left` lowest nodes."""
        self.budget -= 1
        if self.budget < 0 or size > left or not all(self._can(rule, left, size, chosen) for rule in self.rules):
            return 0
        if size == 0:
            return chosen
        return self._descend(left - 1, size, chosen) or self._descend(
            left - 1, size - 1, chosen | 1 << self.order[left - 1]
        )

    def _can(self, rule: HintRule, left: int, size: int, chosen: int) -> bool:
        """Say whether a rule alone could still be met, by its musts and its best nodes of those
        left.
        """
        below = sum(1 << node for node in self.order[:left]) if size else 0
        if not all(must & (chosen | below) for must in rule.musts):
            return False
        have = rule.free_in(chosen)
        gains = [rule.lanes(rule.free_in(chosen | 1 << node) - have) for node in self.order[:left]]
        return all(
            amount + sum(sorted((gain[kind] for gain in gains), reverse=True)[:size]) >= wanted
            for kind, (amount, wanted) in enumerate(zip(rule.lanes(have), rule.lanes(rule.request), strict=True))
        )


def find_reachable(
    families: Sequence[HintRule | HintMasks], window: int, width: int, fit: Fit, *, is_closest: bool
) -> tuple[int, bool]:
    """Find the fittest intersection of one mask from each family that a bounded search can find.

    Shapes: result — bits of ids, 0 for none, and whether it is proved.
    """
    rules = [family for family in families if isinstance(family, HintRule)]
    lists = [family for family in families if isinstance(family, HintMasks)]
    is_exact = not (lists and rules) and not any(rule.extras for rule in rules)
    reached_masks = {window}
    # A rule can be met by all that it combines, so every mask that a list or the extras offer is
    # reachable unchanged, clipped to the window.
    offers = [[*family.masks, *([window] if family.is_open else [])] for family in lists]
    offers += [[*rule.extras, *([rule.nodes] if rule.is_combining else [])] for rule in rules if rule.extras]
    for masks in offers:
        is_exact = is_exact and len(masks) <= _MASKS
        ranked = sorted({mask & reached for mask in masks[:_MASKS] for reached in reached_masks} - {0}, key=fit)
        is_exact = is_exact and len(ranked) <= _MASKS
        reached_masks = set(ranked[:_MASKS])
    wide = window
    for rule in rules:
        wide &= rule.nodes
    if not lists and wide and all(rule.is_combining for rule in rules):
        order = positions(wide)
        size = min(max(width, 1), len(order))
        mask, is_proved = find_combined(rules, order, size, fit, is_closest=is_closest, budget=SEARCH_BUDGET)
        is_exact = is_exact and is_proved
        if mask.bit_count() >= max(rule.least for rule in rules):
            reached_masks.add(mask)
    return min(reached_masks, key=lambda mask: (width_class(mask.bit_count(), width), fit(mask)), default=0), is_exact


def find_combined(
    rules: Sequence[HintRule], order: Sequence[int], size: int, fit: Fit, *, is_closest: bool, budget: int
) -> tuple[int, bool]:
    """Find the fittest mask of `size` nodes that is an intersection of one combination from each
    rule.

    It exists, since combinations grow with width (docs/knowledge/topology-merge.md#lemma-a). The
    nodes left out are shared among the rules: each does without some.

    Shapes: result — the mask, and whether it is proved the fittest.
    """
    sharing = _Sharing(rules, order, budget)
    window = sum(1 << node for node in order)
    if is_closest and comb(len(order), size) <= budget:
        for mask in sorted((sum(1 << node for node in chosen) for chosen in combinations(order, size)), key=fit):
            is_met = any(rule.combines(mask | rule.nodes & ~window) for rule in rules)
            if is_met or sharing.can_leave_out(positions(window & ~mask), 0, ()):
                return mask, sharing.is_exact
        mask = window
    else:
        mask = sharing.lowest(size)
    if mask.bit_count() > size:
        return _some_of_width(rules, order, size) or mask, False
    return mask, sharing.is_exact and not is_closest


def _some_of_width(rules: Sequence[HintRule], order: Sequence[int], size: int) -> int:
    """Find a valid mask of `size` nodes, whatever its fitness: a narrow combination of one rule,
    and all nodes that the others combine. 0 when none is found.
    """
    window = sum(1 << node for node in order)
    for rule in rules:
        narrow = _Lowest([rule], positions(rule.nodes)).find(rule.combination_width or 0)
        if narrow and (narrow & window).bit_count() <= size:
            kept = narrow & window
            others = [node for node in order if not kept >> node & 1]
            return kept | sum(1 << node for node in others[: size - kept.bit_count()])
    return 0


class _Sharing:
    """Which nodes can be left out together: each is charged to a rule that can do without it
    (docs/knowledge/topology-merge.md#lemma-d).
    """

    def __init__(self, rules: Sequence[HintRule], order: Sequence[int], budget: int) -> None:
        self.rules = rules
        self.order = order
        self.budget = budget
        self.guards = tuple(rule.guards for rule in rules)
        self.spares = tuple(rule.spare_of(rule.free_in(rule.nodes)) for rule in rules)
        # A unit on several nodes is charged to each of them: then the answer is a right
        # one, but perhaps not the fittest.
        self.is_exact = all(rule.is_additive for rule in rules)
        self.amounts = {
            node: tuple(
                None if any(must >> node & 1 for must in rule.musts) else rule.free_by_node[node] for rule in rules
            )
            for node in order
        }
        self.cost = {
            node: min((amount for amount in amounts if amount is not None), default=1 << 62)
            for node, amounts in self.amounts.items()
        }

    def can_leave_out(self, nodes: Sequence[int], more: int, rest: Sequence[int]) -> bool:
        """Say whether all of these nodes and so many more of the rest can be left out together."""
        # The nodes that are hardest to charge go first, the cheapest of the rest after them.
        hard = sorted(nodes, key=lambda node: (-self.cost[node], node))
        cheap = sorted(rest, key=lambda node: (self.cost[node], node))
        return self._charge(hard, cheap, 0, more, self.spares, set())

    def _charge(
        self,
        hard: Sequence[int],
        cheap: Sequence[int],
        place: int,
        more: int,
        spares: tuple[int, ...],
        failed: set[tuple[int, int, tuple[int, ...]]],
    ) -> bool:
        if place >= len(hard) and more == 0:
            return True
        if place - len(hard) + more > len(cheap) or (place, more, spares) in failed:
            return False
        self.budget -= 1
        if self.budget < 0:
            self.is_exact = False
            return False
        is_hard = place < len(hard)
        node = hard[place] if is_hard else cheap[place - len(hard)]
        for charged in self._charges(node, spares):
            if self._charge(hard, cheap, place + 1, more if is_hard else more - 1, charged, failed):
                return True
        if (
            not is_hard
            and self._most_left_out(cheap[place - len(hard) + 1 :], spares) >= more
            and self._charge(hard, cheap, place + 1, more, spares, failed)
        ):
            return True
        failed.add((place, more, spares))
        return False

    def _most_left_out(self, nodes: Sequence[int], spares: tuple[int, ...]) -> int:
        """At most how many of the nodes could be left out, each rule taking its cheapest ones on
        its own, kind by kind.
        """
        most = 0
        for which, (rule, spare) in enumerate(zip(self.rules, spares, strict=True)):
            amounts = [amount for node in nodes if (amount := self.amounts[node][which]) is not None]
            if rule.kinds == 1:
                most += _count_within(sorted(amounts), spare)
                continue
            lanes = [rule.lanes(amount) for amount in amounts]
            most += min(
                _count_within(sorted(lane[kind] for lane in lanes), left) for kind, left in enumerate(rule.lanes(spare))
            )
        return min(most, len(nodes))

    def _charges(self, node: int, spares: tuple[int, ...]) -> list[tuple[int, ...]]:
        """What is left after charging the node to each rule that can do without it.

        Only a free charge, when there is one.
        """
        charges: list[tuple[int, ...]] = []
        for which, amount in enumerate(self.amounts[node]):
            if amount == 0:
                return [spares]
            if amount is None:
                continue
            left, guards = spares[which] - amount, self.guards[which]
            if left >= 0 and left & guards == guards:
                charges.append((*spares[:which], left, *spares[which + 1 :]))
        return sorted(
            set(charges),
            key=lambda charged: -sum(1 for before, after in zip(spares, charged, strict=True) if after * 2 >= before),
        )

    def lowest(self, size: int) -> int:
        """The reachable mask of smallest value: leave out from the highest node down wherever the
        rest can still be met.
        """
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


def _count_within(amounts: Sequence[int], left: int) -> int:
    """How many of the ascending amounts can be subtracted before the rest falls below zero."""
    for count, amount in enumerate(amounts):
        left -= amount
        if left < 0:
            return count
    return len(amounts)
