"""Memory by kubelet's static memory policy: hints for memory and huge pages together, and the share of each NUMA node.

Flows in: per node what can be allocated, what is free, and the group of nodes that it serves together with; the amounts wanted. Flows out: one hint
list a resource. A node serves either single-node or one group's allocations, never both at a time.
Source: kubelet 1.36 cm/memorymanager/policy_static.go. Its trap is kept: when nothing survives there is no hint list at all, which means "no opinion",
not "impossible" (k/k 128708); the allocation fails afterwards. `is_corrected` gives empty lists instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from msgspec import Struct

from topobus.domain.hint import Hint
from topobus.domain.idset import NodeSet

__all__ = ["MemoryAmount", "MemoryNode", "memory_hints", "share_memory"]


class MemoryAmount(Struct, frozen=True, kw_only=True):
    """One resource (memory, or huge pages of one size) on one node, in bytes."""

    allocatable: int
    free: int


class MemoryNode(Struct, frozen=True, kw_only=True):
    """One NUMA node as the memory policy sees it."""

    id: int
    assignments: int = 0
    """Blocks that live on the node now."""
    group: NodeSet
    """Nodes that it serves together with, itself included."""
    amounts: dict[str, MemoryAmount] = {}


_NOTHING = MemoryAmount(allocatable=0, free=0)
# Nodes up to which all masks are walked. Beyond, the exact family is small anyway: single nodes, existing groups, and subsets of unassigned nodes.
_WALK_LIMIT = 16


def memory_hints(
    nodes: Sequence[MemoryNode],
    request: Mapping[str, int],
    *,
    reusable: Mapping[NodeSet, Mapping[str, int]] | None = None,
    is_corrected: bool = False,
) -> dict[str, tuple[Hint, ...]]:
    """Give one hint list a resource, the same masks for all of them, in kubelet's order; no list at all when nothing survives.

    Shapes:  reusable — bytes that init containers left, by exactly the mask they were taken for.
    Cost:    2^n masks up to 16 nodes; beyond, masks of unassigned nodes wider than the narrowest sufficient width are left out.
    """
    by_id = {one.id: one for one in nodes}
    smallest = len(nodes)
    feasible: list[NodeSet] = []
    for mask in _masks(nodes, request):
        members = [by_id[one] for one in mask]
        if any(_sum(members, resource, is_free=False) < wanted for resource, wanted in request.items()):
            continue
        smallest = min(smallest, len(mask))
        if _is_split(members, mask):
            continue
        again = (reusable or {}).get(mask, {})
        if all(_sum(members, resource, is_free=True) + again.get(resource, 0) >= wanted for resource, wanted in request.items()):
            feasible.append(mask)
    if not feasible and not is_corrected:
        return {}
    hints = tuple(Hint(mask, len(mask) == smallest) for mask in feasible)
    return dict.fromkeys(request, hints)


def share_memory(nodes: Sequence[MemoryNode], mask: NodeSet, wanted: int, resource: str) -> dict[int, int] | None:
    """Fill the mask's nodes in ascending order of id; None when they hold too little."""
    shares: dict[int, int] = {}
    for one in sorted(nodes, key=lambda node: node.id):
        if one.id in mask and wanted > 0:
            taken = min(wanted, one.amounts.get(resource, _NOTHING).free)
            if taken:
                shares[one.id] = taken
                wanted -= taken
    return shares if wanted == 0 else None


def _sum(members: Sequence[MemoryNode], resource: str, *, is_free: bool) -> int:
    amounts = (one.amounts.get(resource, _NOTHING) for one in members)
    return sum(one.free if is_free else one.allocatable for one in amounts)


def _is_split(members: Sequence[MemoryNode], mask: NodeSet) -> bool:
    """Say whether the mask would tear a group apart, or join a node that serves alone."""
    if len(members) == 1:
        return len(members[0].group) > 1
    return any(one.assignments > 0 and (len(one.group) == 1 or one.group != mask) for one in members)


def _masks(nodes: Sequence[MemoryNode], request: Mapping[str, int]) -> Iterator[NodeSet]:
    """All masks by width then ids; on big machines only those that can matter: see the module's cost."""
    ids = sorted(one.id for one in nodes)
    if len(ids) <= _WALK_LIMIT:
        for size in range(1, len(ids) + 1):
            for chosen in combinations(ids, size):
                yield NodeSet.of(chosen)
        return
    seen: set[NodeSet] = set()
    for one in ids:
        seen.add(NodeSet(one))
    unassigned = [one for one in nodes if one.assignments == 0]
    by_worth = sorted(unassigned, key=lambda one: (-min((one.amounts.get(name, _NOTHING).free for name in request), default=0), one.id))
    for size in range(2, len(by_worth) + 1):
        seen.add(NodeSet.of(one.id for one in by_worth[:size]))
    seen |= {one.group for one in nodes if len(one.group) > 1}
    seen.add(NodeSet.of(ids))
    yield from sorted(seen, key=lambda mask: (len(mask), mask.ids))
