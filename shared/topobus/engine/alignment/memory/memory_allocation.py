"""Memory by kubelet's static memory policy: hints for memory and huge pages together, and the
allocation over NUMA nodes.

A node serves either single-node or one group's allocations, never both at a time.
Source: kubelet 1.36 cm/memorymanager/policy_static.go. Its defect is kept: when nothing survives
there is no hint list at all, which means "no opinion", not "impossible" (k/k 128708), and the
allocation fails afterwards. `is_corrected` gives empty lists instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, structs

from topobus.engine.alignment.memory.memory_rule import MemoryAmount, MemoryNode, best_hint, memory_rule
from topobus.engine.alignment.merge.hint_rule import HintRule, list_hints
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet
from topobus.values.outcome import MemoryBlock, Reason
from topobus.values.request import ContainerKind
from topobus.values.view import NodeView

__all__ = [
    "AvailableMemory",
    "MemoryAmount",
    "MemoryBlock",
    "MemoryNode",
    "allocate_memory",
    "memory_hints",
    "memory_nodes",
]


class AvailableMemory(Struct, frozen=True, kw_only=True):
    """The memory of a node during one plan: what exists, what is held, and what init containers leave
    for reuse.

    Taking returns the blocks and the memory that is available afterwards, so a search may fork as
    often as it likes.
    """

    allocatable: dict[int, dict[str, int]] = {}
    """NUMA node to kind to bytes; empty when memory is not aligned."""
    blocks: tuple[MemoryBlock, ...] = ()
    reusable: dict[NodeSet, dict[str, int]] = {}

    @classmethod
    def of(cls, view: NodeView) -> AvailableMemory:
        """The memory of a view. Empty when the node does not align memory."""
        if not view.options.aligns_memory:
            return cls()
        blocks = tuple(block for _, held in sorted(view.held_memory.items()) for block in held)
        return cls(allocatable={numa_memory.id: numa_memory.allocatable for numa_memory in view.memory}, blocks=blocks)

    @property
    def nodes(self) -> tuple[MemoryNode, ...]:
        """What is free on each node."""
        return memory_nodes(self.allocatable, self.blocks)

    def rule(self, wanted: Mapping[str, int], *, is_pod: bool) -> HintRule | None:
        """The hints for so much of each kind.

        None when nothing is wanted or memory is not aligned.
        """
        if not self.allocatable or not wanted:
            return None
        return memory_rule(self.nodes, wanted, {} if is_pod else self.reusable)

    def take(
        self, wanted: Mapping[str, int], hint: Hint, kind: ContainerKind
    ) -> tuple[tuple[MemoryBlock, ...], AvailableMemory] | Reason:
        """Take memory inside the affinity.

        Memory that an init container takes may be taken again by the containers after it.
        """
        if not self.allocatable or not wanted:
            return (), self
        blocks = allocate_memory(self.nodes, wanted, hint, reusable=self.reusable)
        if isinstance(blocks, Reason):
            return blocks
        return blocks, structs.replace(self, blocks=(*self.blocks, *blocks), reusable=self._left(blocks, wanted, kind))

    def _left(
        self, blocks: Iterable[MemoryBlock], wanted: Mapping[str, int], kind: ContainerKind
    ) -> dict[NodeSet, dict[str, int]]:
        left = {nodes: dict(kinds) for nodes, kinds in self.reusable.items()}
        for block in blocks:
            kinds = left.setdefault(block.nodes, {})
            have = kinds.get(block.kind, 0)
            if kind is ContainerKind.INIT:
                # Init containers run one after the other: what the largest
                # took is there for all that follow.
                kinds[block.kind] = max(have, wanted[block.kind])
            else:
                kinds[block.kind] = max(0, have - wanted[block.kind])
        return left


def memory_nodes(allocatable: Mapping[int, Mapping[str, int]], blocks: Iterable[MemoryBlock]) -> tuple[MemoryNode, ...]:
    """Compute what is free on each node, and which nodes it serves together with, from the blocks
    that are held.

    Shapes: allocatable — node to kind to bytes; blocks — of all owners. A block on a node that does
            not exist counts for nothing.
    Units: bytes. Result: sorted by node id. Free is never below 0, even when more is held than
            exists (huge pages were resized).
    Cost: O(blocks x nodes of a block).
    """
    free = {node: dict(kinds) for node, kinds in allocatable.items()}
    assignments = dict.fromkeys(allocatable, 0)
    groups = {node: NodeSet(node) for node in allocatable}
    for block in blocks:
        for node in block.nodes:
            if node in free:
                assignments[node] += 1
                groups[node] = block.nodes
                free[node][block.kind] = free[node].get(block.kind, 0) - block.by_node.get(node, 0)
    return tuple(
        MemoryNode(
            id=node,
            assignments=assignments[node],
            group=groups[node],
            amounts={
                kind: MemoryAmount(allocatable=size, free=max(0, free[node][kind])) for kind, size in kinds.items()
            },
        )
        for node, kinds in sorted(allocatable.items())
    )


def memory_hints(
    nodes: Sequence[MemoryNode],
    request: Mapping[str, int],
    *,
    is_corrected: bool = False,
) -> dict[str, tuple[Hint, ...]]:
    """Return one hint list for each resource, the same masks for all of them, in kubelet's order.

    No list at all when nothing survives.

    Shapes: request — kind to bytes.
    Cost: up to 2^16 masks. The merge works on `memory_rule` instead.
    Source: kubelet 1.36 cm/memorymanager/policy_static.go, calculateHints.
    """
    hints = list_hints(memory_rule(nodes, request))
    if not hints and not is_corrected:
        return {}
    return dict.fromkeys(request, hints)


def allocate_memory(
    nodes: Sequence[MemoryNode],
    request: Mapping[str, int],
    affinity: Hint,
    *,
    reusable: Mapping[NodeSet, Mapping[str, int]] | None = None,
) -> tuple[MemoryBlock, ...] | Reason:
    """Allocate inside the affinity as kubelet does: extend it when it is too narrow, keep single
    and grouped nodes apart, fill nodes by id.

    Shapes: affinity — the merged hint. Without nodes, the policy's own best hint is used, which
            must be preferred if the affinity is.
    Units: bytes.
    Result: one block for each kind, kinds sorted, or the reason (`not-enough-memory`,
            `memory-group`) why kubelet would also fail here.
    Errors: raises nothing.
    Source: kubelet 1.36 cm/memorymanager/policy_static.go, Allocate and extendTopologyManagerHint.
    """
    chosen = affinity
    rule = memory_rule(nodes, request, reusable)
    if affinity.nodes is None:
        own = best_hint(rule)
        if own is None or (affinity.preferred and not own.preferred):
            return _reason("not-enough-memory", "no set of NUMA nodes has enough memory of its own", request, affinity)
        chosen = own
    if chosen.nodes is not None and not _satisfies(nodes, chosen.nodes, request):
        inside = chosen.nodes
        wider = best_hint(rule, inside.bits)
        if wider is None or (chosen.preferred and not wider.preferred):
            return _reason(
                "not-enough-memory",
                f"NUMA node {inside} has too little memory, and nothing around it has enough",
                request,
                affinity,
            )
        chosen = wider
    mask = chosen.nodes if chosen.nodes is not None else NodeSet()
    by_id = {node.id: node for node in nodes}
    if len(mask) > 1 and any(by_id[node].assignments and by_id[node].group != mask for node in mask):
        return _reason("memory-group", f"NUMA nodes {mask} serve other groups already", request, chosen)
    return tuple(
        _fill(by_id, mask, kind, wanted, (reusable or {}).get(mask, {}).get(kind, 0))
        for kind, wanted in sorted(request.items())
    )


def _satisfies(nodes: Sequence[MemoryNode], mask: NodeSet, request: Mapping[str, int]) -> bool:
    members = [node for node in nodes if node.id in mask]
    return all(
        sum(memory_node.amounts[kind].free for memory_node in members if kind in memory_node.amounts) >= wanted
        for kind, wanted in request.items()
    )


def _fill(by_id: Mapping[int, MemoryNode], mask: NodeSet, kind: str, wanted: int, reused: int) -> MemoryBlock:
    """Take from the mask's nodes in ascending order of id. Reused memory is not taken again."""
    left = max(0, wanted - reused)
    shares: list[tuple[int, int]] = []
    for node in mask:
        amount = by_id[node].amounts.get(kind)
        taken = min(left, amount.free) if amount is not None else 0
        if taken:
            shares.append((node, taken))
            left -= taken
    return MemoryBlock(kind=kind, nodes=mask, shares=tuple(shares))


def _reason(code: str, message: str, request: Mapping[str, int], hint: Hint) -> Reason:
    wanted = tuple(f"{kind}={size}" for kind, size in sorted(request.items()))
    return Reason(
        code=code, message=message, facts={"wanted": wanted, "nodes": str(hint.nodes) if hint.nodes is not None else ""}
    )
