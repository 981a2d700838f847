"""Renders a machine in hwloc's terms: the output of `topobus machine --json`.

The result is plain dicts and lists, sorted, equal for equal machines. Pure. Where firmware
contradicts itself, a set that does not nest is widened to the smallest group of CPUs around it, as
hwloc does when it draws such a machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from topobus.sysfs.nest import Nest
from topobus.values.idset import CpuSet
from topobus.values.machine import Cpu, Machine, NumaNode, PciDevice
from topobus.values.pci import PciAddress

__all__ = ["machine_report"]

# hwloc builds without 32-bit PCI domains by default (its ABI holds 16 bits) and
# lists none of those functions.
_MAX_DOMAIN = 0xFFFF


def machine_report(
    machine: Machine,
    kernel_names: Mapping[PciAddress, Sequence[str]] = MappingProxyType({}),
    models: Mapping[tuple[int, int], str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Describe a machine: NUMA nodes with CPUs and memory, packages, cores, processing units,
    level-3 caches, PCI functions, distances.

    Shapes: sets are text in the kernel's list form; `packages` and `l3` are sorted as text;
    `distances` is there only when they are known and the machine has two nodes or more; `pci`
    leaves bridges out; `near_cpus` holds for a root complex, not for one function; `kernel_names`
    (what is behind a function) and `models` (by vendor and device) are added to the functions that
    have them.
    """
    usable = machine.online_cpus
    view = _View(machine)
    report: dict[str, Any] = {
        "node": machine.node,
        "generation": machine.generation,
        "architecture": machine.architecture,
        "boot_id": machine.boot_id,
        "numa": [
            {
                "id": numa_node.id,
                "cpus": str(view.widen(numa_node.near_cpus or numa_node.cpus) & usable),
                "memory_bytes": numa_node.memory_bytes,
            }
            for numa_node in machine.numa_nodes
        ],
        "packages": view.groups(lambda cpu: cpu.socket),
        "cores": len(view.groups(lambda cpu: cpu.core)),
        "pus": str(usable),
        "l3": view.groups(lambda cpu: cpu.l3),
        "pci": _pci_functions(machine, view, kernel_names, models),
        "warnings": list(machine.warnings),
    }
    if machine.distances and len(machine.numa_nodes) > 1:
        report["distances"] = {
            "nodes": [numa_node.id for numa_node in machine.numa_nodes],
            "values": [list(row) for row in machine.distances],
        }
    return report


class _View:
    """Groups of CPUs of one machine, including those that have memory or devices and no
    CPU for us.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._usable = machine.online_cpus
        self.present = CpuSet.of(cpu.id for cpu in machine.cpus)
        self._nest = Nest()
        keys: tuple[Callable[[Cpu], int | None], ...] = (
            lambda cpu: cpu.socket,
            _die,
            lambda cpu: cpu.core,
            lambda cpu: cpu.l3,
        )
        for key in keys:
            for cpus in self._collect(key):
                self._nest.add(cpus)
        # Nodes with CPUs of their own come first: where two contradict each other, the later one is
        # widened.
        self._local = [
            numa_node.near_cpus or numa_node.cpus
            for numa_node in sorted(machine.numa_nodes, key=lambda numa_node: (not numa_node.cpus, numa_node.id))
        ]
        for cpus in self._local:
            if cpus:
                self._nest.add(cpus)
        by_node = {numa_node.id: numa_node for numa_node in machine.numa_nodes}
        self._local += [_local_cpus(pci_device, by_node) for pci_device in machine.pci_devices]

    def _collect(self, key: Callable[[Cpu], int | None]) -> list[CpuSet]:
        bits: dict[int, int] = defaultdict(int)
        for cpu in self._machine.cpus:
            number = key(cpu)
            if number is not None:
                bits[number] |= 1 << cpu.id
        return [CpuSet.from_bits(bit) for bit in bits.values()]

    def groups(self, key: Callable[[Cpu], int | None]) -> list[str]:
        """List groups by their usable CPUs.

        One without any stays (as empty text) when memory or a device is inside it.
        """
        lines = [
            str(cpus & self._usable)
            for cpus in self._collect(key)
            if cpus & self._usable or any(local and local <= cpus for local in self._local)
        ]
        return sorted(lines)

    def widen(self, cpus: CpuSet) -> CpuSet:
        """Return the set itself if it nests with the groups (it is one then), else the smallest
        group, or the machine, around it.
        """
        if not cpus or self._nest.add(cpus):
            return cpus
        return self._nest.around(cpus) or self.present


def _pci_functions(
    machine: Machine,
    view: _View,
    kernel_names: Mapping[PciAddress, Sequence[str]],
    models: Mapping[tuple[int, int], str],
) -> list[dict[str, Any]]:
    by_node = {numa_node.id: numa_node for numa_node in machine.numa_nodes}
    near: dict[tuple[int, int], CpuSet] = {}
    # The first function on a root bus represents all below it: the root complex is what is near.
    for pci_device in machine.pci_devices:
        if not pci_device.path:
            near.setdefault(_root_bus(pci_device), view.widen(_local_cpus(pci_device, by_node)) & machine.online_cpus)
    return [
        {
            "address": str(pci_device.address),
            "type": f"{pci_device.class_code >> 8:04x} [{pci_device.vendor:04x}:{pci_device.device:04x}]"
            f" [{pci_device.subsystem_vendor:04x}:{pci_device.subsystem_device:04x}] {pci_device.revision:02x}",
            "near_cpus": str(near.get(_root_bus(pci_device), pci_device.near_cpus)),
        }
        | ({"names": list(kernel_names[pci_device.address])} if pci_device.address in kernel_names else {})
        | (
            {"model": models[pci_device.vendor, pci_device.device]}
            if (pci_device.vendor, pci_device.device) in models
            else {}
        )
        for pci_device in machine.pci_devices
        if not pci_device.is_bridge and pci_device.address.domain <= _MAX_DOMAIN
    ]


def _die(cpu: Cpu) -> int | None:
    """Number a die in the machine: the kernel's ids repeat in every socket."""
    return None if cpu.die is None or cpu.socket is None else cpu.socket << 16 | cpu.die


def _root_bus(pci_device: PciDevice) -> tuple[int, int]:
    top = pci_device.path[0] if pci_device.path else pci_device.address
    return (top.domain, top.bus)


def _local_cpus(pci_device: PciDevice, by_node: dict[int, NumaNode]) -> CpuSet:
    """Return the CPUs near a function, including those that we may not use if its NUMA node is
    known.
    """
    node = by_node.get(pci_device.numa_node) if pci_device.numa_node is not None else None
    return pci_device.near_cpus or (node.near_cpus if node is not None else CpuSet())
