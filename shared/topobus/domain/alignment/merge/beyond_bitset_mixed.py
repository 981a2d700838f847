"""Merge rules, memory and lists where more nodes are in play than a bitset holds: right answers, found by search, and honest about it.

Phase 1 stays exact where one node is preferred, or few masks are. In phase 2 what memory and lists offer is tried mask by mask beside the wide sets of
unassigned nodes, which grow with width like every rule; the fittest of what was found is taken and marked as not proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from topobus.domain.alignment.merge.beyond_bitset import find_preferred, find_reachable
from topobus.domain.alignment.merge.hint_lists import Fit, Merged
from topobus.domain.alignment.merge.hint_rule import HintRule, positions
from topobus.domain.alignment.merge.memory_rule import MemoryRule
from topobus.domain.hint import Hint
from topobus.domain.idset import NodeSet

__all__ = ["merge_large"]

# Masks of a list that are tried at most.
_MASKS = 2_000
# Ways of sharing nodes that are tried at most.
_SHARINGS = 2_000


def merge_large(
    families: Sequence[HintRule],
    memories: Sequence[MemoryRule],
    lists: Sequence[Sequence[Hint]],
    nodes: NodeSet,
    fit: Fit,
    *,
    is_closest: bool,
) -> Merged:
    """Merge on a machine of any size, in bounded time."""
    rules: list[HintRule | MemoryRule] = [*families, *memories]
    able = [rule for rule in rules if not rule.is_empty]
    said = [[hint for hint in hints if hint.nodes is not None] for hints in lists]
    widths = [width for rule in able if (width := rule.width()) is not None]
    widths += [min(len(hint.nodes) for hint in hints if hint.nodes is not None) for hints in said if hints]
    width = max(widths, default=0)
    if len(able) == len(rules):
        best = _all_prefer(families, memories, lists, nodes, fit, is_closest=is_closest)
        if best:
            return Merged(hint=Hint(NodeSet.from_bits(best[0]), preferred=True), is_admitted=True, width=width, is_exact=best[1])
    found = _reachable(able, said, lists, nodes, width, fit, is_closest=is_closest)
    if not found:
        return Merged(hint=Hint(nodes, preferred=False), is_admitted=False, width=width, has_common=False, is_exact=not able)
    mask = min(found, key=lambda bits: (_width_class(bits.bit_count(), width), fit(bits)))
    return Merged(hint=Hint(NodeSet.from_bits(mask), preferred=False), is_admitted=False, width=width, is_exact=False)


def _all_prefer(
    families: Sequence[HintRule],
    memories: Sequence[MemoryRule],
    lists: Sequence[Sequence[Hint]],
    nodes: NodeSet,
    fit: Fit,
    *,
    is_closest: bool,
) -> tuple[int, bool] | None:
    """The fittest mask that all prefer that was found, and whether it is proved to be the fittest."""
    rules: list[HintRule | MemoryRule] = [*families, *memories]
    sizes = {rule.narrowest() for rule in rules}
    bound = [hints for hints in lists if not any(hint.nodes is None and hint.preferred for hint in hints)]
    if len(sizes) > 1 or any(not any(hint.preferred for hint in hints) for hints in bound):
        return None
    size = sizes.pop() if sizes else 0
    if bound:
        masks = {hint.nodes.bits for hint in bound[0] if hint.preferred and hint.nodes is not None}
        for hints in bound[1:]:
            masks &= {hint.nodes.bits for hint in hints if hint.preferred and hint.nodes is not None}
        fitting = [
            mask
            for mask in masks
            if (not rules or mask.bit_count() == size) and all(rule.has(mask) for rule in rules) and mask & nodes.bits
        ]
        return (min(fitting, key=fit), True) if fitting else None
    common = nodes.bits
    for rule in rules:
        common &= rule.candidates
    if size == 1:
        singles = [mask for node in positions(common) if all(rule.has(mask := 1 << node) for rule in rules)]
        return (min(singles, key=fit), True) if singles else None
    fitting = [
        mask for memory in memories for mask in memory.exceptions() if mask.bit_count() == size and all(rule.has(mask) for rule in rules)
    ]
    wide = common
    for memory in memories:
        wide &= memory.unassigned
    is_exact = True
    if wide.bit_count() >= size:
        plain = [*families, *(rule for memory in memories for rule in memory.wide_rules())]
        more, is_exact = find_preferred(plain, positions(wide), size, fit, is_closest=is_closest)
        fitting += more
    return (min(fitting, key=fit), is_exact) if fitting else None


def _reachable(
    able: Sequence[HintRule | MemoryRule],
    said: Sequence[Sequence[Hint]],
    lists: Sequence[Sequence[Hint]],
    nodes: NodeSet,
    width: int,
    fit: Fit,
    *,
    is_closest: bool,
) -> set[int]:
    """Some masks that are intersections of one mask from each: all that matter on ordinary machines."""
    families = [rule for rule in able if isinstance(rule, HintRule)]
    memories = [rule for rule in able if isinstance(rule, MemoryRule)]
    window = nodes.bits
    for rule in able:
        window &= rule.candidates
    found = {window}
    # A family can be met by all of its candidates, so whatever a list or memory offers is reachable as it stands, clipped to the window.
    for hints, whole in zip(said, lists, strict=True):
        masks = [hint.nodes.bits for hint in islice(hints, _MASKS) if hint.nodes is not None] or [nodes.bits]
        masks += [nodes.bits] if len(hints) < len(whole) else []
        found = set(islice(sorted({mask & reached for mask in masks for reached in found} - {0}, key=fit), _MASKS))
    for memory in memories:
        offered = [*memory.exceptions(), *([memory.unassigned] if memory.is_wide else [])]
        found = set(islice(sorted({mask & reached for mask in offered for reached in found} - {0}, key=fit), _MASKS))
    wide = window
    for memory in memories:
        wide &= memory.unassigned
    plain = [*families, *(rule for memory in memories for rule in memory.wide_rules())]
    if not any(said) and wide and plain and all(memory.is_wide for memory in memories):
        order = positions(wide)
        mask, _ = find_reachable(plain, order, min(max(width, 1), len(order)), fit, is_closest=is_closest)
        # Wide sets have two nodes at least; a single one must be a hint by itself. The search took each kind of memory for itself, which admits too
        # much: one set of nodes must hold all kinds.
        is_hint = mask & (mask - 1) or all(memory.has(mask) for memory in memories)
        if is_hint and _can_do_without(positions(wide & ~mask), families, memories):
            found.add(mask)
    return found - {0}


def _can_do_without(out: Sequence[int], families: Sequence[HintRule], memories: Sequence[MemoryRule]) -> bool:
    """Say whether the nodes can be shared among the rules so that each does without its share; False also where a short search finds no way."""
    slack: list[tuple[int, ...]] = [(family.free_in(family.candidates) - family.request,) for family in families]
    slack += [memory.wide_slack for memory in memories]

    def amounts(node: int) -> list[tuple[int, ...] | None]:
        bit = 1 << node
        plain: list[tuple[int, ...] | None] = [
            # A unit on several nodes is charged to each of them: that refuses too much, never too little.
            None if any(must & bit for must in family.musts) else (sum(unit.free for unit in family.units if unit.where & bit),)
            for family in families
        ]
        return plain + [memory.free[bit] for memory in memories]

    charges = [(node, amounts(node)) for node in out]
    # The nodes that fewest rules can bear are shared out first.
    charges.sort(key=lambda charge: (sum(1 for amount in charge[1] if amount is not None), charge[0]))
    budget = _SHARINGS

    def share(place: int) -> bool:
        nonlocal budget
        if place == len(charges):
            return True
        budget -= 1
        if budget < 0:
            return False
        for which, amount in enumerate(charges[place][1]):
            if amount is None or any(one > left for one, left in zip(amount, slack[which], strict=True)):
                continue
            before = slack[which]
            slack[which] = tuple(left - one for one, left in zip(amount, before, strict=True))
            if share(place + 1):
                return True
            slack[which] = before
            if not any(amount):
                # It cost nothing, so no other way of sharing this node is better.
                return False
        return False

    return share(0)


def _width_class(count: int, width: int) -> tuple[int, int]:
    if count == width:
        return (0, 0)
    return (1, -count) if count < width else (2, count)
