"""The memory of a node during one plan: hints out of it, blocks taken from it, and the memory that
init containers leave for reuse.

Immutable: taking returns the blocks and the memory that is available afterwards, so a search may
fork as often as it likes.
Source: kubelet 1.36 cm/memorymanager/policy_static.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, structs

from topobus.engine.alignment.memory.memory_allocation import allocate_memory, memory_nodes
from topobus.engine.alignment.memory.memory_rule import memory_rule
from topobus.engine.alignment.merge.hint_rule import HintRule
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet
from topobus.values.outcome import MemoryBlock, Reason
from topobus.values.request import ContainerKind
from topobus.values.view import NodeView

__all__ = ["AvailableMemory"]


class AvailableMemory(Struct, frozen=True, kw_only=True):
    """The memory that exists, the memory that is held, and the memory that may be reused."""

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

    def rule(self, wanted: Mapping[str, int], *, is_pod: bool) -> HintRule | None:
        """The hints for so much of each kind.

        None when nothing is wanted or memory is not aligned.
        """
        if not self.allocatable or not wanted:
            return None
        return memory_rule(memory_nodes(self.allocatable, self.blocks), wanted, {} if is_pod else self.reusable)

    def take(
        self, wanted: Mapping[str, int], hint: Hint, kind: ContainerKind
    ) -> tuple[tuple[MemoryBlock, ...], AvailableMemory] | Reason:
        """Take memory inside the affinity.

        Memory that an init container takes may be taken again by the containers after it.
        """
        if not self.allocatable or not wanted:
            return (), self
        blocks = allocate_memory(memory_nodes(self.allocatable, self.blocks), wanted, hint, reusable=self.reusable)
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
