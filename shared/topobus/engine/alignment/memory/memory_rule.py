"""The memory policy's hints as a rule: sets of nodes that hold nothing yet, and a few masks
besides.

A node serves either single-node or one group's allocations. So the masks with enough free memory
are exactly the sets of unassigned nodes, the single nodes that are in no group, and each existing
group (docs/knowledge/topology-merge.md#lemma-c). Memory that init containers left for exactly one
mask may add a few more. Memory and huge pages of each size are wanted together, on the same mask.
Source: kubelet 1.36 cm/memorymanager/policy_static.go, calculateHints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, structs

from topobus.engine.alignment.merge.hint_rule import HintRule, Unit
from topobus.engine.alignment.merge.mask_algebra import BITSET_LIMIT, MaskAlgebra, first, positions, unpack
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet

__all__ = ["MemoryAmount", "MemoryNode", "best_hint", "memory_rule"]


class MemoryAmount(Struct, frozen=True, kw_only=True):
    """One resource (memory, or huge pages of one size) on one node, in bytes."""

    allocatable: int
    free: int


class MemoryNode(Struct, frozen=True, kw_only=True):
    """One NUMA node as the memory policy sees it."""

    id: int
    assignments: int = 0
    """Blocks that are on the node now."""
    group: NodeSet
    """Nodes that it serves together with, itself included."""
    amounts: dict[str, MemoryAmount] = {}


_NOTHING = MemoryAmount(allocatable=0, free=0)


def memory_rule(
    nodes: Sequence[MemoryNode], request: Mapping[str, int], reusable: Mapping[NodeSet, Mapping[str, int]] | None = None
) -> HintRule:
    """Return the hints for so much of each kind of memory together as a rule.

    Shapes: nodes — all of the machine; request — kind to bytes, not empty; reusable — bytes that
            init containers left, by exactly the mask that they were taken for.
    Cost: O(nodes x kinds).
    """
    kinds = sorted(request)
    amounts = [[node.amounts.get(kind, _NOTHING) for kind in kinds] for node in nodes]
    # A lane must hold whatever is added up in it.
    most = sum(request.values()) + sum(amount.allocatable + amount.free for row in amounts for amount in row)
    lane_bits = (most + sum(size for sizes in (reusable or {}).values() for size in sizes.values())).bit_length() + 1

    def lanes(values: Iterable[int]) -> int:
        return sum(value << lane_bits * kind for kind, value in enumerate(values))

    everywhere = sum(1 << node.id for node in nodes)
    unassigned = sum(1 << node.id for node in nodes if node.assignments == 0)
    singles = sum(1 << node.id for node in nodes if len(node.group) == 1)
    rule = HintRule(
        units=tuple(
            Unit(1 << node.id, lanes(amount.allocatable for amount in row), lanes(amount.free for amount in row))
            for node, row in zip(nodes, amounts, strict=True)
        ),
        request=lanes(request[kind] for kind in kinds),
        candidates=everywhere,
        combinable=unassigned,
        # A node that holds nothing also serves alone, unless it still names a group.
        least=1 if not unassigned & ~singles else 2,
        kinds=len(kinds),
        lane_bits=lane_bits,
    )
    left = {mask.bits: lanes(sizes.get(kind, 0) for kind in kinds) for mask, sizes in (reusable or {}).items()}
    # A group counts when its nodes that hold anything all belong to it; a node that
    # holds nothing is bound to no group.
    held = {node.id: node.group for node in nodes if node.assignments > 0}
    groups = {
        group.bits
        for group in held.values()
        if len(group) > 1 and not group.bits & ~everywhere and all(held.get(node, group) == group for node in group)
    }

    def is_whole(mask: int) -> bool:
        """Say whether the mask splits no group and joins no node that serves alone."""
        if mask & (mask - 1) == 0:
            return bool(mask & singles)
        return not mask & ~unassigned or mask in groups

    def is_enough(mask: int) -> bool:
        touched = [unit for unit in rule.units if unit.where & mask]
        have = sum(unit.free for unit in touched) + left.get(mask, 0)
        return all(rule.is_left(rule.spare_of(amount)) for amount in (have, sum(unit.total for unit in touched)))

    named = sorted({*(1 << node.id for node in nodes), *groups, *left})
    extras = tuple(
        mask
        for mask in named
        if mask and not mask & ~everywhere and is_whole(mask) and is_enough(mask) and not rule.combines(mask)
    )
    return structs.replace(rule, extras=extras)


def best_hint(rule: HintRule, around: int = 0) -> Hint | None:
    """Return the hint that kubelet's memory policy takes by itself, among those that contain
    `around`: preferred, then narrowest, then of smallest value.

    Shapes: around — bits of node ids.
    Result: None when there is none. Beyond 16 nodes, a narrow one that a short search finds.
    """
    order = positions(rule.candidates)
    mask: int | None
    if len(order) <= BITSET_LIMIT:
        algebra = MaskAlgebra(len(order))
        family = rule.inside(algebra, order)
        for position, node in enumerate(order):
            if around >> node & 1:
                family &= algebra.having[position]
        sizes = sorted(range(1, len(order) + 1), key=lambda size: (size != rule.narrowest, size))
        layer = next((layer for size in sizes if (layer := family & algebra.layers[size])), 0)
        mask = unpack(first(layer), order) if layer else None
    else:
        masks = [
            mask
            for mask in (*rule.extras, *(1 << node for node in order), *_combinations(rule, around))
            if rule.has(mask)
        ]
        masks = [mask for mask in masks if not around & ~mask]
        mask = min(masks, key=lambda mask: (mask.bit_count() != rule.narrowest, mask.bit_count(), mask), default=None)
    return Hint(NodeSet.from_bits(mask), mask.bit_count() == rule.narrowest) if mask else None


def _combinations(rule: HintRule, around: int) -> list[int]:
    """A few combinations that contain `around`: nodes by id, and nodes by how much they have of the
    kind they are shortest of.
    """
    wanted = rule.lanes(rule.request)
    rest = [node for node in positions(rule.nodes) if not around >> node & 1]
    scarce = {
        node: min(have / max(want, 1) for have, want in zip(rule.lanes(rule.free_in(1 << node)), wanted, strict=True))
        for node in rest
    }
    masks = [rule.nodes]
    for ranked in (rest, sorted(rest, key=lambda node: -scarce[node])):
        mask = around
        for node in ranked:
            if rule.combines(mask):
                break
            mask |= 1 << node
        masks.append(mask)
    return masks
