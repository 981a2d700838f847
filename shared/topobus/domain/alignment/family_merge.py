"""Merge hints that are given as rules (`Family`), on machines with any number of NUMA nodes: the answer of `merge_hints`, without its lists.

Phase 1 looks for a mask that every resource prefers: all preferred masks of a family have one width, so the widths must agree, and the fittest such
mask inside the common candidates wins. Phase 2 looks for the fittest reachable intersection: inside the window W of nodes that all resources can use,
only which nodes each resource could do without counts (lemma B of the knowledge note), and families only grow with width, so the complement of what is
reachable are the unions of what the resources can do without.

Up to `BITSET_LIMIT` nodes in the window both phases work on all masks at once and are exact. Beyond, `large_merge` searches in the order of fitness.
Lists (custom hints) are merged with the families by their masks.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.domain.alignment.bitsets import Universe, first, members, reverse
from topobus.domain.alignment.families import BITSET_LIMIT, Family, list_hints, pack, positions, unpack
from topobus.domain.alignment.large_merge import find_preferred, find_reachable
from topobus.domain.alignment.merge import Distances, Fit, Merged, fit_order, merge_hints
from topobus.domain.hint import Hint
from topobus.domain.idset import NodeSet
from topobus.domain.request import Policy

__all__ = ["Opinion", "merge_opinions"]

Opinion = Family | Sequence[Hint] | None
"""What one resource says: a rule, a list, or nothing."""

# Alternatives named in a reason at most.
_TIED_SHOWN = 8
# Up to so many nodes a bitset is a few machine words and beats any search.
_ALWAYS_BITSET = 9
# States that the search may look at before the bitset takes over: about 4 ms.
_SEARCH_FIRST = 1500


def merge_opinions(
    opinions: Sequence[Opinion], nodes: NodeSet, policy: Policy, *, distances: Distances = (), prefer_closest: bool = False
) -> Merged:
    """Merge one opinion a resource into the best common hint; the same answer as `merge_hints` on the lists behind the rules.

    Cost:    families only: O(nodes x 2^window) word operations up to 16 nodes in the window, whatever the number of hints.
    """
    if policy in (Policy.NONE, Policy.SINGLE_NUMA_NODE):
        # Only one-node hints count under single-numa-node: at most one a node.
        lists = [_single_hints(one) if isinstance(one, Family) else one for one in opinions]
        return merge_hints(lists, nodes, policy, distances=distances, prefer_closest=prefer_closest)
    families = [one for one in opinions if isinstance(one, Family)]
    if len(families) < len([one for one in opinions if one is not None]) or any(one.sockets for one in families):
        return _merge_as_lists(opinions, nodes, policy, distances, prefer_closest=prefer_closest)
    fit = fit_order(nodes, distances if prefer_closest else ())
    merged = _merge_families(families, nodes, fit, is_closest=bool(prefer_closest and distances))
    return Merged(
        hint=merged.hint,
        is_admitted=policy is Policy.BEST_EFFORT or merged.hint.preferred,
        width=merged.width,
        tied=merged.tied,
        has_common=merged.has_common,
        is_exact=merged.is_exact,
    )


def _single_hints(family: Family) -> list[Hint]:
    """The preferred one-node hints of a family, in a list that is never "no opinion"."""
    if family.narrowest() != 1 and not family.sockets:
        return []
    width = family.narrowest()
    masks = (1 << node for node in positions(family.candidates))
    return [Hint(NodeSet.from_bits(mask), preferred=True) for mask in masks if family.has(mask) and family.is_preferred(mask, width)]


def _merge_as_lists(opinions: Sequence[Opinion], nodes: NodeSet, policy: Policy, distances: Distances, *, prefer_closest: bool) -> Merged:
    lists = [list_hints(one) if isinstance(one, Family) else one for one in opinions]
    return merge_hints(lists, nodes, policy, distances=distances, prefer_closest=prefer_closest)


def _merge_families(families: Sequence[Family], nodes: NodeSet, fit: Fit, *, is_closest: bool) -> Merged:
    feasible = [one for one in families if not one.is_empty]
    width = max((found for one in feasible if (found := one.width()) is not None), default=0)
    if len(feasible) == len(families):
        if not families:
            # No list at all, and lists without any opinion, both end at the whole machine.
            return Merged(hint=Hint(nodes, preferred=True), is_admitted=True)
        preferred = _preferred(families, fit, is_closest=is_closest)
        if preferred.masks:
            best, *others = (NodeSet.from_bits(mask) for mask in preferred.masks)
            return Merged(
                hint=Hint(best, preferred=True),
                is_admitted=True,
                width=width,
                tied=tuple(others[:_TIED_SHOWN]),
                is_exact=preferred.is_exact,
            )
    window = nodes.bits
    for one in feasible:
        window &= one.candidates
    if not window:
        return Merged(hint=Hint(nodes, preferred=False), is_admitted=False, width=width, has_common=False)
    if not feasible:
        return Merged(hint=Hint(nodes, preferred=False), is_admitted=False, width=width)
    found, is_exact = _best_reachable(feasible, positions(window), width, fit, is_closest=is_closest)
    return Merged(hint=Hint(NodeSet.from_bits(found), preferred=False), is_admitted=False, width=width, is_exact=is_exact)


def _best_reachable(families: Sequence[Family], order: Sequence[int], width: int, fit: Fit, *, is_closest: bool) -> tuple[int, bool]:
    """Phase 2: search first, for it is fast where nodes are alike; all masks at once where the search proves nothing and they are few enough."""
    fits_bitset = len(order) <= BITSET_LIMIT
    if len(order) > _ALWAYS_BITSET and not (fits_bitset and is_closest):
        budget = {"budget": _SEARCH_FIRST} if fits_bitset else {}
        found, is_exact = find_reachable(families, order, min(width, len(order)), fit, is_closest=is_closest, **budget)
        if is_exact or not fits_bitset:
            return found, is_exact
    return _fittest(_reachable(families, order), Universe(len(order)), width, order, fit, is_closest=is_closest), True


class _Preferred:
    """Masks that all prefer, fittest first."""

    __slots__ = ("is_exact", "masks")

    def __init__(self, masks: Sequence[int], *, is_exact: bool = True) -> None:
        self.masks = masks
        self.is_exact = is_exact


def _preferred(families: Sequence[Family], fit: Fit, *, is_closest: bool) -> _Preferred:
    """Find masks of the one width that all families prefer, inside the candidates of all."""
    widths = {one.narrowest() for one in families}
    common = families[0].candidates
    for one in families[1:]:
        common &= one.candidates
    if len(widths) > 1 or common.bit_count() < (size := widths.pop()):
        return _Preferred(())
    order = positions(common)
    if size == 1:
        return _Preferred(sorted((mask for node in order if all(one.has(mask := 1 << node) for one in families)), key=fit))
    if len(order) > BITSET_LIMIT:
        masks, is_exact = find_preferred(families, order, size, fit, is_closest=is_closest)
        return _Preferred(masks, is_exact=is_exact)
    universe = Universe(len(order))
    found = universe.layers[size]
    for one in families:
        if not found:
            return _Preferred(())
        found &= _within(one, universe, order)
    masks = sorted((unpack(mask, order) for mask in members(found)), key=fit) if is_closest else _lowest(found, order)
    return _Preferred(masks)


def _lowest(found: int, order: Sequence[int]) -> list[int]:
    """The first few masks by value; all have one width, so the value decides."""
    masks: list[int] = []
    for mask in members(found):
        masks.append(unpack(mask, order))
        if len(masks) > _TIED_SHOWN:
            break
    return masks


def _within(family: Family, universe: Universe, order: Sequence[int]) -> int:
    """The family's masks that lie inside the window."""
    found = universe.at_least([(pack(one.where, order), one.free) for one in family.units if one.free], family.request)
    for must in family.musts:
        found &= universe.touching(pack(must, order))
    return found


def _reachable(families: Sequence[Family], order: Sequence[int]) -> int:
    """All intersections of one mask from each family, clipped to the window, as a family over its positions."""
    universe = Universe(len(order))
    window = 0
    for one in order:
        window |= 1 << one
    spares = [_Spare(one, window, order) for one in families]
    # The resource with the most different amounts goes first, where it costs nothing.
    spares.sort(key=lambda one: (one.is_additive, -one.steps))
    without = spares[0].family(universe)
    for spare in spares[1:]:
        without = spare.join(universe, without)
    return reverse(without, len(order))


class _Spare:
    """What a resource can do without: the sets of window nodes whose removal leaves a feasible mask."""

    __slots__ = ("amounts", "family_", "is_additive", "order", "slack", "steps", "window")

    def __init__(self, family: Family, window: int, order: Sequence[int]) -> None:
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
            amount = sum(one.free for one in family.units if one.where >> node & 1)
            self.amounts.append(None if musts >> node & 1 or amount > self.slack else amount)
        self.steps = len(self._sums()) if self.is_additive else 0

    def _sums(self) -> set[int]:
        """Amounts that removals can add up to."""
        sums = {0}
        for amount in self.amounts:
            if amount:
                sums |= {one + amount for one in sums if one + amount <= self.slack}
        return sums

    def family(self, universe: Universe) -> int:
        """All removable sets."""
        family, order = self.family_, self.order
        outside = family.candidates & ~self.window
        based = sum(one.free for one in family.units if one.where & outside)
        rest = [(pack(one.where, order), one.free) for one in family.units if one.free and not one.where & outside]
        kept = universe.at_least(rest, family.request - based)
        for must in family.musts:
            if not must & outside:
                kept &= universe.touching(pack(must, order))
        return reverse(kept, universe.n)

    def join(self, universe: Universe, without: int) -> int:
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
        for one in levels.values():
            found |= one
        return found


def _fittest(reachable: int, universe: Universe, width: int, order: Sequence[int], fit: Fit, *, is_closest: bool) -> int:
    """The best of the reachable masks: of the target width, else the widest below, else the narrowest above; then the fittest."""
    sizes = [size for size in range(1, universe.n + 1) if universe.layers[size] & reachable]
    size = min(sizes, key=lambda one: (0, 0) if one == width else (1, -one) if one < width else (2, one))
    layer = universe.layers[size] & reachable
    if not is_closest:
        return unpack(first(layer), order)
    return min((unpack(mask, order) for mask in members(layer)), key=fit)
