"""One node as a plan sees it: the machine, the devices and who holds what, small enough to travel
in a decision event.

A plan is a pure function of a NodeView and a PodRequest. The view in the event makes any past
decision replayable offline.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from topobus.values.counters import CounterSet
from topobus.values.device import Device
from topobus.values.device_sharing import HeldShare
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import MemoryBlock
from topobus.values.own_shapes import OwnShape, fault_of_own_shapes
from topobus.values.request import Policy, Scope

__all__ = [
    "AlignmentOptions",
    "CoreView",
    "CpuOptions",
    "KubeletVersion",
    "NodeAlignment",
    "NodeView",
    "NumaMemory",
    "PlanMode",
]


class KubeletVersion(StrEnum):
    """The kubelet release whose semantics mode compatible follows.

    Only releases whose answers differ have a name of their own.
    """

    V1_35 = "1.35"
    """Device hints range over all NUMA nodes, those without such a device included."""
    V1_36 = "1.36"
    """Device hints range over the NUMA nodes that host such a device (k/k PR 138244)."""
    V1_37 = "1.37"
    """With distribute-cpus-across-numa the affinity's width is a floor for the nodes used (k/k PR
    139456)."""


class PlanMode(StrEnum):
    """What happens when kubelet's order of containers and choices ends in a refusal.

    A pod that kubelet admits is placed alike in both.
    """

    COMPATIBLE = "compatible"
    """The refusal is kept, as in kubelet."""
    CORRECTED = "corrected"
    """Other hints, devices and ways of sharing among the containers are searched;
    `AlignmentOptions.search_steps` bounds it."""


class CpuOptions(Struct, frozen=True, kw_only=True):
    """The CPU manager's static policy options, by kubelet's names with underscores."""

    full_pcpus_only: bool = False
    distribute_cpus_across_numa: bool = False
    align_by_socket: bool = False
    distribute_cpus_across_cores: bool = False
    prefer_align_cpus_by_uncorecache: bool = False
    strict_cpu_reservation: bool = False
    """Takes the reserved CPUs out of the shared pool; it changes no exclusive assignment."""
    has_affinity_floor: bool = False
    """With distribute_cpus_across_numa use at least as many NUMA nodes as the affinity has: kubelet
    from 1.37 on."""
    is_corrected: bool = False
    """Differ from kubelet 1.36 where it is wrong: spread over the nodes that were scored (k/k
    141237); a core or socket with an offline CPU can be wholly free (124066); a partly used L3
    group is taken when it holds enough (137315); the affinity's width is a floor for the spread
    (139456)."""


class CoreView(Struct, frozen=True, kw_only=True):
    """One physical core: its online SMT siblings and where it sits."""

    cpus: CpuSet
    numa_node: int | None = None
    socket: int | None = None
    l3: int | None = None


class AlignmentOptions(Struct, frozen=True, kw_only=True):
    """How a node aligns: kubelet's Topology Manager settings by kubelet's names."""

    policy: Policy = Policy.BEST_EFFORT
    scope: Scope = Scope.CONTAINER
    prefer_closest_numa_nodes: bool = False
    cpu: CpuOptions = CpuOptions()
    mode: PlanMode = PlanMode.COMPATIBLE
    """The default is kubelet's, and what decisions recorded before there
    was a choice were made by."""
    search_steps: int = 2000
    """Tries of one container that mode corrected may spend on a pod; 2000
    take about half a second."""
    kubelet: KubeletVersion = KubeletVersion.V1_36
    aligns_memory: bool = False
    """kubelet's memory manager policy Static: memory and huge pages are aligned and kept apart by
    NUMA node."""
    max_allowable_numa_nodes: int = 0
    """kubelet's `max-allowable-numa-nodes`: a machine with more is refused, unless the policy is
    none. 0: no limit, for ours needs none."""
    allow_request_policy: bool = True
    """Whether a pod may ask for a policy, scope or locality other than the node's."""


class NodeAlignment(Struct, frozen=True, kw_only=True):
    """How an operator configured one node's alignment, and whose devices it allocates now. With it
    other services compute the answer that the node itself would give.
    """

    node: str
    options: AlignmentOptions = AlignmentOptions()
    reserved_cpus: CpuSet = CpuSet()
    """Never given exclusively."""
    reserved_memory: dict[str, int] = {}
    """Bytes of ordinary memory by NUMA node that are never handed out; keys are node ids."""
    unheard_classes: dict[str, str] = {}
    """Class whose service keeps silent to since when (RFC 3339, UTC), as the node's topology sees
    it: nothing of it is handed out."""
    own_shapes: tuple[OwnShape, ...] = ()
    """Shapes that the operator adds to those of the machine's tree."""

    def __post_init__(self) -> None:
        """Refuse shapes that no reader could derive.

        Errors: raises ValueError.
        """
        fault = fault_of_own_shapes(self.own_shapes)
        if fault:
            raise ValueError(f"own_shapes: {fault}")


class NumaMemory(Struct, frozen=True, kw_only=True):
    """What one NUMA node has to give, by kind (`memory`, `hugepages-2Mi`), in bytes.

    Reserved memory is taken off.
    """

    id: int
    allocatable: dict[str, int]


class NodeView(Struct, frozen=True, kw_only=True):
    """All inputs of a plan but the request."""

    node: str
    machine_generation: int = 0
    inventory_generations: dict[str, int] = {}
    ledger_sequence: int = 0
    options: AlignmentOptions = AlignmentOptions()
    numa_nodes: NodeSet
    distances: tuple[tuple[int, ...], ...] = ()
    """Rows and columns by position in `numa_nodes`, ascending; empty when unknown."""
    cores: tuple[CoreView, ...] = ()
    reserved_cpus: CpuSet = CpuSet()
    """Never given exclusively (the system's and kubelet's own)."""
    devices: dict[str, tuple[Device, ...]] = {}
    """Class to devices, sorted by name; class `cpu` is left out, because `cores` has it in a
    shorter form."""
    counter_sets: dict[str, tuple[CounterSet, ...]] = {}
    """Class to what its devices' `consumes` refers to; classes without any are left out."""
    unhealthy_cpus: CpuSet = CpuSet()
    held_devices: dict[str, dict[str, str]] = {}
    """Class to device name to the key of the owner that holds it; of several with shares the last
    by key."""
    shared_devices: dict[str, tuple[str, ...]] = {}
    """Class to those of the held devices that are held by share only, sorted: another share may be
    given."""
    held_shares: dict[str, dict[str, dict[str, HeldShare]]] = {}
    """Class to device to owner key to what the owner has of it, where amounts are known."""
    held_cpus: dict[str, CpuSet] = {}
    """Owner key to the CPUs that it holds; none, for an owner that holds nothing at all."""
    memory: tuple[NumaMemory, ...] = ()
    held_memory: dict[str, tuple[MemoryBlock, ...]] = {}
    """Owner key to the memory that it holds."""
    unheard_classes: dict[str, str] = {}
    """Class whose service keeps silent to since when (RFC 3339, UTC):
    nothing of it is handed out."""
    silent_classes: tuple[str, ...] = ()
    """Classes whose service had no opinion in time (custom hints asked, no answer)."""
    custom_hints: dict[str, tuple[tuple[NodeSet | None, bool], ...]] = {}
    """Class to hints that its service gave, for classes with custom hints."""
    resource_names: dict[str, str] = {}
    """Resource name of somebody else's device plugin (`nvidia.com/gpu`) to the class that has its
    devices."""
