"""The exact strategy: all masks over the window at once, as bits of one integer.

The window is the nodes that the hints of all resources have in common
(docs/knowledge/topology-merge.md#lemma-b). Up to `BITSET_LIMIT` nodes its 2^n masks fit an integer.
The reachable masks are built resource by resource. Where a resource may combine nodes freely, they
are built from the nodes that can be left out: each resource can do without nodes worth its spare
amounts, and the nodes left out together are the union of those that each leaves out
(docs/knowledge/topology-merge.md#lemma-d).
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.engine.alignment.merge.fitness import Fit, width_class
from topobus.engine.alignment.merge.hint_list import HintMasks
from topobus.engine.alignment.merge.hint_rule import HintRule
from topobus.engine.alignment.merge.mask_algebra import MaskAlgebra, first, members, reverse, unpack
from topobus.values.errors import InvariantError

__all__ = ["fittest_common", "fittest_reachable"]

# Masks up to which each is simply looked at.
_FEW = 256
# Amounts that the nodes left out may add up to: each is a family of masks. Beyond, whole
# families are intersected instead.
_SUMS_LIMIT = 512


def fittest_common(
    rules: Sequence[HintRule], order: Sequence[int], fit: Fit, most: int, *, is_closest: bool
) -> list[int]:
    """Return masks inside the nodes of `order` that all rules prefer, fittest first: those of the
    smallest width, `most` at most, or none.
    """
    algebra = MaskAlgebra(len(order))
    family = algebra.everything
    for rule in rules:
        family &= rule.preferred_inside(algebra, order)
        if not family:
            return []
    narrowest = next(layer & family for layer in algebra.layers if layer & family)
    if is_closest:
        return sorted((unpack(mask, order) for mask in members(narrowest)), key=fit)[:most]
    # All have one width, so the value decides.
    return [unpack(mask, order) for mask, _ in zip(members(narrowest), range(most), strict=False)]


def fittest_reachable(
    families: Sequence[HintRule | HintMasks], order: Sequence[int], width: int, fit: Fit, *, is_closest: bool
) -> int:
    """Return the fittest non-empty intersection of one mask from each family (bits of ids).

    Shapes: order — the window's node ids, ascending; width — the target width.
    Errors: raises InvariantError when the families have no non-empty intersection inside the
            window.
    Cost: O(nodes x families x different amounts) operations on 2^nodes bits.
    """
    algebra = MaskAlgebra(len(order))
    # The costliest family goes first, where its masks are the reachable ones without any operation.
    steps = sorted((_Step(family, algebra, order) for family in families), key=lambda step: -step.cost)
    reached = steps[0].family.clipped(algebra, order)
    dense = [step for step in steps[1:] if step.cost > _SUMS_LIMIT]
    for step in dense:
        reached = algebra.intersections(reached, step.family.clipped(algebra, order))
    if len(steps) > 1 + len(dense):
        without = reverse(reached, algebra.n)
        for step in steps[1 + len(dense) :]:
            without = step.leave_out(without)
        reached = reverse(without, algebra.n)
    sizes = [size for size in range(1, len(order) + 1) if algebra.layers[size] & reached]
    if not sizes:
        raise InvariantError("a family reaches a node that none of its masks has", order=order)
    size = min(sizes, key=lambda count: width_class(count, width))
    layer = algebra.layers[size] & reached
    return _closest(layer, size, order, fit) if is_closest else unpack(first(layer), order)


class _Step:
    """One family to be intersected with the masks that are reachable so far."""

    __slots__ = ("algebra", "amounts", "cost", "family", "order", "spare")

    def __init__(self, family: HintRule | HintMasks, algebra: MaskAlgebra, order: Sequence[int]) -> None:
        self.family = family
        self.algebra = algebra
        self.order = order
        self.spare = 0
        self.amounts: list[int | None] = []
        """What leaving a node out takes off the spare amounts; None where it must stay, or is in no
        combination anyway."""
        self.cost = self._weigh(family) if isinstance(family, HintRule) else _SUMS_LIMIT + 1

    def _weigh(self, rule: HintRule) -> int:
        """Count the different amounts that leaving nodes out can add up to.

        Above the limit for a rule that sums do not describe.
        """
        if not rule.is_additive or not rule.is_combining:
            return _SUMS_LIMIT + 1
        self.spare = rule.spare_of(rule.free_in(rule.nodes))
        guards, free, musts = rule.guards, rule.free_by_node, sum(set(rule.musts))
        spares = {self.spare}
        for node in self.order:
            amount = free.get(node)
            if amount is None or musts >> node & 1 or not rule.is_left(self.spare - amount):
                self.amounts.append(None)
                continue
            self.amounts.append(amount)
            if amount and len(spares) <= _SUMS_LIMIT:
                spares |= {left for spare in spares if (left := spare - amount) >= 0 and left & guards == guards}
        return len(spares)

    def leave_out(self, without: int) -> int:
        """Turn the sets of nodes that the families so far can leave out together into those that
        all can with this one.
        """
        rule = self.family
        assert isinstance(rule, HintRule), "lists are intersected as they are"
        extras = (
            self.algebra.intersections(reverse(without, self.algebra.n), rule.clipped_extras(self.order))
            if rule.extras
            else 0
        )
        for position, node in enumerate(self.order):
            if not rule.nodes >> node & 1:
                without = self.algebra.with_position(without, position)
        levels = {self.spare: without}
        guards, algebra = rule.guards, self.algebra
        for position, amount in enumerate(self.amounts):
            if amount is None:
                continue
            # Each node is left out once at most, so its contribution is computed from the levels as
            # they were.
            half, having = 1 << position, algebra.having[position]
            for spare, family in tuple(levels.items()):
                left = spare - amount
                if left >= 0 and left & guards == guards:
                    levels[left] = levels.get(left, 0) | (family & having) | ((family & ~having) << half)
        joined = reverse(extras, self.algebra.n) if extras else 0
        for family in levels.values():
            joined |= family
        return joined


def _closest(layer: int, size: int, order: Sequence[int], fit: Fit) -> int:
    """The fittest of a family of masks that all have `size` positions, by distance: branch and
    bound where they are many.

    Masks are walked by value, so of equally near ones the first is the fittest and all others can
    be cut.
    """
    if layer.bit_count() <= _FEW:
        return min((unpack(mask, order) for mask in members(layer)), key=fit)
    alone = [fit(1 << node)[1] for node in order]
    pairs = [
        [
            fit(1 << node | 1 << other)[1] - alone[row] - alone[column] if node != other else 0
            for column, other in enumerate(order)
        ]
        for row, node in enumerate(order)
    ]
    nearest = min(pairs[row][column] for row in range(len(order)) for column in range(row))
    best: tuple[int, int] | None = None

    def descend(top: int, left: int, mask: int, cost: int, adds: Sequence[int]) -> None:
        """Choose `left` more positions below `top`.

        Shapes: adds — the cost of each position beside those chosen.
        """
        nonlocal best
        if not left:
            if layer >> mask & 1 and (best is None or cost < best[0]):
                best = (cost, mask)
            return
        for position in range(left - 1, top):
            new_cost = cost + adds[position]
            rest = left - 1
            if best is not None:
                least = sum(sorted(adds[:position])[:rest]) + rest * nearest + rest * (rest - 1) // 2 * nearest
                if new_cost + least >= best[0]:
                    continue
            row = pairs[position]
            descend(
                position,
                rest,
                mask | 1 << position,
                new_cost,
                [added + row[other] for other, added in enumerate(adds[:position])],
            )

    descend(len(order), size, 0, 0, alone)
    return unpack(best[1], order) if best is not None else 0
