"""Merge the hints of all resources into the one that kubelet's Topology Manager would choose,
without walking permutations.

Exact for every input up to `BITSET_LIMIT` nodes in play, sparse ids and ids above 63 included.
Beyond, the answer states whether it is proved.

Why this is exact: kubelet keeps the smaller of two merged candidates under a strict total order
(docs/knowledge/topology-merge.md#theorem-1), so only the *set* of reachable candidates matters.
Phase 1 looks for a mask that all resources prefer. Only when there is none, phase 2 looks for the
fittest intersection of one mask from each, inside the window of nodes that all resources can use
(docs/knowledge/topology-merge.md#lemma-b).

Which strategy when: lists that bind phase 1 are intersected as sets of masks, and one preferred
node is looked up node by node, on any machine. Otherwise up to `BITSET_LIMIT` nodes in play (common
to all for phase 1, in the window for phase 2) `exact` decides, and beyond that `beyond_bitset`. The
search of the latter goes first on 10 to 16 nodes, with a small budget, where all rules combine
freely.
Source: kubelet 1.36 pkg/kubelet/cm/topologymanager/{policy,policy_*}.go.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from topobus.engine.alignment.merge.beyond_bitset import find_combined, find_common, find_reachable
from topobus.engine.alignment.merge.exact import fittest_common, fittest_reachable
from topobus.engine.alignment.merge.fitness import Distances, Fit, fit_order
from topobus.engine.alignment.merge.hint_list import HintMasks
from topobus.engine.alignment.merge.hint_rule import HintRule
from topobus.engine.alignment.merge.mask_algebra import BITSET_LIMIT, positions
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet
from topobus.values.request import Policy

__all__ = ["Merged", "Opinion", "merge_hints"]

Opinion = HintRule | Sequence[Hint] | None
"""What one resource asks for: a rule, a list, or nothing."""

# Alternatives named in an answer at most.
_TIED_SHOWN = 8
# Up to this number of nodes a bitset is a few machine words and beats any search.
_ALWAYS_BITSET = 9
# States that the search may look at before the bitset takes over: about 4 ms.
_SEARCH_FIRST = 1500


class Merged(Struct, frozen=True, kw_only=True):
    """The merge's answer and how it was found."""

    hint: Hint
    is_admitted: bool
    width: int = 0
    """Target width of a non-preferred answer: the widest of the resources' narrowest masks."""
    tied: tuple[NodeSet, ...] = ()
    """Preferred candidates that were as narrow as the answer and lost by distance or by mask value,
    fittest first."""
    has_common: bool = True
    """False when no combination of hints shares a NUMA node (the answer is then the whole machine,
    not preferred)."""
    is_exact: bool = True
    """False when a bound cut the search on a very large machine: the hint is a right one, but
    perhaps not the fittest."""


def merge_hints(
    opinions: Sequence[Opinion],
    nodes: NodeSet,
    policy: Policy,
    *,
    distances: Distances = (),
    prefer_closest: bool = False,
) -> Merged:
    """Merge one opinion for each resource into the best common hint.

    Shapes: opinions — one for each resource: None for no opinion, an empty list for "cannot be
            satisfied"; distances — as for `fit_order`.
    Order: independent of the order of opinions and of hints.
    Errors: raises nothing. A pod that the policy refuses has `is_admitted` False.
    Cost: with n nodes in play: O(opinions x n) when one preferred node serves all; O(opinions x n x
            2^n) bit operations up to n = 16; a bounded number of steps beyond (about 50 ms).
    Source: kubelet 1.36 topologymanager; prefer_closest is `prefer-closest-numa-nodes`, which
            single-numa-node ignores.

    >>> low, both = NodeSet(0), NodeSet(0, 1)
    >>> merge_hints([[Hint(low, preferred=True), Hint(both, preferred=False)], None], both, Policy.RESTRICTED).hint
    Hint(nodes=NodeSet(0), preferred=True)
    """
    if policy is Policy.NONE:
        return Merged(hint=Hint(None, preferred=False), is_admitted=True)
    is_single = policy is Policy.SINGLE_NUMA_NODE
    is_closest = bool(prefer_closest and distances and not is_single)
    families = [
        _single(opinion) if is_single else opinion if isinstance(opinion, HintRule) else HintMasks(opinion)
        for opinion in opinions
    ]
    fit = fit_order(nodes, distances if is_closest else ())
    able = [family for family in families if not family.is_empty]
    width = max((family.width or 0 for family in able), default=0)
    masks, is_exact = _preferred_by_all(families, nodes.bits, fit, is_closest=is_closest)
    if masks:
        best, *others = (NodeSet.from_bits(mask) for mask in masks)
        tied = tuple(other for other in others if len(other) == len(best))[:_TIED_SHOWN]
        # Under single-numa-node the whole machine is no affinity: then nothing is bound to it.
        hint = Hint(None if is_single and best == nodes else best, preferred=True)
        return Merged(hint=hint, is_admitted=True, width=width, tied=tied, is_exact=is_exact)
    # Under single-numa-node two different masks of one node have nothing in
    # common, so phase 2 finds nothing.
    mask, is_exact = (0, True) if is_single else _reachable_by_all(able, nodes.bits, width, fit, is_closest=is_closest)
    hint = Hint(None if is_single else NodeSet.from_bits(mask or nodes.bits), preferred=False)
    return Merged(
        hint=hint, is_admitted=policy is Policy.BEST_EFFORT, width=width, has_common=bool(mask), is_exact=is_exact
    )


def _single(opinion: Opinion) -> HintMasks:
    """Keep what counts under single-numa-node: preferred hints of one node, and "no opinion".

    Without either, the opinion cannot be satisfied.
    """
    if isinstance(opinion, HintRule):
        masks = (1 << node for node in positions(opinion.singles))
        return HintMasks(
            [Hint(NodeSet.from_bits(mask), preferred=True) for mask in masks if opinion.is_preferred(mask)]
        )
    if opinion is None:
        return HintMasks(None)
    return HintMasks([hint for hint in opinion if hint.preferred and (hint.nodes is None or len(hint.nodes) == 1)])


def _preferred_by_all(
    families: Sequence[HintRule | HintMasks], whole: int, fit: Fit, *, is_closest: bool
) -> tuple[list[int], bool]:
    """Phase 1: find masks that all prefer or have no opinion on, fittest first, clipped to the
    machine.

    Shapes: result — the masks, and whether the first is proved the fittest.
    Source: docs/knowledge/topology-merge.md#phase-1.
    """
    binding = [family for family in families if isinstance(family, HintRule) or not family.is_wild]
    rules = [family for family in binding if isinstance(family, HintRule)]
    lists = [family.preferred for family in binding if isinstance(family, HintMasks)]
    if any(rule.is_empty for rule in rules) or not all(lists):
        return [], True
    if lists:
        # Equality is of whole masks: nodes that the machine does not have are clipped afterwards.
        masks = {mask & whole for mask in frozenset.intersection(*lists) if all(rule.prefers(mask) for rule in rules)}
        return sorted(masks - {0}, key=fit), True
    if not rules:
        preferred = (family.preferred for family in families if isinstance(family, HintMasks))
        return sorted({mask & whole for mask in {whole}.union(*preferred)} - {0}, key=fit), True
    widths = {rule.narrowest for rule in rules if not rule.sockets}
    if len(widths) > 1:
        return [], True
    if widths == {1}:
        common = whole
        for rule in rules:
            common &= rule.singles
        singles = (1 << node for node in positions(common))
        return sorted((mask for mask in singles if all(rule.is_preferred(mask) for rule in rules)), key=fit), True
    common = whole
    for rule in rules:
        common &= rule.reach
    order = positions(common)
    most = _TIED_SHOWN + 1
    if len(order) <= BITSET_LIMIT:
        return fittest_common(rules, order, fit, most, is_closest=is_closest), True
    # The masks that align-by-socket also prefers are too many here: only the narrowest ones are
    # preferred.
    widths = {rule.narrowest for rule in rules}
    return (
        find_common(rules, common, widths.pop(), fit, most, is_closest=is_closest) if len(widths) == 1 else ([], True)
    )


def _reachable_by_all(
    families: Sequence[HintRule | HintMasks], window: int, width: int, fit: Fit, *, is_closest: bool
) -> tuple[int, bool]:
    """Phase 2: the fittest intersection of one mask from each (0 for none), and whether that is
    proved.
    """
    for family in families:
        window &= family.reach
    if not window or not families:
        return window, True
    order = positions(window)
    if len(order) > BITSET_LIMIT:
        return find_reachable(families, window, width, fit, is_closest=is_closest)
    if len(order) > _ALWAYS_BITSET and not is_closest:
        rules = [
            family for family in families if isinstance(family, HintRule) and not family.extras and family.least == 1
        ]
        if len(rules) == len(families):
            mask, is_exact = find_combined(
                rules, order, min(width, len(order)), fit, is_closest=is_closest, budget=_SEARCH_FIRST
            )
            if is_exact:
                return mask, True
    return fittest_reachable(families, order, width, fit, is_closest=is_closest), True
