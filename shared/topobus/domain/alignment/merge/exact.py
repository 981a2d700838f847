"""Families of masks over the window (the nodes that all resources can use): what lies inside, what is reachable, and which of it is fittest."""

from __future__ import annotations

from collections.abc import Sequence

from topobus.domain.alignment.merge.hint_lists import Fit
from topobus.domain.alignment.merge.hint_rule import HintRule, pack, unpack
from topobus.domain.alignment.merge.mask_algebra import MaskAlgebra, first, members, reverse

__all__ = ["TIED_SHOWN", "Removable", "closest", "fittest", "lowest", "reachable", "within"]

TIED_SHOWN = 8
"""Alternatives named in a reason at most."""

# Masks up to which each is simply looked at.
_FEW = 256


def lowest(found: int, order: Sequence[int]) -> list[int]:
    """The first few masks by value; all have one width, so the value decides."""
    masks: list[int] = []
    for mask in members(found):
        masks.append(unpack(mask, order))
        if len(masks) > TIED_SHOWN:
            break
    return masks


def within(family: HintRule, universe: MaskAlgebra, order: Sequence[int]) -> int:
    """The family's masks that lie inside the window."""
    found = universe.at_least([(pack(unit.where, order), unit.free) for unit in family.units if unit.free], family.request)
    for must in family.musts:
        found &= universe.touching(pack(must, order))
    return found


def reachable(families: Sequence[HintRule], order: Sequence[int]) -> int:
    """All intersections of one mask from each family, clipped to the window, as a family over its positions."""
    universe = MaskAlgebra(len(order))
    window = 0
    for one in order:
        window |= 1 << one
    spares = [Removable(family, window, order) for family in families]
    # The resource with the most different amounts goes first, where it costs nothing.
    spares.sort(key=lambda spare: (spare.is_additive, -spare.steps))
    without = spares[0].family(universe)
    for spare in spares[1:]:
        without = spare.join(universe, without)
    return reverse(without, len(order))


class Removable:
    """What a resource can do without: the sets of window nodes whose removal leaves a feasible mask."""

    __slots__ = ("amounts", "family_", "is_additive", "order", "slack", "steps", "window")

    def __init__(self, family: HintRule, window: int, order: Sequence[int]) -> None:
        self.family_ = family
        self.window = window
        self.order = order
        self.slack = family.free_in(family.candidates) - family.request
        self.is_additive = family.is_simple and all(must & (must - 1) == 0 for must in family.musts)
        self.amounts: list[int | None] = []
        musts = 0
        for must in family.musts:
            musts |= must
        for node in order:
            amount = sum(unit.free for unit in family.units if unit.where >> node & 1)
            self.amounts.append(None if musts >> node & 1 or amount > self.slack else amount)
        self.steps = len(self._sums()) if self.is_additive else 0

    def _sums(self) -> set[int]:
        """Amounts that removals can add up to."""
        sums = {0}
        for amount in self.amounts:
            if amount:
                sums |= {total + amount for total in sums if total + amount <= self.slack}
        return sums

    def family(self, universe: MaskAlgebra) -> int:
        """All removable sets."""
        family, order = self.family_, self.order
        outside = family.candidates & ~self.window
        based = sum(unit.free for unit in family.units if unit.where & outside)
        rest = [(pack(unit.where, order), unit.free) for unit in family.units if unit.free and not unit.where & outside]
        kept = universe.at_least(rest, family.request - based)
        for must in family.musts:
            if not must & outside:
                kept &= universe.touching(pack(must, order))
        return reverse(kept, universe.n)

    def join(self, universe: MaskAlgebra, without: int) -> int:
        """All unions of a set in `without` and a removable set."""
        if not self.is_additive:
            return universe.unions(without, self.family(universe))
        levels = {0: without}
        for position, amount in enumerate(self.amounts):
            if amount is None:
                continue
            for used in sorted(levels, reverse=True):
                if used + amount <= self.slack:
                    put = universe.with_position(levels[used], position)
                    levels[used + amount] = levels.get(used + amount, 0) | put
        found = 0
        for level in levels.values():
            found |= level
        return found


def fittest(reachable: int, universe: MaskAlgebra, width: int, order: Sequence[int], fit: Fit, *, is_closest: bool) -> int:
    """The best of the reachable masks: of the target width, else the widest below, else the narrowest above; then the fittest."""
    sizes = [size for size in range(1, universe.n + 1) if universe.layers[size] & reachable]
    size = min(sizes, key=lambda each_size: (0, 0) if each_size == width else (1, -each_size) if each_size < width else (2, each_size))
    layer = universe.layers[size] & reachable
    if not is_closest:
        return unpack(first(layer), order)
    return closest(layer, size, order, fit)


def closest(layer: int, size: int, order: Sequence[int], fit: Fit) -> int:
    """The fittest of a family of masks that all have `size` positions, by distance: branch and bound where they are many.

    Masks are walked by value, so of equally near ones the first is the right one and all others can be cut.
    """
    if layer.bit_count() <= _FEW:
        return min((unpack(mask, order) for mask in members(layer)), key=fit)
    alone = [fit(1 << one)[1] for one in order]
    pairs = [
        [fit(1 << one | 1 << other)[1] - alone[place] - alone[position] if one != other else 0 for position, other in enumerate(order)]
        for place, one in enumerate(order)
    ]
    nearest = min(pairs[place][other] for place in range(len(order)) for other in range(place))
    best: tuple[int, int] | None = None

    def descend(top: int, left: int, mask: int, cost: int, adds: Sequence[int]) -> None:
        """Choose `left` more positions below `top`; `adds` is what each would cost beside those chosen."""
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
            descend(position, rest, mask | 1 << position, new_cost, [add + row[other] for other, add in enumerate(adds[:position])])

    descend(len(order), size, 0, 0, alone)
    return unpack(best[1], order) if best is not None else 0
