"""Merge the hints of all resources into the one that kubelet's Topology Manager would choose, without walking permutations.

Flows in: one hint list a resource (None = no opinion, empty = cannot be satisfied), the machine's NUMA nodes, the policy. Flows out: one hint and
whether the pod is admitted. Exact for every input, sparse ids and ids above 63 included.

Why this is exact: kubelet keeps the smaller of two merged candidates under a strict total order (theorem 1 of the knowledge note), so only the *set* of
reachable candidates matters, never their order or multiplicity. A preferred candidate needs one mask common to all lists (phase 1, linear); only when none
exists are the intersections of all combinations needed, and those are built list by list with duplicates dropped, long lists as bitsets (phase 2).
Source: kubelet 1.36 pkg/kubelet/cm/topologymanager/{policy,policy_*}.go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from msgspec import Struct

from topobus.domain.alignment.merge.mask_algebra import MaskAlgebra, members
from topobus.domain.hint import Hint
from topobus.domain.idset import NodeSet
from topobus.domain.request import Policy

__all__ = ["Distances", "Fit", "Merged", "fit_order", "merge_hints"]

Distances = Sequence[Sequence[int]]
"""SLIT rows and columns by position in the sorted node set; empty when the machine does not tell."""

Fit = Callable[[int], tuple[int, int, int]]
"""Sort key of a mask among masks with the same preference: the smallest is the fittest."""

HintLists = Sequence[Sequence[Hint] | None]

_NO_OPINION: tuple[Hint, ...] = (Hint(None, preferred=True),)
_IMPOSSIBLE: tuple[Hint, ...] = (Hint(None, preferred=False),)


# Pairs of masks from which on whole families are intersected at once, and the nodes up to which that is possible (2^16 bits a family).
_PAIRS_LIMIT = 4096
_BITSET_NODES = 16


class Merged(Struct, frozen=True, kw_only=True):
    """The merge's answer and how it came about."""

    hint: Hint
    is_admitted: bool
    width: int = 0
    """Target width of a non-preferred answer: the widest of the resources' narrowest masks."""
    tied: tuple[NodeSet, ...] = ()
    """Preferred candidates that were as narrow as the answer and lost by distance or by mask value, fittest first."""
    has_common: bool = True
    """False when no combination of hints shares a NUMA node (the answer is then the whole machine, not preferred)."""
    is_exact: bool = True
    """False when a bound cut the search on a very large machine: the hint is a right one, but perhaps not the fittest."""


def merge_hints(lists: HintLists, nodes: NodeSet, policy: Policy, *, distances: Distances = (), prefer_closest: bool = False) -> Merged:
    """Merge one hint list a resource into the best common hint.

    Order:   independent of the order of lists and of hints.
    Errors:  raises nothing; a pod that the policy turns away has `is_admitted` False.
    Cost:    linear when a preferred answer exists; else O(lists x 2^nodes) bitset operations, or fewer pairs of masks.
    Source:  kubelet 1.36 topologymanager; prefer_closest is `prefer-closest-numa-nodes`, which single-numa-node ignores.

    >>> one, two = NodeSet(0), NodeSet(0, 1)
    >>> merge_hints([[Hint(one, preferred=True), Hint(two, preferred=False)], None], two, Policy.RESTRICTED).hint
    Hint(nodes=NodeSet(0), preferred=True)
    """
    if policy is Policy.NONE:
        return Merged(hint=Hint(None, preferred=False), is_admitted=True)
    flat = [_flatten(hints) for hints in lists]
    is_single = policy is Policy.SINGLE_NUMA_NODE
    if is_single:
        flat = [tuple(hint for hint in hints if hint.preferred and (hint.nodes is None or len(hint.nodes) == 1)) for hints in flat]
    merged = _merge(flat, nodes, fit_order(nodes, distances if prefer_closest and not is_single else ()))
    hint = merged.hint
    if is_single and hint.nodes == nodes:
        hint = Hint(None, hint.preferred)
    return Merged(
        hint=hint,
        is_admitted=policy is Policy.BEST_EFFORT or hint.preferred,
        width=merged.width,
        tied=merged.tied,
        has_common=merged.has_common,
    )


def fit_order(nodes: NodeSet, distances: Distances = ()) -> Fit:
    """Make the order of fitness: fewer nodes, then nearer nodes when distances are given, then the smaller mask value.

    kubelet compares mean distances, the diagonal included; masks of equal size are compared only, so the integer sum orders them the same.
    """
    if not distances:
        return lambda bits: (bits.bit_count(), 0, bits)
    ids = nodes.ids
    rows = {identifier: dict(zip(ids, row, strict=False)) for identifier, row in zip(ids, distances, strict=False)}

    # The sum over a mask's ordered pairs, by node: its row's sum over the mask, looked up eight nodes at a time.
    tables = {identifier: _row_tables([rows[identifier].get(other, 0) for other in ids]) for identifier in ids if identifier in rows}
    place = {identifier: position for position, identifier in enumerate(ids)}

    def key(bits: int) -> tuple[int, int, int]:
        members = [identifier for identifier in ids if bits >> identifier & 1]
        packed = 0
        for member in members:
            packed |= 1 << place[member]
        chunks = packed.to_bytes(-(-len(ids) // 8), "little")
        total = 0
        for member in members:
            if member in tables:
                for table, chunk in zip(tables[member], chunks, strict=True):
                    total += table[chunk]
        return (len(members), total, bits)

    return key


def _row_tables(row: Sequence[int]) -> list[list[int]]:
    """For each eight columns the sums over all their subsets."""
    tables: list[list[int]] = []
    for start in range(0, len(row), 8):
        sums = [0]
        for distance in row[start : start + 8]:
            sums += [total + distance for total in sums]
        tables.append(sums)
    return tables


def _flatten(hints: Sequence[Hint] | None) -> Sequence[Hint]:
    if hints is None:
        return _NO_OPINION
    return hints or _IMPOSSIBLE


def _merge(lists: Sequence[Sequence[Hint]], nodes: NodeSet, fit: Fit) -> Merged:
    whole = nodes.bits
    if not lists:
        return Merged(hint=Hint(nodes, preferred=True), is_admitted=True)
    raw = [{hint.nodes.bits for hint in hints if hint.nodes is not None} for hints in lists]
    width = max((min(mask.bit_count() for mask in masks) for masks in raw if masks), default=0)
    common = sorted(_common_preferred(lists, whole), key=fit)
    if common:
        best = common[0]
        tied = tuple(NodeSet.from_bits(bits) for bits in common[1:] if bits.bit_count() == best.bit_count())
        return Merged(hint=Hint(NodeSet.from_bits(best), preferred=True), is_admitted=True, width=width, tied=tied)
    families = [masks | {whole} if any(hint.nodes is None for hint in hints) else masks for hints, masks in zip(lists, raw, strict=True)]
    reachable = _intersections(families, whole)
    if not reachable:
        return Merged(hint=Hint(nodes, preferred=False), is_admitted=False, width=width, has_common=False)
    best = min(reachable, key=lambda bits: (_width_class(bits.bit_count(), width), fit(bits)))
    return Merged(hint=Hint(NodeSet.from_bits(best), preferred=False), is_admitted=False, width=width)


def _common_preferred(lists: Sequence[Sequence[Hint]], whole: int) -> set[int]:
    """Masks that every list prefers (or has no opinion on), clipped to the machine; equality is tested on the raw masks."""
    opinions: list[set[int]] = []
    for hints in lists:
        preferred = {hint.nodes.bits for hint in hints if hint.preferred and hint.nodes is not None}
        if not any(hint.preferred and hint.nodes is None for hint in hints):
            if not preferred:
                return set()
            opinions.append(preferred)
    wild = [
        {hint.nodes.bits for hint in hints if hint.preferred and hint.nodes is not None}
        for hints in lists
        if any(hint.preferred and hint.nodes is None for hint in hints)
    ]
    candidates = set.intersection(*opinions) if opinions else {whole}.union(*wild)
    return {bits & whole for bits in candidates} - {0}


def _intersections(families: Sequence[Collection[int]], whole: int) -> set[int]:
    """All non-empty intersections of one mask from each family, clipped to the nodes that every family can reach (lemma B)."""
    window = whole
    for masks in families:
        union = 0
        for bits in masks:
            union |= bits
        window &= union
    if not window:
        return set()
    clipped = sorted(({bits & window for bits in family} for family in families), key=len)
    reached = {window}
    for masks in clipped:
        if len(reached) * len(masks) > _PAIRS_LIMIT and window.bit_count() <= _BITSET_NODES:
            return _intersections_at_once(clipped, window)
        reached = {bits & mask for bits in reached for mask in masks}
    return reached - {0}


def _intersections_at_once(families: Sequence[Collection[int]], window: int) -> set[int]:
    """The same for long lists: each family as one integer, all masks treated together."""
    order = NodeSet.from_bits(window).ids
    universe = MaskAlgebra(len(order))
    places = {1 << one: position for position, one in enumerate(order)}
    reached = 1 << ((1 << len(order)) - 1)
    for masks in families:
        packed = 0
        for bits in masks:
            mask, rest = 0, bits
            while rest:
                low = rest & -rest
                mask |= 1 << places[low]
                rest ^= low
            packed |= 1 << mask
        reached = universe.intersections(reached, packed)
    return {sum(1 << one for position, one in enumerate(order) if mask >> position & 1) for mask in members(reached)} - {0}


def _width_class(count: int, width: int) -> tuple[int, int]:
    if count == width:
        return (0, 0)
    return (1, -count) if count < width else (2, 0)
