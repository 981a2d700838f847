"""AMD GPUs from sysfs: the amdgpu kernel driver, and KFD's topology where computing is set up.

Devices have memory, unique id and XGMI peers. Containers get the kfd, card and render nodes that
ROCm opens. A card that is cut into partitions (CPX …) is one device for each partition, and never a
whole one beside them (`topobus.gpu.amd.amd_cards`). Each partition has its own render node and its
share of the card's memory. With `partitions.on_demand` a card is all of these at once, with
counters that allow only one way at a time, and is cut when a claim gets a part
(`topobus.gpu.amd.amd_on_demand`).
Source: Documentation/gpu/amdgpu; KFD topology in drivers/gpu/drm/amd/amdkfd/kfd_topology.c
(properties, mem_banks, io_links).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from topobus.devicekit.counter_rises import CounterRises
from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.driver import Discovery, LongWork, PrepareContext
from topobus.devicekit.edits_text import is_offered, own_variable, unusable
from topobus.devicekit.function_health import FunctionHealth
from topobus.devicekit.left_out import LeftOut
from topobus.devicekit.partitioning.exclusive_ways import count_ways
from topobus.devicekit.pci import (
    observe_kernel_driver,
    pci_device,
    pci_device_name,
    select_functions,
)
from topobus.gpu.amd.amd_cards import WHOLE, AmdCard, partition_drm_nodes, read_amd_cards
from topobus.gpu.amd.amd_on_demand import AmdOnDemand, group_wishes, part_counts
from topobus.gpu.amd.amd_partition_readings import partition_readings, read_kfd_memory
from topobus.gpu.amd.amd_parts import (
    PARTITION,
    CardFacts,
    facts_of_whole,
    partition_name,
    possible_parts,
    present_parts,
    share,
)
from topobus.gpu.drm_edits import groups_of, node_edits
from topobus.gpu.leftovers import ChecksLeftovers, GpuUse, Leftovers
from topobus.gpu.processes import kfd_processes, process_of
from topobus.gpu.products import Product, ProductTable
from topobus.gpu.sensor_health import ras_sign, temperature_sign
from topobus.gpu.sensor_readings import amd_readings
from topobus.sysfs.kfd import KfdLink, KfdNode, read_kfd_links
from topobus.sysfs.nodes import device_node
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.counters import CounterSet
from topobus.values.device import Device, DeviceRole, Link, LinkClass
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.health import Observation
from topobus.values.machine import Machine, PciDevice
from topobus.values.outcome import Refusal, refuse
from topobus.values.pci import PciAddress
from topobus.values.readings import Reading
from topobus.values.request import Owner

__all__ = ["AmdDriver"]

_VENDOR = 0x1002
# VGA, 3D and other display controllers (MI200 is the last), and processing accelerators (MI300).
_CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)


class AmdDriver(ChecksLeftovers):
    """Finds and watches AMD GPUs.

    It keeps the PCIe error counters, and the XGMI links of the KFD nodes that it read last.
    """

    name = "amd-gpu"
    device_class = "gpu"

    def __init__(self) -> None:
        self._products = ProductTable()
        self._health = FunctionHealth()
        self._counters = CounterRises()
        self.leftovers = Leftovers()
        self._links: tuple[tuple[KfdNode, ...], dict[int, tuple[KfdLink, ...]]] = ((), {})
        """The nodes, and the links of each by its number: 64 partitions have 4,000 of them, which
        change with the nodes alone."""
        self.on_demand = AmdOnDemand()
        self._cut: dict[PciAddress, tuple[Device, ...]] = {}
        """The devices that the last look found on each card that is cut on demand. They stay listed
        while the card changes its mode."""
        self._counts: dict[PciAddress, Mapping[str, int]] = {}
        self._sets: dict[PciAddress, tuple[CounterSet, ...]] = {}
        self._whole_links: dict[str, tuple[Link, ...]] = {}
        """The links of each card while it was whole: KFD lists only the links of its parts while it
        is cut."""

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """List the GPUs and the partitions of those that are cut, by address."""
        functions = select_functions(tree, machine, vendors=(_VENDOR,), base_classes=_CLASSES)
        cards = read_amd_cards(tree, [function.address for function in functions])
        left_out = LeftOut()
        offered: list[tuple[PciDevice, AmdCard]] = []
        for function in functions:
            if is_offered(tree, function.address, left_out):
                card = cards[function.address]
                offered.append((function, card))
                is_counted = (self.host.offers_parents and not card.fault) or self._can_be_cut(tree, function, card)
                for why in () if is_counted else _why_not_whole(card):
                    left_out.keep(card.address, DeviceRole.PARTITION_PARENT, why)
        names = {node.number: name for _, card in offered for node, name in _nodes_by_name(self.device_class, card)}
        links = self._read_links(tree, cards, names)
        devices = tuple(device for function, card in offered for device in self._devices(tree, function, card, links))
        counted = sorted({device.pci for device in devices if device.pci is not None and device.consumes})
        sets = tuple(counter_set for address in counted for counter_set in self._sets.get(address, ()))
        return Discovery(devices=devices, counter_sets=sets, warnings=tuple(left_out), kept=left_out.kept)

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Observe the PCI function and whether its driver is bound.

        The partitions of a card share its faults.
        """
        addresses = {device.name: device.pci for device in devices if device.pci is not None}
        seen = self._health.observe(tree, addresses.values(), partial(self._look, tree))
        return {name: seen[address] for name, address in addresses.items()}

    def measure(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Reading]]:
        """Read whole cards, and of the partitions that exist their use and memory."""
        addresses = {device.name: device.pci for device in devices if device.pci is not None}
        parts = {device.name: device for device in devices if device.attributes.get("type") == PARTITION}
        readings: dict[str, Sequence[Reading]] = {
            name: amd_readings(tree, pci_folder(address)) for name, address in addresses.items() if name not in parts
        }
        # A tree that caches its listings would keep each process.
        used = read_kfd_memory(Tree(tree.settings)) if parts else {}
        cards = read_amd_cards(tree, sorted({addresses[name] for name in parts}))
        for address, card in cards.items():
            table = tree.read_bytes(f"{pci_folder(address)}/gpu_metrics") or b""
            for partition in card.partitions:
                device = parts.get(partition_name(self.device_class, card, partition))
                if device is not None:
                    memory_bytes = device.capacity.get("memory", 0)
                    readings[device.name] = partition_readings(tree, table, partition, memory_bytes, used)
        return readings

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal | LongWork:
        """Give each GPU's or partition's card and render node, and the one kfd node.

        A card that is cut on demand is brought into the mode first.
        """
        wanted = [
            (
                device.pci,
                device.partition_of or device.name,
                str(device.attributes.get("partitionMode", WHOLE)),
                device.name,
            )
            for device in devices
            if device.pci is not None and device.consumes and device.role is DeviceRole.COMPUTE
        ]
        counts = self._counts_of(tree, [address for address, *_ in wanted]) if self.host.cuts_on_demand else {}
        wanted = [wish for wish in wanted if counts.get(wish[0])]
        if not wanted or unusable(tree, devices) is not None:
            return self._edits(tree, devices, context)
        wishes = group_wishes(wanted, counts)
        if isinstance(wishes, Refusal):
            return wishes
        return self.on_demand.prepare(tree, wishes, context, partial(self._edits, tree, devices, context))

    def only_reads(self, devices: Sequence[Device]) -> bool:
        """Return whether preparing changes nothing: none of the devices is of a card that is cut on
        demand.
        """
        return not any(device.consumes for device in devices)

    def _edits(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal:
        if (refusal := unusable(tree, devices)) is not None:
            return refusal
        cards = read_amd_cards(tree, sorted({device.pci for device in devices if device.pci is not None}))
        whole = [device for device in devices if not _is_cut(device)]
        if (refusal := _still_whole(whole, cards)) is not None:
            return refusal
        parts = self._part_edits(tree, [device for device in devices if _is_cut(device)], cards, context.owner)
        if isinstance(parts, Refusal):
            return parts
        edits = {**node_edits(tree, whole, context.owner), **parts}
        self.leftovers.before(context, devices, partial(self.use, tree))
        if not tree.exists("dev/kfd"):
            return {**edits, "": ContainerEdits()}
        return {
            **edits,
            "": ContainerEdits(
                device_nodes=(device_node("kfd"),), additional_gids=groups_of(tree, ["kfd"], context.owner)
            ),
        }

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Release the devices. A card that was brought into another mode stays in it.

        Only a switch that was interrupted is undone.
        """
        for device in devices:
            self.on_demand.undo(tree, device.pci, context.records.get(device.name, DeviceRecord()))

    def use(self, tree: Tree, device: Device) -> GpuUse:
        """Find what uses a GPU or a partition, by KFD's processes.

        amdgpu publishes the memory in use only for a whole card.
        """
        if device.pci is None:
            return GpuUse(blind=f"{device.name} has no PCI address")
        card = read_amd_cards(tree, [device.pci])[device.pci]
        try:
            is_card = device.role is DeviceRole.PARTITION_PARENT
            nodes = {
                node.number for node, name in _nodes_by_name(self.device_class, card) if is_card or name == device.name
            }
            pids = kfd_processes(tree, nodes)
            used_bytes = (
                None
                if card.partitions and not is_card
                else tree.read_int(f"{pci_folder(device.pci)}/mem_info_vram_used")
            )
        except HardwareError as err:
            return GpuUse(blind=err.message)
        return GpuUse(processes=tuple(process_of(tree, pid, used) for pid, used in pids.items()), used_bytes=used_bytes)

    def _part_edits(
        self, tree: Tree, devices: Sequence[Device], cards: Mapping[PciAddress, AmdCard], owner: Owner
    ) -> Mapping[str, ContainerEdits] | Refusal:
        """Give partitions their nodes, and a card in parts those of all of them.

        What a card that changed its mode has no more is refused.
        """
        edits: dict[str, ContainerEdits] = {}
        missing: list[str] = []
        for device in devices:
            assert device.pci is not None
            card = cards[device.pci]
            is_card = device.role is DeviceRole.PARTITION_PARENT
            present = [
                partition
                for partition in card.partitions
                if is_card or partition_name(self.device_class, card, partition) == device.name
            ]
            if not present:
                missing.append(device.name)
                continue
            nodes = tuple(node for partition in present for node in partition_drm_nodes(tree, card, partition))
            which = str(card.address) if is_card else f"{card.address}/{present[0].index}"
            edits[device.name] = ContainerEdits(
                env={own_variable(device): which},
                device_nodes=tuple(map(device_node, nodes)),
                additional_gids=groups_of(tree, nodes, owner),
            )
        if not missing:
            return edits
        text = (
            f"the card's partitions have changed since these were offered: {', '.join(sorted(missing))}; ask again "
            "when the inventory lists what it has"
        )
        return refuse("device-not-offered", text, devices=tuple(sorted(missing)))

    def _devices(
        self, tree: Tree, function: PciDevice, card: AmdCard, links: Mapping[str, tuple[Link, ...]]
    ) -> list[Device]:
        """Describe a whole GPU, or its partitions, or both for a card that is cut on demand.

        Empty for a card that is neither.
        """
        if self.on_demand.locks.is_changing(function.address):
            return list(self._cut.get(function.address, ()))
        self._cut.pop(function.address, None)
        if card.fault:
            return []
        product = self._products.product(function)
        memory_bytes, model, uuid = _described(tree, function, product)
        whole = pci_device_name(self.device_class, function.address)
        counts = self._counts.get(function.address, {})
        is_parent = bool(card.partitions) and not counts
        device = pci_device(
            function,
            device_class=self.device_class,
            driver=self.name,
            vendor="amd",
            model=model,
            uuid=uuid,
            parent="" if function.physfn is None else pci_device_name(self.device_class, function.physfn),
            role=DeviceRole.PARTITION_PARENT if is_parent else DeviceRole.COMPUTE,
            links=self._links_of_whole(whole, links) if counts else links.get(whole, ()),
            attributes={"type": "card" if is_parent else "gpu", **facts_of_whole(card)},
            capacity={"memory": memory_bytes} if memory_bytes else {},
        )
        facts = CardFacts(
            function=function,
            driver=self.name,
            name=whole,
            model=model,
            uuid=uuid,
            memory_bytes=memory_bytes,
            memory_mode=card.memory_mode,
        )
        if counts:
            return self._all_ways(device, facts, card, counts, links)
        if card.partitions:
            share_bytes = share(
                memory_bytes, max(len(card.partitions), product.compute_dies if card.mode == "CPX" else 0)
            )
            return ([device] if self.host.offers_parents else []) + present_parts(facts, card, share_bytes, links)
        return [device]

    def _all_ways(
        self,
        device: Device,
        facts: CardFacts,
        card: AmdCard,
        counts: Mapping[str, int],
        links: Mapping[str, tuple[Link, ...]],
    ) -> list[Device]:
        """Give all devices of a card that is cut on demand: of each mode, whichever it is in."""
        parts = [
            part
            for mode, count in counts.items()
            if mode != WHOLE
            for part in possible_parts(facts, card, mode, count, links)
        ]
        devices = ([device] if WHOLE in counts else []) + parts
        ways = [
            [each.name for each in devices if each.attributes.get("partitionMode", WHOLE) == mode] for mode in counts
        ]
        address = facts.function.address
        self._sets[address], uses = count_ways(facts.name, ways)
        self._cut[address] = tuple(msgspec.structs.replace(each, consumes=uses[each.name]) for each in devices)
        return list(self._cut[address])

    def _can_be_cut(self, tree: Tree, function: PciDevice, card: AmdCard) -> bool:
        """Return whether a card is offered in all its modes at once, and note the modes that it
        has.
        """
        if self.on_demand.locks.is_changing(card.address):
            return True
        self._counts.pop(card.address, None)
        if not self.host.cuts_on_demand or card.fault or not card.nodes:
            return False
        try:
            counts = part_counts(tree, card, self._products.product(function).compute_dies)
        except HardwareError:
            return False
        if len(counts) < 2 or card.mode not in counts:
            return False
        self._counts[card.address] = counts
        return True

    def _counts_of(self, tree: Tree, addresses: Sequence[PciAddress]) -> dict[PciAddress, Mapping[str, int]]:
        """Return the modes of the wanted cards.

        A service that has just started may be asked before its first look.
        """
        unknown = [address for address in addresses if address not in self._counts]
        cards = read_amd_cards(tree, sorted(set(unknown))) if unknown else {}
        return {**self._counts, **{address: part_counts(tree, card, 0) for address, card in cards.items()}}

    def _links_of_whole(self, name: str, links: Mapping[str, tuple[Link, ...]]) -> tuple[Link, ...]:
        by_peer = {link.peer: link for link in (*self._whole_links.get(name, ()), *links.get(name, ()))}
        self._whole_links[name] = tuple(by_peer[peer] for peer in sorted(by_peer))
        return self._whole_links[name]

    def _read_links(
        self, tree: Tree, cards: Mapping[PciAddress, AmdCard], names: Mapping[int, str]
    ) -> dict[str, tuple[Link, ...]]:
        """Read the XGMI peers of each device.

        KFD has no bandwidth between partitions of two cards. Every pair has that link, so it is
        left out.
        """
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

    def _look(self, tree: Tree, address: PciAddress) -> tuple[Observation | None, ...]:
        folder = pci_folder(address)
        # `discover` leaves these out when they cannot be read; the fault is reported here.
        tree.read_int(f"{folder}/mem_info_vram_total")
        tree.read(f"{folder}/unique_id")
        tree.read(f"{folder}/product_name")
        return (
            *observe_kernel_driver(tree, address),
            temperature_sign(tree, folder),
            ras_sign(tree, folder, self._counters),
        )


def _why_not_whole(card: AmdCard) -> list[str]:
    """Return why a card is not offered as one GPU, or nothing for a whole one."""
    if card.fault:
        return [card.fault]
    if card.partitions:
        mode = f"in mode {card.mode}" if card.mode else "cut"
        return [f"it is {mode}, and its {len(card.partitions)} partitions are offered instead"]
    return []


def _is_cut(device: Device) -> bool:
    """Say whether a device is a partition, or a card with all of its partitions."""
    return device.attributes.get("type") == PARTITION or device.role is DeviceRole.PARTITION_PARENT


def _still_whole(devices: Sequence[Device], cards: Mapping[PciAddress, AmdCard]) -> Refusal | None:
    """Refuse a GPU that was cut since the last look, because its own render node is now that of the
    first partition.
    """
    cut = {
        device.name: f"{device.name}: {why}"
        for device in devices
        if device.pci is not None
        for why in _why_not_whole(cards[device.pci])
    }
    return refuse("device-not-offered", "; ".join(cut.values()), devices=tuple(sorted(cut))) if cut else None


def _nodes_by_name(device_class: str, card: AmdCard) -> list[tuple[KfdNode, str]]:
    """List a card's KFD nodes with the names of their devices."""
    if card.partitions:
        return [(part.node, partition_name(device_class, card, part)) for part in card.partitions]
    return [(card.node, pci_device_name(device_class, card.address))] if card.node is not None else []


def _described(tree: Tree, function: PciDevice, product: Product) -> tuple[int, str, str]:
    """Read a card's memory in bytes, its model and its UUID, as far as they can be read."""
    memory_bytes, model, unique = product.memory_bytes, product.name, ""
    try:
        folder = pci_folder(function.address)
        memory_bytes = tree.read_int(f"{folder}/mem_info_vram_total") or memory_bytes
        model = tree.read(f"{folder}/product_name") or model
        unique = tree.read(f"{folder}/unique_id") or ""
    except HardwareError:
        # Still a GPU, described by what could be read. `observe` reports what cannot be read.
        pass
    return memory_bytes, model or f"AMD device {function.device:04x}", f"GPU-{unique}" if unique else ""
