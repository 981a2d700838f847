"""AMD GPUs from sysfs: the amdgpu kernel driver, and KFD's topology where computing is set up.

Flows in: PCI functions with AMD's vendor id, amdgpu's attributes, KFD's nodes. Flows out: devices with memory, unique id and XGMI peers; health; the
kfd, card and render nodes that ROCm opens. A card that is cut into partitions (CPX …) is one device for each partition, and never a whole one beside them
(`topobus.gpu.amd_cards`); each has its own render node and its share of the card's memory.
Source: Documentation/gpu/amdgpu; KFD topology in drivers/gpu/drm/amd/amdkfd/kfd_topology.c (properties, mem_banks, io_links).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from topobus.devicekit.counter_rises import CounterRises
from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.edits_text import is_offered, own_variable, unreadable, unusable
from topobus.devicekit.left_out import LeftOut
from topobus.devicekit.pci import (
    PciHealth,
    observe_kernel_driver,
    pci_device,
    pci_device_name,
    pci_folder,
    select_functions,
)
from topobus.devicekit.pci_parent import ParentHealth
from topobus.domain.device import AttributeValue, Device, DeviceRole, KeptFunction, Link, LinkClass
from topobus.domain.edits import ContainerEdits
from topobus.domain.errors import HardwareError
from topobus.domain.health import Dimension, Observation
from topobus.domain.machine import Machine, PciDevice
from topobus.domain.outcome import Reason, Refusal
from topobus.domain.pci import PciAddress
from topobus.domain.request import Owner
from topobus.gpu.amd_cards import AmdCard, AmdPartition, partition_drm_nodes, read_amd_cards
from topobus.gpu.drm_edits import drm_edits, groups_of
from topobus.gpu.kfd_processes import kfd_processes
from topobus.gpu.leftovers import ChecksLeftovers, GpuUse, Leftovers
from topobus.gpu.processes import process_of
from topobus.gpu.products import ProductTable
from topobus.gpu.sensor_health import ras_sign, temperature_sign
from topobus.sysfs.kfd import KfdLink, KfdNode, read_kfd_links
from topobus.sysfs.nodes import device_node
from topobus.sysfs.tree import Tree

__all__ = ["AmdDriver"]

_VENDOR = 0x1002
# VGA, 3D and other display controllers (MI200 is the last), and processing accelerators (MI300).
_CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)
_PARTITION = "partition"
# The kernel gives partitions whole pages.
_PAGE_BYTES = 4096


class AmdDriver(ChecksLeftovers):
    """Finds and watches AMD GPUs. Keeps the PCIe error counters, and the XGMI links of the KFD nodes that it read last."""

    name = "amd-gpu"
    device_class = "gpu"

    def __init__(self) -> None:
        self._products = ProductTable()
        self._pci_health = PciHealth()
        self._parents = ParentHealth()
        self._counters = CounterRises()
        self.leftovers = Leftovers()
        self._links: tuple[tuple[KfdNode, ...], dict[int, tuple[KfdLink, ...]]] = ((), {})
        """The nodes, and the links of each by its number: 64 partitions have 4,000 of them, which change with the nodes alone."""
        self.warnings: tuple[str, ...] = ()
        """What the last `discover` left out, and why; the inventory shows it."""
        self.offers_parents = False
        self.kept: tuple[KeptFunction, ...] = ()
        """What it left out since it is for something else."""

    def discover(self, tree: Tree, machine: Machine) -> Sequence[Device]:
        """List the GPUs and the partitions of those that are cut, by address."""
        functions = select_functions(tree, machine, vendors=(_VENDOR,), base_classes=_CLASSES)
        cards = read_amd_cards(tree, [function.address for function in functions])
        left_out = LeftOut()
        offered: list[tuple[PciDevice, AmdCard]] = []
        for function in functions:
            if is_offered(tree, function.address, left_out):
                card = cards[function.address]
                offered.append((function, card))
                is_counted = self.offers_parents and not card.fault
                for why in () if is_counted else _why_not_whole(card):
                    left_out.keep(card.address, DeviceRole.PARTITION_PARENT, why)
        names = {node.number: name for _, card in offered for node, name in _nodes_by_name(self.device_class, card)}
        links = self._read_links(tree, cards, names)
        self.warnings, self.kept = tuple(left_out), left_out.kept
        return tuple(device for function, card in offered for device in self._devices(tree, function, card, links))

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Look at the PCI function and at whether its driver is bound; the partitions of a card share what is wrong with it."""
        # Once a function: its error counters tell a rise only once.
        addresses = sorted({device.pci for device in devices if device.pci is not None})
        parents = self._parents.observe(tree, addresses)
        seen = {address: [*self._observe_one(tree, address), *parents.get(address, ())] for address in addresses}
        return {device.name: seen[device.pci] for device in devices if device.pci is not None}

    def prepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> Mapping[str, ContainerEdits] | Refusal:
        """Give each GPU's card and render node, a partition its own, and the one kfd node."""
        parts = [device for device in devices if device.attributes.get("type") == _PARTITION]
        parents = [device for device in devices if device.role is DeviceRole.PARTITION_PARENT]
        whole = [device for device in devices if device not in parts and device not in parents]
        edits: dict[str, ContainerEdits] = {}
        for chosen in (
            drm_edits(tree, whole, context.owner) if whole else {},
            self._partition_edits(tree, parts, context.owner),
            _still_whole(tree, whole),
            _parent_edits(tree, parents, context.owner),
        ):
            if isinstance(chosen, Refusal):
                return chosen
            edits.update(chosen)
        self.leftovers.before(context, devices, partial(self.use, tree))
        if not tree.exists("dev/kfd"):
            return {**edits, "": ContainerEdits()}
        return {**edits, "": ContainerEdits(device_nodes=(device_node("kfd"),), additional_gids=groups_of(tree, ["kfd"], context.owner))}

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Undo nothing: preparing changes nothing on the GPU."""

    def use(self, tree: Tree, device: Device) -> GpuUse:
        """See what uses a GPU or a partition by KFD's processes; amdgpu tells the memory of a whole card alone."""
        if device.pci is None:
            return GpuUse(blind=f"{device.name} has no PCI address")
        card = read_amd_cards(tree, [device.pci])[device.pci]
        try:
            is_card = device.role is DeviceRole.PARTITION_PARENT
            nodes = {node.number for node, name in _nodes_by_name(self.device_class, card) if is_card or name == device.name}
            pids = kfd_processes(tree, nodes)
            used_bytes = None if card.partitions and not is_card else tree.read_int(f"{pci_folder(device.pci)}/mem_info_vram_used")
        except HardwareError as err:
            return GpuUse(blind=err.message)
        return GpuUse(processes=tuple(process_of(tree, pid, used) for pid, used in pids.items()), used_bytes=used_bytes)

    def _partition_edits(self, tree: Tree, devices: Sequence[Device], owner: Owner) -> Mapping[str, ContainerEdits] | Refusal:
        refusal = unusable(tree, devices)
        if refusal is not None:
            return refusal
        cards = read_amd_cards(tree, sorted({device.pci for device in devices if device.pci is not None}))
        now = {
            _partition_name(self.device_class, card, partition): (card, partition)
            for card in cards.values()
            for partition in card.partitions
        }
        missing = tuple(sorted(device.name for device in devices if device.name not in now))
        if missing:
            text = (
                f"the card's partitions are others by now, it has no {', '.join(missing)}; ask again when the inventory tells what it has"
            )
            return Refusal(reasons=(Reason(code="device-not-offered", message=text, facts={"devices": missing}),))
        edits: dict[str, ContainerEdits] = {}
        for device in devices:
            card, partition = now[device.name]
            nodes = partition_drm_nodes(tree, card, partition)
            edits[device.name] = ContainerEdits(
                env={own_variable(device): f"{card.address}/{partition.index}"},
                device_nodes=tuple(map(device_node, nodes)),
                additional_gids=groups_of(tree, nodes, owner),
            )
        return edits

    def _devices(self, tree: Tree, function: PciDevice, card: AmdCard, links: Mapping[str, tuple[Link, ...]]) -> list[Device]:
        """Give a whole GPU, or its partitions; nothing for a card that is neither."""
        if card.fault:
            return []
        product = self._products.product(function)
        memory_bytes, model, unique = product.memory_bytes, product.name, ""
        try:
            folder = pci_folder(function.address)
            memory_bytes = tree.read_int(f"{folder}/mem_info_vram_total") or memory_bytes
            model = tree.read(f"{folder}/product_name") or model
            unique = tree.read(f"{folder}/unique_id") or ""
        except HardwareError:
            # Still a GPU, described by what could be read; `observe` tells of what cannot.
            pass
        model = model or f"AMD device {function.device:04x}"
        uuid = f"GPU-{unique}" if unique else ""
        device = pci_device(
            function,
            device_class=self.device_class,
            driver=self.name,
            vendor="amd",
            model=model,
            uuid=uuid,
            parent="" if function.physfn is None else pci_device_name(self.device_class, function.physfn),
            role=DeviceRole.PARTITION_PARENT if card.partitions else DeviceRole.COMPUTE,
            links=links.get(pci_device_name(self.device_class, function.address), ()),
            attributes={
                "type": "card" if card.partitions else "gpu",
                **_target(card.node or (card.partitions[0].node if card.partitions else None)),
            },
            capacity={"memory": memory_bytes} if memory_bytes else {},
        )
        if card.partitions:
            parents = [device] if self.offers_parents else []
            return parents + [
                self._partition(
                    function, card, part, links, model=model, share_bytes=_share(memory_bytes, card, product.compute_dies), card_uuid=uuid
                )
                for part in card.partitions
            ]
        return [device]

    def _partition(
        self,
        function: PciDevice,
        card: AmdCard,
        partition: AmdPartition,
        links: Mapping[str, tuple[Link, ...]],
        *,
        model: str,
        share_bytes: int,
        card_uuid: str,
    ) -> Device:
        name = _partition_name(self.device_class, card, partition)
        whole = pci_device_name(self.device_class, function.address)
        attributes: dict[str, AttributeValue] = {"type": _PARTITION, **_target(partition.node), "partitionIndex": partition.index}
        if card.mode:
            attributes["partitionMode"] = card.mode
        if card.memory_mode:
            attributes["memoryMode"] = card.memory_mode[:64]
        if card_uuid:
            attributes["parentUuid"] = card_uuid[:64]
        if partition.node.simd_per_cu:
            attributes["computeUnits"] = partition.node.simd_count // partition.node.simd_per_cu
        # Newer kernels give each partition an id of its own; one that all share names none of them.
        ids = [other.node.unique_id for other in card.partitions]
        unique = partition.node.unique_id if ids.count(partition.node.unique_id) == 1 else 0
        memory_bytes = partition.node.memory_bytes or share_bytes
        return pci_device(
            function,
            device_class=self.device_class,
            driver=self.name,
            vendor="amd",
            model=model,
            name=name,
            uuid=f"GPU-{unique:016x}" if unique else "",
            parent=whole,
            partition_of=whole,
            links=links.get(name, ()),
            attributes=attributes,
            capacity={"memory": memory_bytes} if memory_bytes else {},
        )

    def _read_links(self, tree: Tree, cards: Mapping[PciAddress, AmdCard], names: Mapping[int, str]) -> dict[str, tuple[Link, ...]]:
        """Read the XGMI peers of each device. Between partitions of two cards KFD tells no bandwidth: every pair has that link, so it is left out."""
        nodes = tuple(node for card in cards.values() for node, _ in _nodes_by_name(self.device_class, card))
        parts = {part.node.number for card in cards.values() for part in card.partitions}
        if self._links[0] != nodes or not parts:
            try:
                self._links = (nodes, {node.number: read_kfd_links(tree, node.number) for node in nodes})
            except HardwareError:
                self._links = ((), {})
        links: dict[str, tuple[Link, ...]] = {}
        for number, kfd_links in self._links[1].items():
            peers = {
                names[link.to]: Link(peer=names[link.to], kind=LinkClass.FABRIC, bandwidth_gbps=link.bandwidth_gbps)
                for link in kfd_links
                if link.to in names and (link.bandwidth_gbps or number not in parts)
            }
            if number in names:
                links[names[number]] = tuple(peers[name] for name in sorted(peers))
        return links

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
            signs = (temperature_sign(tree, folder), ras_sign(tree, folder, self._counters))
        except HardwareError as err:
            return [unreadable(err)]
        return [*seen, *observe_kernel_driver(tree, address), *(sign for sign in signs if sign is not None)]


def _share(card_bytes: int, card: AmdCard, compute_dies: int) -> int:
    """Divide a card's memory where KFD tells no banks: each partition has the same, in whichever memory mode, also where KFD lists fewer than there are."""
    parts = max(len(card.partitions), compute_dies if card.mode == "CPX" else 0)
    return card_bytes // parts // _PAGE_BYTES * _PAGE_BYTES


def _why_not_whole(card: AmdCard) -> list[str]:
    """Tell of a card that is not offered as one GPU; nothing for a whole one."""
    if card.fault:
        return [card.fault]
    if card.partitions:
        mode = f"in mode {card.mode}" if card.mode else "cut"
        return [f"it is {mode}, and its {len(card.partitions)} partitions are offered instead"]
    return []


def _still_whole(tree: Tree, devices: Sequence[Device]) -> Mapping[str, ContainerEdits] | Refusal:
    """Refuse a GPU that was cut since the last look: its own render node is that of the first partition by now."""
    cards = read_amd_cards(tree, sorted({device.pci for device in devices if device.pci is not None}))
    cut = {
        device.name: f"{device.name}: {why}" for device in devices if device.pci is not None for why in _why_not_whole(cards[device.pci])
    }
    if not cut:
        return {}
    return Refusal(reasons=(Reason(code="device-not-offered", message="; ".join(cut.values()), facts={"devices": tuple(sorted(cut))}),))


def _parent_edits(tree: Tree, devices: Sequence[Device], owner: Owner) -> Mapping[str, ContainerEdits] | Refusal:
    """Give a card in parts with the nodes of all of them; refuse one that is whole by now, or changes its mode."""
    refusal = unusable(tree, devices)
    if refusal is not None:
        return refusal
    cards = read_amd_cards(tree, sorted({device.pci for device in devices if device.pci is not None}))
    edits: dict[str, ContainerEdits] = {}
    for device in devices:
        card = cards[device.pci] if device.pci is not None else None
        if card is None or not card.partitions:
            text = f"{device.name}: it was offered with all of its partitions, and has none now"
            return Refusal(reasons=(Reason(code="device-not-offered", message=text, facts={"devices": (device.name,)}),))
        nodes = tuple(node for partition in card.partitions for node in partition_drm_nodes(tree, card, partition))
        edits[device.name] = ContainerEdits(
            env={own_variable(device): str(card.address)},
            device_nodes=tuple(map(device_node, nodes)),
            additional_gids=groups_of(tree, nodes, owner),
        )
    return edits


def _nodes_by_name(device_class: str, card: AmdCard) -> list[tuple[KfdNode, str]]:
    """Give a card's KFD nodes with the names of their devices."""
    if card.partitions:
        return [(part.node, _partition_name(device_class, card, part)) for part in card.partitions]
    return [(card.node, pci_device_name(device_class, card.address))] if card.node is not None else []


def _partition_name(device_class: str, card: AmdCard, partition: AmdPartition) -> str:
    """Name a partition after its card and mode: what was cut otherwise is another device."""
    return f"{pci_device_name(device_class, card.address)}-{card.mode.lower() or 'xcp'}-{partition.index}"


def _target(node: KfdNode | None) -> dict[str, AttributeValue]:
    return {"gfxTarget": _gfx_name(node.gfx_version)} if node is not None and node.gfx_version else {}


def _gfx_name(version: int) -> str:
    """Turn KFD's number into the compiler's target: 90010 is gfx90a (decimal major, minor; hexadecimal stepping).

    >>> _gfx_name(90010), _gfx_name(110000)
    ('gfx90a', 'gfx1100')
    """
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
