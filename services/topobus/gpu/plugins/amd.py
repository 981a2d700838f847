"""AMD GPUs from sysfs: the amdgpu kernel driver, and KFD's topology where computing is set up.

Flows in: PCI functions with AMD's vendor id, amdgpu's attributes, KFD's nodes. Flows out: devices with memory, unique id and XGMI peers; health; the
kfd, card and render nodes that ROCm opens.
Source: Documentation/gpu/amdgpu; KFD topology in drivers/gpu/drm/amd/amdkfd/kfd_topology.c (properties, io_links).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.edits_text import is_offered, unreadable
from topobus.devicekit.pci import (
    PciHealth,
    observe_kernel_driver,
    pci_device,
    pci_device_name,
    pci_folder,
    select_functions,
)
from topobus.domain.device import AttributeValue, Device, Link, LinkClass
from topobus.domain.edits import ContainerEdits
from topobus.domain.errors import HardwareError
from topobus.domain.health import Dimension, Observation
from topobus.domain.machine import Machine, PciDevice
from topobus.domain.outcome import Refusal
from topobus.domain.pci import PciAddress
from topobus.gpu.drm_edits import drm_edits
from topobus.gpu.products import ProductTable
from topobus.sysfs.nodes import device_node
from topobus.sysfs.tree import Tree

__all__ = ["AmdDriver"]

_VENDOR = 0x1002
# VGA, 3D and other display controllers (MI200 is the last), and processing accelerators (MI300).
_CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)
_KFD_NODES = "sys/class/kfd/kfd/topology/nodes"
# HSA_IOLINKTYPE_XGMI (include/uapi/linux/kfd_sysfs.h).
_XGMI = 11


class _KfdNode(Struct, frozen=True, kw_only=True):
    """One GPU in KFD's topology."""

    number: str
    address: PciAddress
    gfx_version: int = 0
    simd_count: int = 0


class AmdDriver:
    """Finds and watches AMD GPUs."""

    name = "amd-gpu"
    device_class = "gpu"

    def __init__(self) -> None:
        self._products = ProductTable()
        self._pci_health = PciHealth()
        self.warnings: tuple[str, ...] = ()
        """What the last `discover` left out, and why; the inventory shows it."""

    def discover(self, tree: Tree, machine: Machine) -> Sequence[Device]:
        """List the GPUs, by address."""
        left_out: list[str] = []
        functions = [
            function
            for function in select_functions(tree, machine, vendors=(_VENDOR,), base_classes=_CLASSES)
            if is_offered(tree, function.address, left_out)
        ]
        self.warnings = tuple(left_out)
        nodes = {kfd_node.address: kfd_node for kfd_node in _kfd_nodes(tree)}
        return tuple(self._device(tree, function, nodes) for function in functions)

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Look at the PCI function and at whether its driver is bound."""
        return {device.name: self._observe_one(tree, device.pci) for device in devices if device.pci is not None}

    def prepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> Mapping[str, ContainerEdits] | Refusal:
        """Give each GPU's card and render node, and the one kfd node."""
        edits = drm_edits(tree, devices)
        if isinstance(edits, Refusal):
            return edits
        common = ContainerEdits(device_nodes=(device_node("kfd"),)) if tree.exists("dev/kfd") else ContainerEdits()
        return {**edits, "": common}

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Undo nothing: preparing changes nothing on the GPU."""

    def _device(self, tree: Tree, function: PciDevice, nodes: Mapping[PciAddress, _KfdNode]) -> Device:
        product = self._products.product(function)
        attributes: dict[str, AttributeValue] = {"type": "gpu"}
        node = nodes.get(function.address)
        if node is not None and node.gfx_version:
            attributes["gfxTarget"] = _gfx_name(node.gfx_version)
        memory_bytes, model, unique = product.memory_bytes, product.name, ""
        links: tuple[Link, ...] = ()
        try:
            folder = pci_folder(function.address)
            memory_bytes = tree.read_int(f"{folder}/mem_info_vram_total") or memory_bytes
            model = tree.read(f"{folder}/product_name") or model
            unique = tree.read(f"{folder}/unique_id") or ""
            links = self._links(tree, node, nodes)
        except HardwareError:
            # Still a GPU, described by what could be read; `observe` tells of what cannot.
            pass
        return pci_device(
            function,
            device_class=self.device_class,
            driver=self.name,
            vendor="amd",
            model=model or f"AMD device {function.device:04x}",
            uuid=f"GPU-{unique}" if unique else "",
            parent="" if function.physfn is None else pci_device_name(self.device_class, function.physfn),
            links=links,
            attributes=attributes,
            capacity={"memory": memory_bytes} if memory_bytes else {},
        )

    def _links(self, tree: Tree, node: _KfdNode | None, nodes: Mapping[PciAddress, _KfdNode]) -> tuple[Link, ...]:
        if node is None:
            return ()
        by_number = {kfd_node.number: kfd_node.address for kfd_node in nodes.values()}
        folder = f"{_KFD_NODES}/{node.number}/io_links"
        links: dict[str, Link] = {}
        for name in tree.names(folder):
            facts = _properties(tree, f"{folder}/{name}/properties")
            peer = by_number.get(str(facts.get("node_to", "")))
            if facts.get("type") == _XGMI and peer is not None:
                device = pci_device_name(self.device_class, peer)
                # KFD tells megabytes a second.
                links[device] = Link(peer=device, kind=LinkClass.FABRIC, bandwidth_gbps=facts.get("max_bandwidth", 0) * 8 / 1000)
        return tuple(links[name] for name in sorted(links))

    def _observe_one(self, tree: Tree, address: PciAddress) -> list[Observation]:
        folder = pci_folder(address)
        try:
            seen = self._pci_health.observe(tree, address)
            if any(observation.dimension is Dimension.PRESENCE for observation in seen):
                return seen
            # What discover wanted to read and could not is told here.
            tree.read_int(f"{folder}/mem_info_vram_total")
            tree.read(f"{folder}/unique_id")
            tree.read(f"{folder}/product_name")
        except HardwareError as err:
            return [unreadable(err)]
        return seen + observe_kernel_driver(tree, address)


def _kfd_nodes(tree: Tree) -> list[_KfdNode]:
    kfd_nodes: list[_KfdNode] = []
    try:
        for number in tree.names(_KFD_NODES):
            facts = _properties(tree, f"{_KFD_NODES}/{number}/properties")
            # CPUs stand there too, without SIMDs.
            if facts.get("vendor_id") != _VENDOR or not facts.get("simd_count"):
                continue
            location = facts.get("location_id", 0)
            kfd_nodes.append(
                _KfdNode(
                    number=number,
                    address=PciAddress(facts.get("domain", 0), location >> 8 & 0xFF, location >> 3 & 0x1F, location & 0x7),
                    gfx_version=facts.get("gfx_target_version", 0),
                    simd_count=facts.get("simd_count", 0),
                )
            )
    except (HardwareError, ValueError):
        # Without KFD's word the GPUs lack links and target names, no more.
        return []
    return kfd_nodes


def _properties(tree: Tree, path: str) -> dict[str, int]:
    """Read KFD's `name number` lines; a line that is none is left out."""
    words = (line.split() for line in (tree.read(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}


def _gfx_name(version: int) -> str:
    """Turn KFD's number into the compiler's target: 90010 is gfx90a (decimal major, minor; hexadecimal stepping).

    >>> _gfx_name(90010), _gfx_name(110000)
    ('gfx90a', 'gfx1100')
    """
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
