"""Machines with AMD GPUs around a KFD topology that was captured on a real one (tests/data/kfd).

The capture gives KFD's nodes; the PCI functions, the `amdgpu_xcp` platform devices and the DRM
nodes are written here as the kernel's drivers amdgpu and amdxcp make them: the first partition has
the function's own render node, the others those of platform devices, of which each card has seven.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.sysfs_trees import write
from topobus.sysfs.tree import Tree
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine, NumaNode, PciDevice
from topobus.values.pci import PciAddress

__all__ = ["NODES", "KfdMachine", "card_address", "folder"]

_CAPTURES = Path(__file__).parent.parent / "data" / "kfd"
NODES = "sys/class/kfd/kfd/topology/nodes"
_FIRST_RENDER = 128
# amdgpu makes so many platform devices a card, in use or not (MAX_XCP - 1).
_PARTITION_DEVICES = 7
MI300X_BYTES = 206_141_652_992
"""What `mem_info_vram_total` says on an MI300X: 192 GiB less what the firmware keeps."""


class KfdMachine:
    """A tree with the GPUs of a capture."""

    def __init__(
        self,
        root: Path,
        capture: str,
        *,
        mode: str = "",
        memory_mode: str = "",
        spelling: str = "amdgpu_xcp_{}",
        has_number_in_location: bool = True,
        is_completed: bool = False,
        has_links: bool = False,
        most_cards: int = 0,
    ) -> None:
        """Write the tree.

        Shapes: spelling — how the kernel names the platform devices; has_number_in_location —
        False: all nodes of a card have one `location_id`, as on older kernels; is_completed — write
        the node that the capture of the MI300X lacks, after the one before it; has_links — also
        write the links, thousands of files; most_cards — only that many cards from the first, 0:
        all.
        """
        self.root = root
        self.nodes: dict[str, dict[str, Any]] = json.loads((_CAPTURES / f"{capture}.json").read_text())
        if is_completed:
            last = max(self.nodes, key=int)
            properties = {
                name: value + (name in ("location_id", "drm_render_minor"))
                for name, value in self.nodes[last]["properties"].items()
            }
            self.nodes[str(int(last) + 1)] = {**self.nodes[last], "properties": properties}
        if most_cards:
            slots = sorted(
                {card_address(node["properties"]) for node in self.nodes.values() if node["properties"]["simd_count"]}
            )[:most_cards]
            self.nodes = {
                number: node
                for number, node in self.nodes.items()
                if not node["properties"]["simd_count"] or card_address(node["properties"]) in slots
            }
        self.functions: dict[PciAddress, PciDevice] = {}
        self._spelling = spelling
        self._devices = 0
        cards: dict[PciAddress, list[dict[str, int]]] = {}
        for number, node in self.nodes.items():
            facts = dict(node["properties"])
            if facts["simd_count"]:
                address = card_address(facts)
                cards.setdefault(address, []).append(facts)
                if not has_number_in_location:
                    facts["location_id"] &= ~7
            self.write_node(number, facts, node if has_links else {**node, "links": {}})
        for address, parts in cards.items():
            self._write_card(address, sorted(part["drm_render_minor"] for part in parts), mode, memory_mode)
        self.tree = self.write({})

    @property
    def machine(self) -> Machine:
        """The machine as discovery publishes it."""
        node = NumaNode(id=0, cpus=CpuSet(0), memory_bytes=1)
        return Machine(node="n1", numa_nodes=(node,), cpus=(), pci_devices=tuple(self.functions.values()))

    @property
    def addresses(self) -> list[PciAddress]:
        """The cards."""
        return sorted(self.functions)

    def write(self, files: dict[str, object]) -> Tree:
        """Write files, and give a tree that has seen nothing yet."""
        return write(self.root, files)

    def set_mode(self, address: PciAddress, mode: str) -> None:
        """Say another mode of a card; its nodes stay."""
        self.write({f"{folder(address)}/current_compute_partition": mode})

    def write_node(self, number: str, facts: dict[str, int], node: dict[str, Any]) -> None:
        """Write one KFD node."""
        files: dict[str, object] = {f"{NODES}/{number}/properties": _lines(facts)}
        if facts["simd_count"]:
            files[f"{NODES}/{number}/gpu_id"] = 1000 + int(number)
        for bank, text in enumerate(node["memory"]):
            heap_type, size = text.split()
            files[f"{NODES}/{number}/mem_banks/{bank}/properties"] = _lines(
                {"heap_type": int(heap_type), "size_in_bytes": int(size)}
            )
        links = ((kind.split(), peer) for kind, peers in node["links"].items() for peer in peers)
        for index, ((link_type, bandwidth), peer) in enumerate(links):
            link = {"type": int(link_type), "node_from": int(number), "node_to": peer, "max_bandwidth": int(bandwidth)}
            files[f"{NODES}/{number}/io_links/{index}/properties"] = _lines(link)
        self.write(files)

    def remove_nodes(self, keep: int) -> None:
        """Leave each card its first nodes only, as while its mode changes."""
        kept: dict[tuple[int, int], int] = {}
        for number, node in self.nodes.items():
            facts = node["properties"]
            if facts["simd_count"]:
                card = (facts["domain"], facts["location_id"] & ~7)
                kept[card] = kept.get(card, 0) + 1
                if kept[card] > keep:
                    (self.root / NODES / number / "properties").unlink()

    def _write_card(self, address: PciAddress, minors: list[int], mode: str, memory_mode: str) -> None:
        files: dict[str, object] = {
            f"{folder(address)}/mem_info_vram_total": MI300X_BYTES,
            f"{folder(address)}/unique_id": f"{address.bus:016x}",
            **_drm(folder(address), minors[0]),
        }
        if mode:
            files[f"{folder(address)}/current_compute_partition"] = mode
        if memory_mode:
            files[f"{folder(address)}/current_memory_partition"] = memory_mode
        # MI200 has none; else all, also those without a partition.
        for index in range(_PARTITION_DEVICES if len(minors) > 1 else 0):
            files |= _drm(f"sys/devices/platform/{self._spelling.format(self._devices)}", minors[0] + 1 + index)
            self._devices += 1
        self.write(files)
        (self.root / folder(address) / "driver").symlink_to("/sys/bus/pci/drivers/amdgpu")
        self.functions[address] = PciDevice(
            address=address,
            vendor=0x1002,
            device=0x74A1 if len(minors) > 1 else 0x740F,
            class_code=0x120000,
            numa_node=0,
            root=f"pci{address.domain:04x}:{address.bus:02x}",
            driver="amdgpu",
        )


def folder(address: PciAddress) -> str:
    """Give a function's folder."""
    return f"sys/bus/pci/devices/{address}"


def _drm(device: str, minor: int) -> dict[str, object]:
    return {
        f"{device}/drm/renderD{minor}/dev": f"226:{minor}",
        f"{device}/drm/card{minor - _FIRST_RENDER}/dev": f"226:{minor - _FIRST_RENDER}",
    }


def _lines(facts: dict[str, int]) -> str:
    return "\n".join(f"{name} {value}" for name, value in facts.items())


def card_address(facts: dict[str, int]) -> PciAddress:
    """Say whose a KFD node is."""
    location = facts["location_id"]
    return PciAddress(facts["domain"], location >> 8 & 0xFF, location >> 3 & 0x1F, 0)
