"""Make the NodeView that a plan works on, out of the machine, the inventories and the ledger.

A decision event keeps the view, so that the plan can be repeated. A view of another state (an owner
gone, a claim allocated, another ledger) is a new value made from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from topobus.engine.health.silence import unheard
from topobus.values.cpu_groups import is_cpu_group
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import CPU_CLASS
from topobus.values.health import HealthState
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine, NumaNode
from topobus.values.outcome import MemoryBlock
from topobus.values.shares import shares_held
from topobus.values.view import AlignmentOptions, CoreView, NodeAlignment, NodeView, NumaMemory

__all__ = [
    "MEMORY",
    "aligned_view",
    "cores_of",
    "cpu_name",
    "cpu_of_name",
    "node_view",
    "with_devices",
    "with_ledger",
    "without_owners",
]

MEMORY = "memory"
"""The kind of ordinary memory; huge pages are `hugepages-<size>`."""

_PREFIX = "cpu-"


def cpu_name(cpu: int) -> str:
    """Name the device that is a logical CPU.

    >>> cpu_name(7)
    'cpu-7'
    """
    return f"{_PREFIX}{cpu}"


def cpu_of_name(name: str) -> int | None:
    """Read a CPU device's name. None when it is not one.

    >>> cpu_of_name("cpu-7"), cpu_of_name("cpu-07"), cpu_of_name("gpu-7"), cpu_of_name("cpu-8192")
    (7, None, None, None)
    """
    digits = name.removeprefix(_PREFIX)
    if not (
        name.startswith(_PREFIX) and digits.isascii() and digits.isdecimal() and len(digits) <= len(str(CpuSet.MAX_ID))
    ):
        return None
    # A number that no set of CPUs can have is a name that no CPU has.
    return int(digits) if str(int(digits)) == digits and int(digits) <= CpuSet.MAX_ID else None


def node_view(
    machine: Machine,
    inventories: Mapping[str, Inventory],
    ledger: Ledger | None,
    options: AlignmentOptions,
    reserved_cpus: CpuSet,
    *,
    unheard_classes: Mapping[str, str] | None = None,
    custom_hints: Mapping[str, tuple[tuple[NodeSet | None, bool], ...]] | None = None,
    reserved_memory: Mapping[int, int] | None = None,
) -> NodeView:
    """Combine the inputs of a plan.

    Shapes: inventories — by class; ledger — None when nothing is held; custom_hints — by
    `class/count`; unheard_classes — classes of silent services to since when (their devices are
    Unknown).
    Units: reserved_memory — bytes by NUMA node.
    Order: independent of the order of inventories and devices: all are sorted.
    Errors: raises nothing. CPUs that are offline are left out.
    """
    silences = unheard_classes or {}
    inventories = {
        name: unheard(inventory, since=silences[name]) if name in silences else inventory
        for name, inventory in inventories.items()
    }
    cpu_inventory = inventories.get(CPU_CLASS)
    sick = _sick_cpus(cpu_inventory.devices) if cpu_inventory is not None else CpuSet()
    empty = NodeView(
        node=machine.node,
        machine_generation=machine.generation,
        inventory_generations={name: inventory.generation for name, inventory in sorted(inventories.items())},
        options=options,
        numa_nodes=machine.node_set,
        distances=machine.distances,
        cores=cores_of(machine),
        reserved_cpus=reserved_cpus,
        devices={
            name: tuple(sorted(inventory.devices, key=lambda device: device.name))
            for name, inventory in sorted(inventories.items())
            if name != CPU_CLASS
        },
        counter_sets={
            name: inventory.counter_sets for name, inventory in sorted(inventories.items()) if inventory.counter_sets
        },
        unhealthy_cpus=sick,
        memory=tuple(
            _memory(numa_node, (reserved_memory or {}).get(numa_node.id, 0)) for numa_node in machine.numa_nodes
        ),
        unheard_classes=dict(sorted(silences.items())),
        custom_hints=dict(custom_hints or {}),
        resource_names={
            inventory.resource: name for name, inventory in sorted(inventories.items()) if inventory.resource
        },
    )
    return with_ledger(empty, ledger) if ledger is not None else empty


def _sick_cpus(devices: Sequence[Device]) -> CpuSet:
    """List CPUs that are not allocated.

    A CPU that is only no longer listed by itself, but in a group, is not among them.
    """
    grouped = CpuSet()
    for device in devices:
        if is_cpu_group(device) and device.is_allocatable:
            grouped |= device.near_cpus
    return CpuSet.of(
        device.cpu
        for device in devices
        if device.cpu is not None
        and not device.is_allocatable
        and not (device.cpu in grouped and _is_only_gone(device))
    )


def _is_only_gone(device: Device) -> bool:
    reasons = {condition.reason for condition in device.health.conditions if condition.state is HealthState.UNHEALTHY}
    return reasons == {"device-gone"}


def cores_of(machine: Machine) -> tuple[CoreView, ...]:
    """List a machine's cores by their lowest CPU. CPUs that are offline are left out."""
    cores: dict[int, list[int]] = {}
    places: dict[int, CoreView] = {}
    for cpu in machine.cpus:
        if not cpu.online:
            continue
        core = cpu.core if cpu.core is not None else cpu.id
        cores.setdefault(core, []).append(cpu.id)
        if core not in places:
            places[core] = CoreView(cpus=CpuSet(), numa_node=cpu.numa_node, socket=cpu.socket, l3=cpu.l3)
    return tuple(
        CoreView(cpus=CpuSet.of(cpus), numa_node=places[core].numa_node, socket=places[core].socket, l3=places[core].l3)
        for core, cpus in sorted(cores.items())
    )


def aligned_view(
    machine: Machine,
    inventories: Mapping[str, Inventory],
    ledger: Ledger | None,
    alignment: NodeAlignment,
    *,
    unheard_classes: Mapping[str, str] | None,
) -> NodeView:
    """Combine the inputs of a node's plan by its alignment, as published: a planner elsewhere sees
    what the node itself does.

    Shapes: alignment — the node's options, reserved CPUs and memory (text of a node id to bytes; a
            key that is no id is ignored).
    Errors: raises nothing. Custom hints are not published, so classes that have some are planned by
            their devices' nodes.
    """
    reserved = {
        int(node): size for node, size in alignment.reserved_memory.items() if node.isascii() and node.isdecimal()
    }
    return node_view(
        machine,
        inventories,
        ledger,
        alignment.options,
        alignment.reserved_cpus,
        unheard_classes=unheard_classes,
        reserved_memory=reserved,
    )


def with_ledger(view: NodeView, ledger: Ledger) -> NodeView:
    """Return the same node with the holdings of this ledger instead of the view's own.

    Cost: O(devices, CPUs and blocks that are held).
    """
    held_devices: dict[str, dict[str, str]] = {}
    held_cpus: dict[str, CpuSet] = {}
    held_memory: dict[str, tuple[MemoryBlock, ...]] = {}
    shares: dict[str, set[str]] = {}
    for key, allocation in sorted(ledger.allocations.items()):
        if not any(holding.devices or holding.cpus or holding.memory for holding in allocation.holdings):
            # It counts as placed although it asked for nothing. Otherwise the pod could be placed
            # again, and two decisions would exist for one owner.
            held_cpus[key] = CpuSet()
        if any(holding.shared for holding in allocation.holdings):
            # Of several owners with a share of one device a view names only the last. This one
            # counts as placed as well.
            held_cpus[key] = CpuSet()
        for holding in allocation.holdings:
            for device_class, names in holding.devices.items():
                held_devices.setdefault(device_class, {}).update(dict.fromkeys(names, key))
            for device_class, names in holding.shared.items():
                shares.setdefault(device_class, set()).update(names)
            if holding.cpus:
                held_cpus[key] = held_cpus.get(key, CpuSet()) | holding.cpus
            if holding.memory:
                held_memory[key] = (*held_memory.get(key, ()), *holding.memory)
    return structs.replace(
        view,
        ledger_sequence=ledger.sequence,
        held_devices={name: dict(sorted(held.items())) for name, held in sorted(held_devices.items())},
        shared_devices={name: tuple(sorted(names)) for name, names in sorted(shares.items()) if names},
        held_shares=shares_held(
            (key, holding) for key, allocation in sorted(ledger.allocations.items()) for holding in allocation.holdings
        ),
        held_cpus=held_cpus,
        held_memory=held_memory,
    )


def with_devices(view: NodeView, owner: str, devices: Mapping[str, Iterable[str]]) -> NodeView:
    """Return the same node with more devices held by an owner.

    A device that is held already stays its holder's.

    Shapes: devices — class to names, CPUs by their device names (`cpu-7`); other names of class
            `cpu` are ignored.
    """
    held = {name: dict(holders) for name, holders in view.held_devices.items()}
    cpus = CpuSet()
    for device_class, names in devices.items():
        if device_class == CPU_CLASS:
            cpus |= CpuSet.of(cpu for name in names if (cpu := cpu_of_name(name)) is not None)
        else:
            held[device_class] = dict.fromkeys(names, owner) | held.get(device_class, {})
    held_cpus = {**view.held_cpus, owner: view.held_cpus.get(owner, CpuSet()) | cpus} if cpus else view.held_cpus
    return structs.replace(
        view,
        held_devices={name: dict(sorted(owners.items())) for name, owners in sorted(held.items())},
        held_cpus=held_cpus,
    )


def _memory(node: NumaNode, reserved: int) -> NumaMemory:
    """Compute ordinary memory as what is left beside the huge pages and the reserved memory, as
    kubelet counts.
    """
    pools = {f"hugepages-{_size(pool.page_bytes)}": pool.total * pool.page_bytes for pool in node.hugepages}
    return NumaMemory(
        id=node.id, allocatable={MEMORY: max(0, node.memory_bytes - sum(pools.values()) - reserved), **pools}
    )


def _size(size_bytes: int) -> str:
    """Write a page size as Kubernetes does: the largest binary unit that divides it."""
    for unit, suffix in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit}{suffix}"
    return str(size_bytes)


def without_owners(view: NodeView, owner_keys: frozenset[str]) -> NodeView:
    """Return the same node with nothing held by these owners, as if they were gone.

    Shapes: owner_keys — as in `Owner.key`; keys that hold nothing change nothing.
    """
    return structs.replace(
        view,
        held_devices={
            name: {device: owner for device, owner in held.items() if owner not in owner_keys}
            for name, held in view.held_devices.items()
        },
        held_shares={
            device_class: {
                name: {owner: share for owner, share in shares.items() if owner not in owner_keys}
                for name, shares in devices.items()
            }
            for device_class, devices in view.held_shares.items()
        },
        held_cpus={owner: cpus for owner, cpus in view.held_cpus.items() if owner not in owner_keys},
        held_memory={owner: blocks for owner, blocks in view.held_memory.items() if owner not in owner_keys},
    )
