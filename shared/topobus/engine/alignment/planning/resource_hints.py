"""The input of a merge and the result of taking: the opinion of one resource, and what one
container got.
"""

from __future__ import annotations

from msgspec import Struct

from topobus.engine.alignment.devices.device_choice import Choice
from topobus.engine.alignment.merge.hint_rule import HintRule, sample_hints
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import HintList, MemoryBlock

__all__ = ["ContainerAllocation", "ResourceHints"]

# Hints recorded a resource: a decision event must stay small on machines with many NUMA
# nodes (8 nodes have 255 masks).
_RECORDED_HINTS = 64


class ResourceHints(Struct, frozen=True, kw_only=True):
    """The opinion of one resource of one container (or of the whole pod) about NUMA nodes."""

    resource: str
    opinion: HintRule | tuple[Hint, ...] | None

    def record(self) -> HintList:
        """The hints for a decision event: all of them, or the narrowest ones of a long list."""
        if self.opinion is None:
            return HintList(resource=self.resource, hints=None)
        if isinstance(self.opinion, HintRule):
            hints, omitted = sample_hints(self.opinion, _RECORDED_HINTS)
        else:
            hints, omitted = self.opinion[:_RECORDED_HINTS], len(self.opinion[_RECORDED_HINTS:])
        return HintList(resource=self.resource, hints=hints, omitted=omitted)


class ContainerAllocation(Struct, frozen=True, kw_only=True):
    """What a container got."""

    cpus: CpuSet = CpuSet()
    devices: dict[str, tuple[str, ...]] = {}
    memory: tuple[MemoryBlock, ...] = ()
    numa_nodes: NodeSet = NodeSet()
    choices: dict[str, Choice] = {}
    """How the devices that were free to choose were chosen, by class."""
    outside: dict[str, tuple[str, ...]] = {}
    """Devices that had to be taken outside the alignment, by class."""
