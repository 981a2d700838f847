"""Reads NUMA nodes: CPUs, memory, huge pages, distances, and the CPUs near a node that has none.

NumaNode values are sorted by id, and the distance matrix has that order. Ids are sparse: a row of
`distance` has one column for every online node in id order. A kernel without NUMA has no folder
sys/devices/system/node: the machine is one node 0.

The fast memory of Knights Landing (Xeon Phi 7200) is a NUMA node, a cache in front of the others, or
half of each. Its firmware reports large distances to the fast memory on purpose, so that no program
gets it by default. These distances are a policy and not a latency. They are treated as unknown once
they have shown which fast node belongs to which cluster.
Source: Documentation/ABI/stable/sysfs-devices-node (meminfo, hugepages),
Documentation/admin-guide/mm/numaperf.rst and hugetlbpage.rst; hwloc 2.9, whose recorder keeps what
only root may read in `knl_memoryside_cache`; Intel's "Intel Xeon Phi Processor NUMA modes".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from topobus.sysfs.idsets import read_cpus, read_ids
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import HugepagePool, NumaNode

__all__ = ["NODE_FOLDER", "NumaFacts", "read_node_cpus", "read_numa_facts"]

NODE_FOLDER = "sys/devices/system/node"
# Knights Landing and Knights Mill.
_MODELS = ("87", "133")
# hwloc's dump of the DMI table, where distributions put it.
_SIDE_FILES = ("/var/run/hwloc/knl_memoryside_cache", "/run/hwloc/knl_memoryside_cache")


class NumaFacts(Struct, frozen=True, kw_only=True):
    """Nodes and distances.

    `is_known` is False when the kernel has no NUMA and node 0 is the whole machine. `caches` are
    the CPUs behind each memory-side cache that works as a level-3 cache.
    """

    nodes: tuple[NumaNode, ...]
    distances: tuple[tuple[int, ...], ...] = ()
    is_known: bool = True
    caches: tuple[CpuSet, ...] = ()
    warnings: tuple[str, ...] = ()


class NodeCpus(Struct, frozen=True, kw_only=True):
    """The content of the nodes' own files: online node ids, and the usable CPUs of those nodes."""

    ids: NodeSet
    cpus: dict[int, CpuSet]
    warnings: tuple[str, ...] = ()

    @property
    def node_of(self) -> dict[int, int]:
        """Give each CPU's node."""
        return {cpu: node for node, cpus in self.cpus.items() for cpu in cpus}


def read_node_cpus(tree: Tree) -> NodeCpus:
    """Read which nodes there are and their CPUs.

    A node that cannot be read, or whose CPUs belong to an earlier node, is left out with a warning.
    """
    warnings: list[str] = []
    try:
        ids = read_ids(tree, f"{NODE_FOLDER}/online", NodeSet)
    except HardwareError as err:
        warnings.append(err.message)
        ids = None
    if ids is None:
        ids = NodeSet.of(int(name[4:]) for name in tree.names(NODE_FOLDER) if re.fullmatch(r"node\d+", name))
    cpus: dict[int, CpuSet] = {}
    taken = CpuSet()
    for node in ids:
        folder = f"{NODE_FOLDER}/node{node}"
        try:
            own = read_cpus(tree, folder, "cpumap", "cpulist")
        except HardwareError as err:
            warnings.append(err.message)
            continue
        if own is None:
            warnings.append(f"{folder}: node {node} is online and has neither cpumap nor cpulist; left out")
        elif taken & own:
            # Bad firmware, or nodes made on the kernel's command line
            # (numa=fake) by splitting memory only.
            warnings.append(f"{folder}: CPUs {taken & own} belong to an earlier node already; node {node} left out")
        else:
            cpus[node] = own
            taken |= own
    return NodeCpus(ids=ids, cpus=cpus, warnings=tuple(warnings))


def read_numa_facts(
    tree: Tree,
    node_cpus: NodeCpus,
    *,
    usable: CpuSet,
    allowed: NodeSet | None,
    with_functions: frozenset[int],
    architecture: str,
) -> NumaFacts:
    """Read the nodes that this process can use.

    A limit of memory removes only memory, as one of CPUs removes CPUs: a node with CPUs that we may
    use, or with functions, stays. The kernel never lists a node without memory in cpuset.mems (it
    cuts by N_MEMORY), so such a node is not outside our cpuset.

    Shapes: usable — the CPUs that we may use; allowed — the nodes whose memory we may use (None: no
    limit); with_functions — nodes that have PCI functions.
    """
    warnings = list(node_cpus.warnings)
    if not node_cpus.cpus:
        memory = _read_memory(tree, "proc/meminfo", warnings)
        pages = _read_hugepages(tree, "sys/kernel/mm/hugepages", warnings)
        only = NumaNode(id=0, cpus=usable, memory_bytes=memory, hugepages=pages, near_cpus=usable)
        return NumaFacts(nodes=(only,), distances=(), is_known=False, warnings=tuple(warnings))
    cpus = dict(node_cpus.cpus)
    gpu_nodes = _read_gpu_nodes(tree, cpus)
    if architecture.startswith(("ppc", "power")):
        # GPU memory on POWER disappears when the GPU is reset: a pod's memory must not be there.
        for node in gpu_nodes:
            del cpus[node]
    else:
        cpus |= {node: near for node, near in gpu_nodes.items() if near}
    matrix = _read_distances(tree, node_cpus.ids, warnings)
    is_policy = bool(matrix) and _is_knl(tree)
    near_cpus = _find_near(tree, cpus, matrix, node_cpus, is_policy=is_policy)
    if is_policy and len(node_cpus.ids) > 1:
        warnings.append("distances are a policy on this processor (Knights Landing), no latency; taken as unknown")
        matrix = {}
    nodes = tuple(
        NumaNode(
            id=node,
            cpus=node_cpus.cpus[node] & usable,
            memory_bytes=_read_memory(tree, f"{NODE_FOLDER}/node{node}/meminfo", warnings),
            hugepages=_read_hugepages(tree, f"{NODE_FOLDER}/node{node}/hugepages", warnings),
            near_cpus=near_cpus[node],
        )
        for node in sorted(cpus)
    )
    if allowed is not None and allowed & NodeSet.of(cpus):
        nodes = _limit_memory(nodes, allowed, with_functions, warnings)
    distances = tuple(tuple(matrix[node.id][other.id] for other in nodes) for node in nodes) if matrix else ()
    return NumaFacts(
        nodes=nodes,
        distances=distances,
        caches=_knl_caches(tree, node_cpus.cpus) if is_policy else (),
        warnings=tuple(warnings),
    )


def _limit_memory(
    nodes: Sequence[NumaNode], allowed: NodeSet, with_functions: frozenset[int], warnings: list[str]
) -> tuple[NumaNode, ...]:
    """Remove the memory outside our cpuset, and each node of which nothing is left."""
    outside = [node for node in nodes if node.id not in allowed]
    left_out = NodeSet.of(node.id for node in outside if not node.cpus and node.id not in with_functions)
    if left_out:
        warnings.append(f"NUMA nodes {left_out} are outside our cpuset; left out")
    if forbidden := NodeSet.of(node.id for node in outside if node.memory_bytes) - left_out:
        warnings.append(f"the memory of NUMA nodes {forbidden} is outside our cpuset; counted as none")
    return tuple(
        node if node.id in allowed else replace(node, memory_bytes=0, hugepages=())
        for node in nodes
        if node.id not in left_out
    )


def _read_distances(tree: Tree, ids: NodeSet, warnings: list[str]) -> dict[int, dict[int, int]]:
    """Read the matrix by node id, columns in the order of online nodes.

    Empty when any row is missing or short.
    """
    matrix: dict[int, dict[int, int]] = {}
    for node in ids:
        path = f"{NODE_FOLDER}/node{node}/distance"
        row = (tree.read(path) or "").split()
        if len(row) < len(ids) or not all(value.isdecimal() for value in row[: len(ids)]):
            if row:
                warnings.append(f"{path}: {len(row)} distances for {len(ids)} nodes; distances taken as unknown")
            return {}
        matrix[node] = {other: int(value) for other, value in zip(ids, row, strict=False)}
    return matrix


def _find_near(
    tree: Tree, cpus: dict[int, CpuSet], matrix: dict[int, dict[int, int]], node_cpus: NodeCpus, *, is_policy: bool
) -> dict[int, CpuSet]:
    """Find the CPUs near each node: its own and those that the firmware names as initiators.

    A node without any gets the closest nodes' CPUs.
    """
    near = dict(cpus)
    for node in sorted(cpus, key=lambda node: (not cpus[node], node)):
        for other in _read_initiators(tree, node):
            if other != node and other in near:
                near[node] |= near[other]
        if not near[node] and matrix:
            others = [other for other in sorted(cpus) if other != node]
            closest = min((matrix[node][other] for other in others), default=0)
            tied = [other for other in others if matrix[node][other] == closest]
            # As far as the node itself, or equally far from all: that has no meaning (where far is
            # meant as far).
            if closest > matrix[node][node] and (is_policy or len(tied) < len(node_cpus.ids) - 1):
                for other in tied:
                    near[node] |= near[other]
    return near


def _read_initiators(tree: Tree, node: int) -> tuple[int, ...]:
    """Name the nodes that the firmware's HMAT lists as the best initiators: class 1 is CPUs only,
    class 0 may name a device.
    """
    for access in ("access1", "access0"):
        folder = f"{NODE_FOLDER}/node{node}/{access}/initiators"
        if tree.exists(folder):
            return tuple(int(name[4:]) for name in tree.names(folder) if re.fullmatch(r"node\d+", name))
    return ()


def _read_gpu_nodes(tree: Tree, cpus: dict[int, CpuSet]) -> dict[int, CpuSet]:
    """Find nodes that are the memory of an NVIDIA GPU, with the CPUs near that GPU."""
    nodes: dict[int, CpuSet] = {}
    for address in tree.names("proc/driver/nvidia/gpus"):
        match = re.search(r"Node:\s*(\d+)", tree.read(f"proc/driver/nvidia/gpus/{address}/numa_status") or "")
        if match is not None and int(match[1]) in cpus:
            near = read_cpus(tree, pci_folder(address), "local_cpus", "local_cpulist")
            nodes[int(match[1])] = near or CpuSet()
    return nodes


def _read_memory(tree: Tree, path: str, warnings: list[str]) -> int:
    """Read MemTotal of a meminfo file in bytes.

    0 where it is unknown (some memory-only nodes have no file).
    """
    try:
        text = tree.read(path)
    except HardwareError as err:
        warnings.append(err.message)
        return 0
    match = re.search(r"MemTotal:\s+(\d+)", text or "")
    return int(match[1]) * 1024 if match else 0


def _read_hugepages(tree: Tree, folder: str, warnings: list[str]) -> tuple[HugepagePool, ...]:
    """Read the pools below a hugepages folder, smallest page first. Empty when there is none."""
    pools: list[HugepagePool] = []
    for name in tree.names(folder):
        size = re.fullmatch(r"hugepages-(\d+)kB", name)
        if size is None:
            continue
        try:
            total = tree.read_int(f"{folder}/{name}/nr_hugepages") or 0
            free = tree.read_int(f"{folder}/{name}/free_hugepages")
        except HardwareError as err:
            warnings.append(err.message)
            continue
        pools.append(HugepagePool(page_bytes=int(size[1]) * 1024, total=total, free=total if free is None else free))
    return tuple(sorted(pools, key=lambda pool: pool.page_bytes))


def _is_knl(tree: Tree) -> bool:
    """Say whether the first processor is a Knights Landing."""
    text = tree.read("proc/cpuinfo") or ""
    block = text.split("\n\n", 1)[0]

    def value_of(key: str) -> str:
        match = re.search(rf"^{key}[ \t]*: *(.*)$", block, re.MULTILINE)
        return match[1].strip() if match else ""

    return value_of("vendor_id") == "GenuineIntel" and value_of("cpu family") == "6" and value_of("model") in _MODELS


def _knl_caches(tree: Tree, cpus: dict[int, CpuSet]) -> tuple[CpuSet, ...]:
    """Return the CPUs behind each memory-side cache: those of each cluster, when the fast memory
    (or a part of it) is a cache.

    `cpus` are the nodes' own. Where no file shows the mode, fast memory that is in no node must be
    a cache.
    """
    for path in _SIDE_FILES:
        match = re.search(r"^cache_size: (-?\d+)", tree.read_mounted(path) or "", re.MULTILINE)
        if match is not None:
            is_cached = int(match[1]) > 0
            break
    else:
        is_cached = all(cpus.values())
    return tuple(own for own in cpus.values() if own) if is_cached else ()
