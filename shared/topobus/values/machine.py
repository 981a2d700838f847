"""The machine: NUMA nodes, CPUs, memory and the PCI tree of one node, as discovery saw it at one
moment.

`topobus.sysfs` reads the values. This module reads nothing itself. Node and CPU ids are the
kernel's. A fact that the machine does not report is None or empty, never a plausible default.
"""

from __future__ import annotations

from msgspec import Struct

from topobus.values.idset import CpuSet, NodeSet
from topobus.values.names import Generation
from topobus.values.pci import PciAddress

__all__ = ["Cpu", "HugepagePool", "L3Cache", "Machine", "NumaNode", "PciDevice", "PciLink"]


class HugepagePool(Struct, frozen=True, kw_only=True):
    """Huge pages of one size on one NUMA node, counted in pages."""

    page_bytes: int
    total: int
    free: int


class NumaNode(Struct, frozen=True, kw_only=True):
    """One NUMA node.

    `cpus` holds online CPUs only and is empty on memory-only nodes (CXL, HBM, GPU memory).
    """

    id: int
    cpus: CpuSet
    memory_bytes: int
    hugepages: tuple[HugepagePool, ...] = ()
    near_cpus: CpuSet = CpuSet()
    """CPUs that reach this memory best, unusable ones included: the node's own, or for a
    memory-only node those that the machine's tables name (HMAT initiators, distances, the GPU's own
    CPUs). Empty when the machine does not show it."""


class Cpu(Struct, frozen=True, kw_only=True):
    """One present logical CPU.

    Topology fields are None when it is offline, because the kernel hides them then. A CPU outside
    our cpuset has `is_allowed` False and `online` False: it runs, but not for us. Its topology
    fields are known.

    `core` is the lowest CPU id among the SMT siblings that are online (unique in the machine, as
    kubelet numbers cores). `l3` likewise is the lowest CPU id that shares the level-3 cache.
    """

    id: int
    online: bool
    core: int | None = None
    socket: int | None = None
    die: int | None = None
    numa_node: int | None = None
    l3: int | None = None
    kind: str = ""
    """`performance`, `efficiency` or `low-power` on hybrid machines; empty where the kernel does
    not show it."""
    is_allowed: bool = True


class L3Cache(Struct, frozen=True, kw_only=True):
    """One level-3 cache whose size the machine reports. `cpu` is the value that its CPUs have in
    `Cpu.l3`.
    """

    cpu: int
    size_bytes: int


class PciLink(Struct, frozen=True, kw_only=True):
    """A PCIe link: speed per lane in GT/s and lane count, now and at best.

    Zero where the machine reports none.
    """

    speed_gts: float = 0.0
    width: int = 0
    max_speed_gts: float = 0.0
    max_width: int = 0

    @property
    def bandwidth_gbps(self) -> float:
        """Usable bandwidth in Gbit/s one way, after line coding (8b/10b below 8 GT/s, 128b/130b
        from there).
        """
        coding = 0.8 if self.speed_gts < 8 else 128 / 130
        return self.speed_gts * self.width * coding


class PciDevice(Struct, frozen=True, kw_only=True):
    """One PCI function.

    `path` holds the bridges between the root complex and the function, root side first. The path of
    a function below a switch includes the switch's upstream and downstream ports. `class_code` is
    the 24-bit class (0x030200 = 3D controller).
    """

    address: PciAddress
    vendor: int
    device: int
    subsystem_vendor: int = 0
    subsystem_device: int = 0
    class_code: int = 0
    revision: int = 0
    root: str = ""
    """The root complex: `pci0000:17`, as in `resource.kubernetes.io/pcieRoot`."""
    path: tuple[PciAddress, ...] = ()
    is_bridge: bool = False
    is_root_port: bool = False
    is_switch_port: bool = False
    numa_node: int | None = None
    """None when the kernel shows -1: unknown is not node 0."""
    driver: str = ""
    link: PciLink | None = None
    iommu_group: int | None = None
    physfn: PciAddress | None = None
    near_cpus: CpuSet = CpuSet()
    """Online CPUs near the function (`local_cpulist`, else the NUMA node's; all online CPUs when
    unknown)."""

    switch: PciAddress | None = None
    """The upstream port of the innermost PCIe switch above this function, or None when there is
    none."""


class Machine(Struct, frozen=True, kw_only=True):
    """All that discovery knows of one node.

    `distances[i][j]` is the SLIT distance (10 = local) from `numa_nodes[i]` to `numa_nodes[j]`. It
    is empty when the machine reports none. Rows go by position in `numa_nodes`, which is sorted by
    id. Ids may be sparse, so call `distance` instead of indexing by id.
    """

    node: str
    generation: Generation = 1
    """Grows by one with every change that discovery published."""
    boot_id: str = ""
    architecture: str = ""
    numa_nodes: tuple[NumaNode, ...]
    cpus: tuple[Cpu, ...]
    l3_caches: tuple[L3Cache, ...] = ()
    """Sorted by `cpu`; a cache whose size the machine does not show is not in it."""
    distances: tuple[tuple[int, ...], ...] = ()
    pci_devices: tuple[PciDevice, ...] = ()
    warnings: tuple[str, ...] = ()
    """What was unreadable or contradictory in the tree, one sentence each, with the path."""

    @property
    def node_set(self) -> NodeSet:
        """All NUMA nodes, memory-only ones included (kubelet's default affinity mask)."""
        return NodeSet.of(numa_node.id for numa_node in self.numa_nodes)

    @property
    def online_cpus(self) -> CpuSet:
        """All online CPUs."""
        return CpuSet.of(cpu.id for cpu in self.cpus if cpu.online)
