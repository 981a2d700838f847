"""How each two devices of a machine reach each other, in the words of `nvidia-smi topo -m`, and
which CPUs and NUMA nodes are near each.

Pure. The words have the meaning of nvidia-smi's legend (nvmlGpuTopologyLevel_t of NVML): what lies
between two devices on the way through PCIe. A pair whose place is unknown has `?`, for which
nvidia-smi has no word.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from topobus.values.device import Device, Inventory, LinkClass
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Machine, PciDevice
from topobus.values.pci import PciAddress

__all__ = ["LEGEND", "MatrixDevice", "PathMatrix", "path_matrix"]

_SELF, _LINKS, _SWITCH, _BRIDGES, _HOST, _NODE, _SYSTEM, _UNKNOWN = "X", "NV#", "PIX", "PXB", "PHB", "NODE", "SYS", "?"
_OTHER_LINKS = "XGMI"

LEGEND: dict[str, str] = {
    _SELF: "the device itself",
    _SYSTEM: "through PCIe and the interconnect between NUMA nodes (UPI, Infinity Fabric)",
    _NODE: "through PCIe and the interconnect between host bridges of one NUMA node",
    _HOST: "through PCIe and one host bridge (root complex), most often the CPU",
    _BRIDGES: "through several PCIe switches, and no host bridge",
    _SWITCH: "through one PCIe switch at most",
    _LINKS: "through # bonded NVLinks (NV alone: the service does not report how many)",
    _OTHER_LINKS: "through links between GPUs of another vendor",
    _UNKNOWN: "the machine does not show where one of the two is",
}
"""What the words of a matrix mean, the farthest first as nvidia-smi has it."""


class MatrixDevice(Struct, frozen=True, kw_only=True):
    """One row and column."""

    id: str
    """As nvidia-smi names it: `GPU0`, `NIC3`; numbered by class in the order of PCI addresses."""
    device_class: str
    name: str
    """As `topobus inventory` names it."""
    model: str = ""
    interface: str = ""
    """Its network interface as its service found it; empty where it has none."""
    pci: str = ""
    cpu_affinity: CpuSet = CpuSet()
    """CPUs near it; empty: not known."""
    numa_affinity: NodeSet = NodeSet()
    """NUMA nodes near it; empty: not known."""
    gpu_numa_id: int | None = None
    """The NUMA node that is its memory; None where it is none, or is not known."""


class PathMatrix(Struct, frozen=True, kw_only=True):
    """All devices, and the word for each pair: `words[i][j]` from `devices[i]` to `devices[j]`."""

    node: str
    devices: tuple[MatrixDevice, ...]
    words: tuple[tuple[str, ...], ...]

    @property
    def legend(self) -> dict[str, str]:
        """The words that this matrix has, with their meanings."""
        used = {_LINKS if word.startswith("NV") else word for row in self.words for word in row}
        return {word: meaning for word, meaning in LEGEND.items() if word in used}


def path_matrix(machine: Machine, inventories: Iterable[Inventory], classes: Iterable[str] = ()) -> PathMatrix:
    """Find how the devices of these classes reach each other, or of all classes but CPUs when none
    is named.

    Order: GPUs first, then other classes by name; in a class by PCI address, then name. Parts of a
            card (virtual functions, partitions) are where their card is, and left out beside it.
    Cost: O(devices²).
    """
    wanted = set(classes)
    functions = {function.address: function for function in machine.pci_devices}
    rows: list[tuple[Device, PciDevice | None, MatrixDevice]] = []
    for inventory in sorted(
        inventories, key=lambda inventory: (inventory.device_class != "gpu", inventory.device_class)
    ):
        if inventory.device_class not in wanted and (wanted or inventory.device_class == "cpu"):
            continue
        names = {device.name for device in inventory.devices}
        whole = [
            device for device in inventory.devices if device.parent not in names and device.partition_of not in names
        ]
        for number, device in enumerate(sorted(whole, key=_order)):
            function = functions.get(device.pci) if device.pci is not None else None
            rows.append((device, function, _row(machine, device, function, number)))
    words = tuple(
        tuple(
            _word(machine, (first, at), (second, other_at)) if first is not second else _SELF
            for second, other_at, _ in rows
        )
        for first, at, _ in rows
    )
    return PathMatrix(node=machine.node, devices=tuple(row for _, _, row in rows), words=words)


def _order(device: Device) -> tuple[bool, tuple[int, ...], int, str]:
    key = device.pci.key if device.pci is not None else ()
    return device.pci is None, key, device.cpu if device.cpu is not None else -1, device.name


def _row(machine: Machine, device: Device, function: PciDevice | None, number: int) -> MatrixDevice:
    nodes = device.numa_nodes or NodeSet()
    near = function.near_cpus if function is not None and function.numa_node is not None else CpuSet()
    if not near:
        for numa_node in machine.numa_nodes:
            near |= numa_node.near_cpus & machine.online_cpus if numa_node.id in nodes else CpuSet()
    return MatrixDevice(
        id=f"{device.device_class.upper()}{number}",
        device_class=device.device_class,
        name=device.name,
        model=device.model,
        interface=str(device.attributes.get("interface", "")),
        pci=str(device.pci) if device.pci is not None else "",
        cpu_affinity=near,
        numa_affinity=nodes,
    )


def _word(machine: Machine, first: tuple[Device, PciDevice | None], second: tuple[Device, PciDevice | None]) -> str:
    (device, function), (other, other_function) = first, second
    link = next(
        (
            each_link
            for end, peer in ((device, other), (other, device))
            for each_link in end.links
            if each_link.peer == peer.name
            and each_link.kind is LinkClass.FABRIC
            and end.device_class == peer.device_class
        ),
        None,
    )
    if link is not None:
        return (
            f"NV{link.count or ''}"
            if "nvidia" in f"{device.vendor} {device.driver} {device.model}".lower()
            else _OTHER_LINKS
        )
    if function is not None and other_function is not None and function.root and function.root == other_function.root:
        return _word_below_a_root(function, other_function)
    nodes, other_nodes = device.numa_nodes, other.numa_nodes
    if nodes and other_nodes:
        return _NODE if nodes & other_nodes else _SYSTEM
    return _NODE if len(machine.numa_nodes) == 1 else _UNKNOWN


def _word_below_a_root(function: PciDevice, other: PciDevice) -> str:
    """Find what lies between two functions of one root complex: the same switch or bridge, several,
    or the root complex itself.
    """
    if _card(function.address) == _card(other.address):
        return _SWITCH
    shared = [bridge for bridge, other_bridge in zip(function.path, other.path, strict=False) if bridge == other_bridge]
    if not shared:
        return _HOST
    return _SWITCH if function.switch == other.switch else _BRIDGES


def _card(address: PciAddress) -> tuple[int, ...]:
    return address.key[:3]
