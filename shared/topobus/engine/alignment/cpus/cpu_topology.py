"""The places of a machine's online CPUs, in the form that CPU assignment works on: bitsets by core,
L3 group, NUMA node and socket.

Ids are kubelet's: a core is the lowest CPU id among its siblings, a missing L3 is the socket's own
group. Averages (CPUs per core, per socket) are kept beside the real counts because kubelet's tests
for "wholly free" use the averages.
Source: kubelet 1.36 cm/cpumanager/topology/topology.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Self

from msgspec import Struct

from topobus.values.idset import CpuSet, NodeSet
from topobus.values.view import CoreView

__all__ = ["CpuPlace", "CpuTopology"]


class CpuPlace(Struct, frozen=True):
    """One online CPU and its place."""

    cpu: int
    core: int
    socket: int
    numa_node: int | None
    l3: int


class CpuTopology:
    """The CPUs of one machine by level. It must not be changed once made.

    Shapes: every map goes from an id (core, socket, NUMA node, L3) to a bitset of CPU ids, as
            Python's integers. A CPU without a NUMA node is in no `by_numa`.
    """

    __slots__ = ("all_bits", "by_core", "by_l3", "by_numa", "by_socket", "count")

    def __init__(self, places: Iterable[CpuPlace]) -> None:
        self.all_bits = 0
        self.by_core: dict[int, int] = {}
        self.by_l3: dict[int, int] = {}
        self.by_numa: dict[int, int] = {}
        self.by_socket: dict[int, int] = {}
        for place in places:
            self._add(1 << place.cpu, place.core, place.socket, place.numa_node, place.l3)
        self.count = self.all_bits.bit_count()

    @classmethod
    def of_cores(cls, cores: Iterable[CoreView]) -> Self:
        """Arrange the cores of a view by level.

        Without a socket all cores are in one socket. Without an L3 the socket is the group, under
        an id of its own.
        """
        topology = cls(())
        for core in cores:
            socket = core.socket if core.socket is not None else 0
            topology._add(
                core.cpus.bits,
                core.cpus.lowest,
                socket,
                core.numa_node,
                core.l3 if core.l3 is not None else -1 - socket,
            )
        topology.count = topology.all_bits.bit_count()
        return topology

    def mirrored(self) -> CpuTopology:
        """Reverse all ids, so that code that prefers the smallest takes the largest.
        `mirrored_cpus` converts CPUs in both directions.
        """
        mirrored = CpuTopology(())
        mirrored.all_bits, mirrored.count = self._mirror(self.all_bits), self.count
        mirrored.by_core, mirrored.by_l3, mirrored.by_numa, mirrored.by_socket = (
            {-unit: self._mirror(bits) for unit, bits in units.items()}
            for units in (self.by_core, self.by_l3, self.by_numa, self.by_socket)
        )
        return mirrored

    def mirrored_cpus(self, cpus: CpuSet) -> CpuSet:
        """Reverse the ids of CPUs: the lowest one of the machine's range becomes the highest."""
        return CpuSet.from_bits(self._mirror(cpus.bits))

    def _mirror(self, bits: int) -> int:
        top = self.all_bits.bit_length() - 1
        mirrored = 0
        for cpu in CpuSet.from_bits(bits):
            mirrored |= 1 << (top - cpu)
        return mirrored

    def _add(self, bits: int, core: int, socket: int, numa_node: int | None, l3: int) -> None:
        self.all_bits |= bits
        self.by_core[core] = self.by_core.get(core, 0) | bits
        self.by_l3[l3] = self.by_l3.get(l3, 0) | bits
        self.by_socket[socket] = self.by_socket.get(socket, 0) | bits
        if numa_node is not None:
            self.by_numa[numa_node] = self.by_numa.get(numa_node, 0) | bits

    @property
    def threads_per_core(self) -> int:
        """CPUs over cores, rounded down, as kubelet counts (an offline sibling lowers it)."""
        return self.count // len(self.by_core) if self.by_core else 1

    @property
    def cpus_per_socket(self) -> int:
        """CPUs over sockets, rounded down."""
        return self.count // len(self.by_socket) if self.by_socket else 0

    @property
    def cpus_per_l3(self) -> int:
        """CPUs over L3 groups, rounded down."""
        return self.count // len(self.by_l3) if self.by_l3 else 0

    def cpus_by_node(self) -> Mapping[int, CpuSet]:
        """CPUs of each NUMA node that has some."""
        return {node: CpuSet.from_bits(bits) for node, bits in sorted(self.by_numa.items())}

    def sockets_by_node(self) -> Mapping[int, frozenset[int]]:
        """Sockets that each NUMA node with CPUs lies on."""
        return {
            node: frozenset(socket for socket, cpus in self.by_socket.items() if cpus & bits)
            for node, bits in sorted(self.by_numa.items())
        }

    def cpus_of_nodes(self, nodes: NodeSet) -> int:
        """Bits of all CPUs on these NUMA nodes."""
        bits = 0
        for node in nodes:
            bits |= self.by_numa.get(node, 0)
        return bits

    def cpus_of_sockets_of(self, nodes: NodeSet) -> int:
        """Bits of all CPUs on every socket that one of these NUMA nodes touches."""
        near = self.cpus_of_nodes(nodes)
        bits = 0
        for cpus in self.by_socket.values():
            if cpus & near:
                bits |= cpus
        return bits

    def nodes_of(self, cpus: CpuSet) -> NodeSet:
        """NUMA nodes that hold some of these CPUs."""
        return NodeSet.of(node for node, bits in self.by_numa.items() if bits & cpus.bits)

    def siblings_of(self, cpus: CpuSet) -> CpuSet:
        """These CPUs and all their SMT siblings."""
        bits = 0
        for core in self.by_core.values():
            if core & cpus.bits:
                bits |= core
        return CpuSet.from_bits(bits)
