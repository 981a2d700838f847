"""Decides for each AMD function what it is now: a whole GPU, or a card cut into partitions, each of
which is a device.

A card in DPX, TPX, QPX or CPX has one KFD node and one render node for each partition. The first
partition has the PCI function's own render node, the others those of platform devices
(`amdgpu_xcp_3`, on newer kernels `amdgpu_xcp.3`). More platform devices exist than are in use, and
only KFD shows which ones are. A card whose mode and KFD's nodes disagree (its mode is being
changed, or KFD cannot be read) is neither whole nor in partitions, and has a fault with the reason.
Source: drivers/gpu/drm/amd/amdgpu/amdgpu_xcp.c, drivers/gpu/drm/amd/amdxcp/amdgpu_xcp_drv.c;
current_compute_partition and current_memory_partition in Documentation/gpu/amdgpu.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from topobus.sysfs.drm import folder_drm_nodes, function_drm_nodes
from topobus.sysfs.kfd import KfdNode, read_kfd_nodes
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.pci import PciAddress

__all__ = ["COUNTS", "WHOLE", "AmdCard", "AmdPartition", "partition_drm_nodes", "read_amd_cards"]

_PLATFORM = "sys/devices/platform"
_PARTITION_DEVICES = ("amdgpu_xcp_", "amdgpu_xcp.")
WHOLE = "SPX"
"""The mode of a card in one part."""
COUNTS = {"DPX": 2, "TPX": 3, "QPX": 4}
"""How many partitions a mode makes; CPX makes as many as the card has
compute dies, which differs."""


class AmdPartition(Struct, frozen=True, kw_only=True):
    """One partition of a card."""

    index: int
    node: KfdNode


class AmdCard(Struct, frozen=True, kw_only=True):
    """What a PCI function is. It is a whole GPU when it has neither partitions nor a fault."""

    address: PciAddress
    node: KfdNode | None = None
    """Of a whole card, where KFD has one."""
    mode: str = ""
    """`SPX`, `DPX`, `CPX` …; empty where the driver has no such thing."""
    memory_mode: str = ""
    """`NPS1`, `NPS4` …"""
    partitions: tuple[AmdPartition, ...] = ()
    fault: str = ""
    """Why it can be offered neither whole nor in partitions."""

    @property
    def nodes(self) -> tuple[KfdNode, ...]:
        """KFD's nodes of the card: one when it is whole, else one for each partition.

        Empty where KFD has none, or there is a fault.
        """
        return tuple(part.node for part in self.partitions) or ((self.node,) if self.node is not None else ())


def read_amd_cards(tree: Tree, addresses: Sequence[PciAddress]) -> dict[PciAddress, AmdCard]:
    """Read what each of these functions is now.

    A function that cannot be read counts as whole, and `observe` reports what is wrong with it.
    """
    try:
        kfd_nodes = read_kfd_nodes(tree)
    except HardwareError:
        # Without KFD whole GPUs only lack links and target names.
        kfd_nodes = ()
    owned = _assign(
        tree,
        sorted({*addresses, *(sibling for address in addresses for sibling in _siblings(tree, address))}),
        kfd_nodes,
    )
    return {address: _read_card(tree, address, owned[address]) for address in addresses}


def partition_drm_nodes(tree: Tree, card: AmdCard, partition: AmdPartition) -> tuple[str, ...]:
    """Name the DRM nodes of a partition, relative to dev: its card node, where it has one, and its
    render node.
    """
    render = f"renderD{partition.node.render_minor}"
    own = function_drm_nodes(tree, card.address)
    if own.render == render:
        return own.paths
    for name in tree.names(_PLATFORM):
        if name.startswith(_PARTITION_DEVICES):
            nodes = folder_drm_nodes(tree, f"{_PLATFORM}/{name}")
            if nodes.render == render:
                return nodes.paths
    return (f"dri/{render}",)


def _read_card(tree: Tree, address: PciAddress, nodes: Sequence[KfdNode]) -> AmdCard:
    try:
        mode = (tree.read(f"{pci_folder(address)}/current_compute_partition") or "").strip().upper()
        memory_mode = (tree.read(f"{pci_folder(address)}/current_memory_partition") or "").strip().upper()
    except HardwareError:
        mode = memory_mode = ""
    # The file of a card that has no driver, or is changing its mode, may hold another word.
    mode = mode if mode in (WHOLE, "CPX", *COUNTS) else ""
    if len(nodes) < 2 and mode in ("", WHOLE):
        return AmdCard(address=address, node=nodes[0] if nodes else None, mode=mode, memory_mode=memory_mode)
    if mode == WHOLE or len(nodes) < 2 or len(nodes) != COUNTS.get(mode, len(nodes)):
        return AmdCard(
            address=address,
            mode=mode,
            memory_mode=memory_mode,
            fault=f"it is in mode {mode}, and KFD lists {len(nodes)} of its parts",
        )
    if len({kfd_node.render_minor for kfd_node in nodes}) != len(nodes):
        return AmdCard(
            address=address,
            mode=mode,
            memory_mode=memory_mode,
            fault="KFD does not list a render node for each of its partitions",
        )
    ordered = sorted(nodes, key=lambda kfd_node: (kfd_node.function, kfd_node.render_minor))
    # Where the kernel numbers the partitions, a missing one must not rename the others.
    is_numbered = len({kfd_node.function for kfd_node in nodes}) == len(nodes)
    partitions = tuple(
        AmdPartition(index=kfd_node.function if is_numbered else position, node=kfd_node)
        for position, kfd_node in enumerate(ordered)
    )
    return AmdCard(address=address, mode=mode, memory_mode=memory_mode, partitions=partitions)


def _assign(tree: Tree, addresses: Sequence[PciAddress], nodes: Sequence[KfdNode]) -> dict[PciAddress, list[KfdNode]]:
    """Find the function of each KFD node by its render node, else by its slot.

    Where a slot has several functions, the one with the same unique id or number is taken.
    """
    owned: dict[PciAddress, list[KfdNode]] = {address: [] for address in addresses}
    by_minor = {minor: address for address in addresses if (minor := _render_minor(tree, address))}
    left: list[KfdNode] = []
    for kfd_node in nodes:
        address = by_minor.get(kfd_node.render_minor)
        if address is not None:
            owned[address].append(kfd_node)
        else:
            left.append(kfd_node)
    heads = {address: kfd_nodes[0].unique_id for address, kfd_nodes in owned.items() if kfd_nodes}
    for kfd_node in left:
        address = _owner(kfd_node, [address for address in addresses if address.key[:3] == kfd_node.slot], heads)
        if address is not None:
            owned[address].append(kfd_node)
    return owned


def _owner(node: KfdNode, candidates: Sequence[PciAddress], heads: Mapping[PciAddress, int]) -> PciAddress | None:
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    same = [address for address in candidates if node.unique_id and heads.get(address) == node.unique_id]
    if len(same) == 1:
        return same[0]
    return next((address for address in candidates if address.function == node.function), None)


def _siblings(tree: Tree, address: PciAddress) -> list[PciAddress]:
    """Find the other functions of a slot that are GPUs (virtual ones), so that their nodes do not
    count as partitions of this one.
    """
    functions = (PciAddress(*address.key[:3], function) for function in range(8) if function != address.function)
    return [function for function in functions if _render_minor(tree, function)]


def _render_minor(tree: Tree, address: PciAddress) -> int:
    try:
        render = function_drm_nodes(tree, address).render
    except HardwareError:
        return 0
    return int(render.removeprefix("renderD")) if render else 0
