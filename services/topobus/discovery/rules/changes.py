"""Decides whether a freshly read machine counts as changed, and describes the change.

Values that move by themselves (free huge pages, a link that slows down to save power) do not count,
because every publication wakes all readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from topobus.values.idset import CpuSet
from topobus.values.machine import Machine
from topobus.values.names import next_generation

__all__ = ["MachineChange", "describe_changes", "machine_to_publish", "steady"]

K = TypeVar("K")
V = TypeVar("V")


class MachineChange(Struct, frozen=True, kw_only=True):
    """One difference: a stable code, its subject, and where useful the values before and after."""

    code: str
    what: str
    before: str = ""
    after: str = ""

    def __str__(self) -> str:
        values = f" ({self.before or 'none'} -> {self.after or 'none'})" if self.before or self.after else ""
        return f"{self.code} {self.what}{values}"


def steady(machine: Machine) -> Machine:
    """Clear what does not count as a change: generation, free huge pages, present link speed."""
    return replace(
        machine,
        generation=0,
        numa_nodes=tuple(
            replace(node, hugepages=tuple(replace(pool, free=0) for pool in node.hugepages))
            for node in machine.numa_nodes
        ),
        pci_devices=tuple(
            pci_device if pci_device.link is None else replace(pci_device, link=replace(pci_device.link, speed_gts=0.0))
            for pci_device in machine.pci_devices
        ),
    )


def machine_to_publish(stored: Machine | None, machine: Machine) -> Machine | None:
    """Return the machine to publish with its generation, or None when the stored one is equal.

    >>> empty = Machine(node="n", numa_nodes=(), cpus=())
    >>> machine_to_publish(replace(empty, generation=4), replace(empty, boot_id="b")).generation
    5
    """
    if stored is None:
        return replace(machine, generation=1)
    if steady(stored) == steady(machine):
        return None
    return replace(machine, generation=next_generation(stored.generation))


def describe_changes(before: Machine, after: Machine) -> tuple[MachineChange, ...]:
    """Name all differences: CPUs first, then memory, then PCI functions by address."""
    changes: list[MachineChange] = []
    if before.boot_id != after.boot_id:
        changes.append(MachineChange(code="booted", what="machine", before=before.boot_id, after=after.boot_id))
    changes.extend(_cpu_changes(before, after))
    changes.extend(_node_changes(before, after))
    if before.distances != after.distances:
        changes.append(MachineChange(code="distances-changed", what="numa"))
    changes.extend(_pci_changes(before, after))
    changes.extend(
        MachineChange(code="warning-new", what=warning) for warning in after.warnings if warning not in before.warnings
    )
    changes.extend(
        MachineChange(code="warning-gone", what=warning) for warning in before.warnings if warning not in after.warnings
    )
    return tuple(changes)


def _cpu_changes(before: Machine, after: Machine) -> Iterable[MachineChange]:
    old, new = before.online_cpus, after.online_cpus
    if gone := old - new:
        yield MachineChange(code="cpus-offline", what=str(gone))
    if come := new - old:
        yield MachineChange(code="cpus-online", what=str(come))
    places = {cpu.id: cpu for cpu in before.cpus if cpu.online}
    moved = CpuSet.of(cpu.id for cpu in after.cpus if cpu.online and cpu.id in places and places[cpu.id] != cpu)
    # A core whose lowest thread went offline is named by another thread: this follows from the
    # change already reported above.
    if moved and not gone and not come:
        yield MachineChange(code="cpus-changed", what=str(moved))


def _node_changes(before: Machine, after: Machine) -> Iterable[MachineChange]:
    old, new = (
        {numa_node.id: numa_node for numa_node in before.numa_nodes},
        {numa_node.id: numa_node for numa_node in after.numa_nodes},
    )
    yield from _came_and_went("numa", old, new)
    for node in sorted(old.keys() & new.keys()):
        if old[node].memory_bytes != new[node].memory_bytes:
            yield MachineChange(
                code="memory-changed",
                what=f"node{node}",
                before=str(old[node].memory_bytes),
                after=str(new[node].memory_bytes),
            )
        pools = [{pool.page_bytes: pool.total for pool in side[node].hugepages} for side in (old, new)]
        if pools[0] != pools[1]:
            yield MachineChange(code="hugepages-changed", what=f"node{node}", before=str(pools[0]), after=str(pools[1]))


def _pci_changes(before: Machine, after: Machine) -> Iterable[MachineChange]:
    old, new = (
        {pci_device.address: pci_device for pci_device in steady(before).pci_devices},
        {pci_device.address: pci_device for pci_device in steady(after).pci_devices},
    )
    yield from _came_and_went("pci", old, new)
    for address in sorted(old.keys() & new.keys()):
        device, other = old[address], new[address]
        if device == other:
            continue
        fields = [name for name in device.__struct_fields__ if getattr(device, name) != getattr(other, name)]
        # The near CPUs change with the CPUs, which are reported above.
        if fields != ["near_cpus"]:
            yield MachineChange(code="pci-changed", what=str(address), after=", ".join(fields))


def _came_and_went(kind: str, old: Mapping[K, V], new: Mapping[K, V]) -> Iterable[MachineChange]:
    for key in old:
        if key not in new:
            yield MachineChange(code=f"{kind}-gone", what=f"node{key}" if kind == "numa" else str(key))
    for key in new:
        if key not in old:
            yield MachineChange(code=f"{kind}-new", what=f"node{key}" if kind == "numa" else str(key))
