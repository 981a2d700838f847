"""List every set of NUMA nodes that a policy would admit, not only the one that the merge takes, so
that the planner can choose from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, islice

from topobus.engine.alignment.merge.dispatch import Opinion
from topobus.engine.alignment.merge.fitness import Fit
from topobus.engine.alignment.merge.hint_rule import HintRule
from topobus.engine.alignment.merge.mask_algebra import positions
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet
from topobus.values.request import Policy

__all__ = ["preferred_hints"]

# Sets looked at; 64 nodes have 2,016 pairs, and wider needs on so large machines have
# more sets than anyone can try.
_MOST = 4096


def preferred_hints(opinions: Sequence[Opinion], nodes: NodeSet, policy: Policy, fit: Fit) -> tuple[list[Hint], bool]:
    """Return all hints that every resource prefers, the fittest first, and whether these are all of
    them.

    The first one is the merge's answer. Under single-numa-node the whole machine is "no affinity",
    as in the merge.
    """
    rules: list[HintRule] = []
    lists: list[frozenset[int]] = []
    for opinion in opinions:
        if isinstance(opinion, HintRule):
            rules.append(opinion)
        elif opinion is not None and Hint(None, preferred=True) not in opinion:
            lists.append(frozenset(hint.nodes.bits for hint in opinion if hint.preferred and hint.nodes is not None))
    if not rules and not lists:
        return [_hint(nodes.bits, nodes, policy)], True
    candidates, is_all = (sorted(frozenset.intersection(*lists)), True) if lists else _candidates(rules, nodes)
    if policy is Policy.SINGLE_NUMA_NODE:
        candidates = [mask for mask in candidates if mask.bit_count() == 1]
    preferred = {
        mask & nodes.bits for mask in candidates if mask & nodes.bits and all(rule.prefers(mask) for rule in rules)
    }
    return [_hint(mask, nodes, policy) for mask in sorted(preferred, key=fit)], is_all


def _hint(mask: int, nodes: NodeSet, policy: Policy) -> Hint:
    is_nowhere = policy is Policy.SINGLE_NUMA_NODE and mask == nodes.bits
    return Hint(None if is_nowhere else NodeSet.from_bits(mask), preferred=True)


def _candidates(rules: Sequence[HintRule], nodes: NodeSet) -> tuple[Sequence[int], bool]:
    common = nodes.bits
    for rule in rules:
        common &= rule.reach
    order = positions(common)
    widths = {rule.narrowest for rule in rules}
    sizes: Iterable[int] = widths if len(widths) == 1 else ()
    if any(rule.sockets for rule in rules):
        sizes = range(1, len(order) + 1)
    masks = list(
        islice((sum(1 << node for node in chosen) for size in sizes for chosen in combinations(order, size)), _MOST + 1)
    )
    return masks[:_MOST], len(masks) <= _MOST
