"""Merge hints that are given as rules (`HintRule`), on machines with any number of NUMA nodes: the answer of `merge_hints`, without its lists.

Phase 1 looks for a mask that every resource prefers: all preferred masks of a family have one width, so the widths must agree, and the fittest such
mask inside the common candidates wins. Phase 2 looks for the fittest reachable intersection: inside the window W of nodes that all resources can use,
only which nodes each resource could do without counts (lemma B of the knowledge note), and families only grow with width, so the complement of what is
reachable are the unions of what the resources can do without.

Up to `BITSET_LIMIT` nodes in the window both phases work on all masks at once and are exact. Beyond, `beyond_bitset` searches in the order of fitness.
Lists (custom hints) are merged with the families by their masks.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from topobus.domain.alignment.merge.beyond_bitset import find_preferred, find_reachable
from topobus.domain.alignment.merge.beyond_bitset_mixed import merge_large
from topobus.domain.alignment.merge.exact import TIED_SHOWN, fittest, lowest, reachable, within
from topobus.domain.alignment.merge.exact_mixed import merge_mixed
from topobus.domain.alignment.merge.hint_lists import Distances, Fit, Merged, fit_order, merge_hints
from topobus.domain.alignment.merge.hint_rule import BITSET_LIMIT, HintRule, list_hints, positions, unpack
from topobus.domain.alignment.merge.mask_algebra import MaskAlgebra, members
from topobus.domain.alignment.merge.memory_rule import MemoryRule
from topobus.domain.hint import Hint
from topobus.domain.idset import NodeSet
from topobus.domain.request import Policy

__all__ = ["Opinion", "merge_opinions"]

Opinion = HintRule | MemoryRule | Sequence[Hint] | None
"""What one resource says: a rule, a list, or nothing."""

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
        lists = [_single_hints(opinion) if isinstance(opinion, HintRule | MemoryRule) else opinion for opinion in opinions]
        return merge_hints(lists, nodes, policy, distances=distances, prefer_closest=prefer_closest)
    families = [opinion for opinion in opinions if isinstance(opinion, HintRule)]
    others = [opinion for opinion in opinions if opinion is not None and not isinstance(opinion, HintRule)]
    if any(family.sockets for family in families):
        if all(family.candidates.bit_count() <= BITSET_LIMIT for family in families):
            return _merge_as_lists(opinions, nodes, policy, distances, prefer_closest=prefer_closest)
        # Beyond, the masks that align-by-socket prefers besides are too many to list; the narrowest ones are preferred alone.
        families = [structs.replace(family, sockets=()) for family in families]
    fit = fit_order(nodes, distances if prefer_closest else ())
    is_closest = bool(prefer_closest and distances)
    if others:
        mixed = merge_mixed(families, others, nodes, fit, is_closest=is_closest)
        if mixed is None and not families and not any(isinstance(other, MemoryRule) for other in others):
            return _merge_as_lists(opinions, nodes, policy, distances, prefer_closest=prefer_closest)
        if mixed is None:
            memories = [other for other in others if isinstance(other, MemoryRule)]
            listed = [other for other in others if not isinstance(other, MemoryRule)]
            mixed = merge_large(families, memories, listed, nodes, fit, is_closest=is_closest)
        merged = mixed
    else:
        merged = _merge_families(families, nodes, fit, is_closest=is_closest)
    return Merged(
        hint=merged.hint,
        is_admitted=policy is Policy.BEST_EFFORT or merged.hint.preferred,
        width=merged.width,
        tied=merged.tied,
        has_common=merged.has_common,
        is_exact=merged.is_exact,
    )


def _single_hints(family: HintRule | MemoryRule) -> list[Hint]:
    """The preferred one-node hints of a rule, in a list that is never "no opinion"."""
    width = family.narrowest()
    if width != 1 and not (isinstance(family, HintRule) and family.sockets):
        return []
    masks = (1 << node for node in positions(family.candidates))
    return [
        Hint(NodeSet.from_bits(mask), preferred=True)
        for mask in masks
        if family.has(mask) and (width == 1 or (isinstance(family, HintRule) and family.is_preferred(mask, width)))
    ]


def _merge_as_lists(opinions: Sequence[Opinion], nodes: NodeSet, policy: Policy, distances: Distances, *, prefer_closest: bool) -> Merged:
    lists = [_as_list(opinion) for opinion in opinions]
    return merge_hints(lists, nodes, policy, distances=distances, prefer_closest=prefer_closest)


def _as_list(opinion: Opinion) -> Sequence[Hint] | None:
    if isinstance(opinion, HintRule):
        return list_hints(opinion)
    return opinion.list_hints() if isinstance(opinion, MemoryRule) else opinion


def _merge_families(families: Sequence[HintRule], nodes: NodeSet, fit: Fit, *, is_closest: bool) -> Merged:
    feasible = [family for family in families if not family.is_empty]
    width = max((found for hint_rule in feasible if (found := hint_rule.width()) is not None), default=0)
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
                tied=tuple(others[:TIED_SHOWN]),
                is_exact=preferred.is_exact,
            )
    window = nodes.bits
    for hint_rule in feasible:
        window &= hint_rule.candidates
    if not window:
        return Merged(hint=Hint(nodes, preferred=False), is_admitted=False, width=width, has_common=False)
    if not feasible:
        return Merged(hint=Hint(nodes, preferred=False), is_admitted=False, width=width)
    found, is_exact = _best_reachable(feasible, positions(window), width, fit, is_closest=is_closest)
    return Merged(hint=Hint(NodeSet.from_bits(found), preferred=False), is_admitted=False, width=width, is_exact=is_exact)


def _best_reachable(families: Sequence[HintRule], order: Sequence[int], width: int, fit: Fit, *, is_closest: bool) -> tuple[int, bool]:
    """Phase 2: search first, for it is fast where nodes are alike; all masks at once where the search proves nothing and they are few enough."""
    fits_bitset = len(order) <= BITSET_LIMIT
    if len(order) > _ALWAYS_BITSET and not (fits_bitset and is_closest):
        budget = {"budget": _SEARCH_FIRST} if fits_bitset else {}
        found, is_exact = find_reachable(families, order, min(width, len(order)), fit, is_closest=is_closest, **budget)
        if is_exact or not fits_bitset:
            return found, is_exact
    return fittest(reachable(families, order), MaskAlgebra(len(order)), width, order, fit, is_closest=is_closest), True


class _Preferred:
    """Masks that all prefer, fittest first."""

    __slots__ = ("is_exact", "masks")

    def __init__(self, masks: Sequence[int], *, is_exact: bool = True) -> None:
        self.masks = masks
        self.is_exact = is_exact


def _preferred(families: Sequence[HintRule], fit: Fit, *, is_closest: bool) -> _Preferred:
    """Find masks of the one width that all families prefer, inside the candidates of all."""
    widths = {family.narrowest() for family in families}
    common = families[0].candidates
    for family in families[1:]:
        common &= family.candidates
    if len(widths) > 1 or common.bit_count() < (size := widths.pop()):
        return _Preferred(())
    order = positions(common)
    if size == 1:
        return _Preferred(sorted((mask for node in order if all(family.has(mask := 1 << node) for family in families)), key=fit))
    if len(order) > BITSET_LIMIT:
        masks, is_exact = find_preferred(families, order, size, fit, is_closest=is_closest)
        return _Preferred(masks, is_exact=is_exact)
    universe = MaskAlgebra(len(order))
    found = universe.layers[size]
    for family in families:
        if not found:
            return _Preferred(())
        found &= within(family, universe, order)
    masks = sorted((unpack(mask, order) for mask in members(found)), key=fit) if is_closest else lowest(found, order)
    return _Preferred(masks)
