"""Merge rules together with lists of hints (a service's own) and with the memory policy's hints, which do not just grow with width.

The same two phases as for rules alone: masks that all prefer, then the fittest reachable intersection; here over families of masks, since nothing more is
known of a list than its masks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from topobus.domain.alignment.merge.exact import TIED_SHOWN, fittest, lowest, reachable, within
from topobus.domain.alignment.merge.hint_lists import Fit, Merged
from topobus.domain.alignment.merge.hint_rule import BITSET_LIMIT, HintRule, pack, positions, unpack
from topobus.domain.alignment.merge.mask_algebra import MaskAlgebra, members, reverse
from topobus.domain.alignment.merge.memory_rule import MemoryRule, add_within
from topobus.domain.hint import Hint
from topobus.domain.idset import NodeSet

__all__ = ["merge_mixed"]

# Nodes up to which two families of masks are intersected mask by mask.
_DENSE_LIMIT = 10


def merge_mixed(
    families: Sequence[HintRule], others: Sequence[MemoryRule | Sequence[Hint]], nodes: NodeSet, fit: Fit, *, is_closest: bool
) -> Merged | None:
    """Merge; None when this way does not help: lists alone, or more nodes in play than a bitset holds."""
    memories = [other for other in others if isinstance(other, MemoryRule)]
    lists = [_List(other) for other in others if not isinstance(other, MemoryRule)]
    rules: list[HintRule | MemoryRule] = [*families, *memories]
    if not rules:
        return None
    able = [rule for rule in rules if not rule.is_empty]
    widths = [width for rule in able if (width := rule.width()) is not None] + [
        resource_list.width for resource_list in lists if resource_list.masks
    ]
    width = max(widths, default=0)
    if len(able) == len(rules) and all(resource_list.preferred or resource_list.is_wild for resource_list in lists):
        common = nodes.bits
        for rule in rules:
            common &= rule.candidates
        if common.bit_count() > BITSET_LIMIT:
            return None
        best = _all_prefer(
            rules, [resource_list for resource_list in lists if not resource_list.is_wild], positions(common), fit, is_closest=is_closest
        )
        if best:
            node_set, *tied = (NodeSet.from_bits(mask) for mask in best)
            return Merged(hint=Hint(node_set, preferred=True), is_admitted=True, width=width, tied=tuple(tied[:TIED_SHOWN]))
    window = nodes.bits
    for rule in able:
        window &= rule.candidates
    for said in lists:
        window &= said.reach
    if window.bit_count() > BITSET_LIMIT:
        return None
    reach = _reach(able, lists, positions(window)) if window else 0
    if not reach:
        return Merged(hint=Hint(nodes, preferred=False), is_admitted=False, width=width, has_common=False)
    order = positions(window)
    mask = fittest(reach, MaskAlgebra(len(order)), width, order, fit, is_closest=is_closest)
    return Merged(hint=Hint(NodeSet.from_bits(mask), preferred=False), is_admitted=False, width=width)


class _List:
    """A list of hints, taken apart."""

    __slots__ = ("is_wild", "masks", "preferred", "reach", "width")

    def __init__(self, hints: Sequence[Hint]) -> None:
        self.masks = {hint.nodes.bits for hint in hints if hint.nodes is not None}
        self.preferred = {hint.nodes.bits for hint in hints if hint.nodes is not None and hint.preferred}
        self.is_wild = any(hint.nodes is None and hint.preferred for hint in hints)
        self.width = min((mask.bit_count() for mask in self.masks), default=0)
        # An empty list, and a hint without nodes, leave every node in play.
        self.reach = -1
        if hints and all(hint.nodes is not None for hint in hints):
            self.reach = 0
            for mask in self.masks:
                self.reach |= mask

    def clipped(self, order: Sequence[int]) -> int:
        """The masks clipped to the window, as a family over its positions."""
        found = _packed(self.masks, order)
        return found if self.reach != -1 else found | 1 << ((1 << len(order)) - 1)


def _packed(masks: Iterable[int], order: Sequence[int]) -> int:
    found = 0
    for mask in masks:
        found |= 1 << pack(mask, order)
    return found


def _all_prefer(
    rules: Sequence[HintRule | MemoryRule], lists: Sequence[_List], order: Sequence[int], fit: Fit, *, is_closest: bool
) -> list[int]:
    """Masks that every rule and every list prefers, fittest first; equality is of whole masks, so those that reach outside are out."""
    universe = MaskAlgebra(len(order))
    inside = sum(1 << one for one in order)
    found = universe.everything & ~1
    for rule in rules:
        size = rule.narrowest()
        if size >= len(universe.layers):
            return []
        found &= universe.layers[size] & (within(rule, universe, order) if isinstance(rule, HintRule) else rule.inside(universe, order))
    for said in lists:
        found &= _packed((mask for mask in said.preferred if not mask & ~inside), order)
    if not found:
        return []
    return sorted((unpack(mask, order) for mask in members(found)), key=fit) if is_closest else lowest(found, order)


def _reach(rules: Sequence[HintRule | MemoryRule], lists: Sequence[_List], order: Sequence[int]) -> int:
    """All non-empty intersections of one mask from each, as a family over the window's positions."""
    universe = MaskAlgebra(len(order))
    families = [rule for rule in rules if isinstance(rule, HintRule)]
    found = reachable(families, order) if families else 1 << ((1 << len(order)) - 1)
    for said in lists:
        found = universe.intersections(found, said.clipped(order))
    for rule in rules:
        if isinstance(rule, MemoryRule):
            found = _with_memory(universe, order, found, rule)
    return found & ~1


def _with_memory(universe: MaskAlgebra, order: Sequence[int], found: int, memory: MemoryRule) -> int:
    spare = memory.spare(order)
    if len(order) <= _DENSE_LIMIT or spare is None:
        return universe.intersections(found, memory.projected(universe, order))
    slack, amounts = spare
    reached = 0
    for mask in memory.exceptions():
        kept = pack(mask, order)
        clipped = found
        for position in range(universe.n):
            if not kept >> position & 1:
                clipped = (clipped | clipped >> (1 << position)) & ~universe.having[position]
        reached |= clipped
    if slack is None:
        return reached
    without = reverse(found, universe.n)
    for position, amount in enumerate(amounts):
        if amount is None:
            # An assigned node is in no wide set.
            without = universe.with_position(without, position)
    levels = {(0,) * len(slack): without}
    for position, amount in enumerate(amounts):
        if amount is None:
            continue
        # Each node is left out once at most, so what it adds is worked out from the levels as they were.
        for used, family in tuple(levels.items()):
            added = add_within(used, amount, slack)
            if added is not None:
                levels[added] = levels.get(added, 0) | universe.with_position(family, position)
    wide = 0
    for level in levels.values():
        wide |= level
    return reached | reverse(wide, universe.n)
