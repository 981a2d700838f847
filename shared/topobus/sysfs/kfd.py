"""Reads KFD's topology: the GPUs and partitions of GPUs that ROCm computes on, as the amdgpu kernel
driver lists them.

Values are the state at the time of the call. A GPU that is partitioned (DPX, QPX, CPX …) has one
node for each partition. The caller decides which PCI function a node belongs to, because only some
kernels write the partition's number into `location_id`.
Source: drivers/gpu/drm/amd/amdkfd/kfd_topology.c (properties, mem_banks, io_links);
include/uapi/linux/kfd_sysfs.h.
"""

from __future__ import annotations

from msgspec import Struct

from topobus.sysfs.tree import Tree

__all__ = ["KfdLink", "KfdNode", "read_kfd_links", "read_kfd_nodes"]

_NODES = "sys/class/kfd/kfd/topology/nodes"
_AMD = 0x1002
# HSA_IOLINKTYPE_XGMI (kfd_sysfs.h).
_XGMI = 11
# HSA_MEM_HEAP_TYPE_FB_PUBLIC and FB_PRIVATE: memory of the GPU itself, that the
# processor can reach or cannot.
_LOCAL_HEAPS = (1, 2)


class KfdNode(Struct, frozen=True, kw_only=True):
    """A GPU, or one partition of a GPU."""

    number: int
    domain: int = 0
    location: int = 0
    """Bus, device and function as PCI packs them into 16 bits; of a partition the last 3 bits may
    be its number instead of the function."""
    render_minor: int = 0
    """The number of its DRM render node; 0: the kernel does not show it."""
    unique_id: int = 0
    gfx_version: int = 0
    simd_count: int = 0
    simd_per_cu: int = 0
    xcc_count: int = 0
    """Accelerator complex dies that it computes on; 0: the kernel does not show it."""
    memory_bytes: int = 0
    """Local memory by its memory banks; 0: the kernel does not show it."""

    @property
    def slot(self) -> tuple[int, int, int]:
        """Domain, bus and device."""
        return self.domain, self.location >> 8 & 0xFF, self.location >> 3 & 0x1F

    @property
    def function(self) -> int:
        """The function, or a partition's number."""
        return self.location & 0x7


class KfdLink(Struct, frozen=True, kw_only=True):
    """An XGMI link from one node to another."""

    to: int
    bandwidth_gbps: float = 0.0
    """0: the kernel does not show it."""


def read_kfd_nodes(tree: Tree) -> tuple[KfdNode, ...]:
    """List AMD's GPUs and partitions, by number. Empty where computing is not set up.

    Errors: raises HardwareError for a file that exists and cannot be read.
    """
    kfd_nodes: list[KfdNode] = []
    for name in tree.names(_NODES):
        facts = _properties(tree, f"{_NODES}/{name}/properties")
        # The folder also has CPUs, which have no SIMDs.
        if not name.isdecimal() or facts.get("vendor_id") != _AMD or not facts.get("simd_count"):
            continue
        kfd_nodes.append(
            KfdNode(
                number=int(name),
                domain=facts.get("domain", 0),
                location=facts.get("location_id", 0),
                render_minor=facts.get("drm_render_minor", 0),
                unique_id=facts.get("unique_id", 0),
                gfx_version=facts.get("gfx_target_version", 0),
                simd_count=facts["simd_count"],
                simd_per_cu=facts.get("simd_per_cu", 0),
                xcc_count=facts.get("num_xcc", 0),
                memory_bytes=_memory_bytes(tree, f"{_NODES}/{name}/mem_banks"),
            )
        )
    return tuple(sorted(kfd_nodes, key=lambda kfd_node: kfd_node.number))


def read_kfd_links(tree: Tree, number: int) -> tuple[KfdLink, ...]:
    """List the XGMI links of a node.

    Errors: raises HardwareError for a file that exists and cannot be read.
    """
    folder = f"{_NODES}/{number}/io_links"
    links: list[KfdLink] = []
    for name in tree.names(folder):
        facts = _properties(tree, f"{folder}/{name}/properties")
        if facts.get("type") == _XGMI and "node_to" in facts:
            # KFD's unit is megabytes per second.
            links.append(KfdLink(to=facts["node_to"], bandwidth_gbps=facts.get("max_bandwidth", 0) * 8 / 1000))
    return tuple(sorted(links, key=lambda link: link.to))


def _memory_bytes(tree: Tree, folder: str) -> int:
    banks = (_properties(tree, f"{folder}/{name}/properties") for name in tree.names(folder))
    return sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _LOCAL_HEAPS)


def _properties(tree: Tree, path: str) -> dict[str, int]:
    """Read KFD's `name number` lines. A line of another form is left out."""
    words = (line.split() for line in (tree.read(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}
