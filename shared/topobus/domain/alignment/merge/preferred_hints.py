"""List every set of NUMA nodes that a policy would admit, not only the one that the merge takes: what the planner chooses from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, islice

from topobus.domain.alignment.merge.dispatch import Opinion
from topobus.domain.alignment.merge.hint_lists import Fit
from topobus.domain.alignment.merge.hint_rule import HintRule, positions
from topobus.domain.alignment.merge.memory_rule import MemoryRule
from topobus.domain.hint import Hint
from topobus.domain.idset import NodeSet
from topobus.domain.request import Policy

__all__ = ["preferred_hints"]

# Sets looked at; 64 nodes have 2,016 pairs, and wider needs on so large machines have more sets than anyone can try.
_MOST = 4096

_Rule = HintRule | MemoryRule | frozenset[int]


def preferred_hints(opinions: Sequence[Opinion], nodes: NodeSet, policy: Policy, fit: Fit) -> tuple[list[Hint], bool]:
    """Give all hints that every resource prefers, the fittest first, and whether these are all of them.

    The first one is the merge's answer. Under single-numa-node the whole machine is "no affinity", as in the merge.
    """
    rules: list[_Rule] = []
    for opinion in opinions:
        if isinstance(opinion, HintRule | MemoryRule):
            rules.append(opinion)
        elif opinion is not None and Hint(None, preferred=True) not in opinion:
            rules.append(frozenset(hint.nodes.bits for hint in opinion if hint.preferred and hint.nodes is not None))
    if not rules:
        return [_hint(nodes.bits, nodes, policy)], True
    widths = [0 if isinstance(rule, frozenset) else rule.narrowest() for rule in rules]
    candidates, is_all = _candidates(rules, widths, nodes)
    if policy is Policy.SINGLE_NUMA_NODE:
        candidates = [mask for mask in candidates if mask.bit_count() == 1]
    found = {
        mask & nodes.bits
        for mask in candidates
        if mask & nodes.bits and all(_prefers(rule, width, mask) for rule, width in zip(rules, widths, strict=True))
    }
    return [_hint(mask, nodes, policy) for mask in sorted(found, key=fit)], is_all


def _prefers(rule: _Rule, width: int, mask: int) -> bool:
    if isinstance(rule, frozenset):
        return mask in rule
    return rule.has(mask) and (rule.is_preferred(mask, width) if isinstance(rule, HintRule) else mask.bit_count() == width)


def _hint(mask: int, nodes: NodeSet, policy: Policy) -> Hint:
    is_nowhere = policy is Policy.SINGLE_NUMA_NODE and mask == nodes.bits
    return Hint(None if is_nowhere else NodeSet.from_bits(mask), preferred=True)


def _candidates(rules: Sequence[_Rule], widths: Sequence[int], nodes: NodeSet) -> tuple[Sequence[int], bool]:
    listed = [rule for rule in rules if isinstance(rule, frozenset)]
    if listed:
        return sorted(frozenset.intersection(*listed)), True
    common = nodes.bits
    for rule in rules:
        common &= common if isinstance(rule, frozenset) else rule.candidates
    order = positions(common)
    if any(isinstance(rule, HintRule) and rule.sockets for rule in rules):
        sizes: Iterable[int] = range(1, len(order) + 1)
    else:
        sizes = set(widths) if len(set(widths)) == 1 else ()
    masks = list(islice((sum(1 << node for node in chosen) for size in sizes for chosen in combinations(order, size)), _MOST + 1))
    return masks[:_MOST], len(masks) <= _MOST
