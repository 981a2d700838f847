"""Counts CPUs where shapes of an operator have some: which groups of CPUs are counted, how many of each
a shape takes, and the devices that are single CPUs then.

A counted group is a counter with the group's name. A shape takes several CPUs of it, and a *place* takes
one, or one core. Neither names a CPU: which ones a claim gets the writer of the node's ledger decides
when the claim is prepared, as for groups. So a scheduler guarantees the number, and the ledger that
no CPU is given twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from topobus.values.cpu_groups import GROUP_CAPACITY, is_cpu_group
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import CPU_CLASS
from topobus.values.idset import CpuSet
from topobus.values.ledger import Holders
from topobus.values.own_shapes import OwnShape
from topobus.values.request import OwnerKind

__all__ = [
    "counted_groups",
    "cpus_left",
    "cpus_near",
    "for_claims",
    "offered_cpus",
    "places_of",
    "why_uncounted",
]

_GROUPED = "numa"
_OF_GROUPS = frozenset({"cores", "group"})


def counted_groups(inventories: Iterable[Inventory], own_shapes: Sequence[OwnShape]) -> tuple[Device, ...]:
    """List the groups of CPUs that are counted: those of NUMA nodes, where a shape of the operator has
    CPUs. The machine's devices make no difference, so that all nodes of one setting offer CPUs alike.

    Order: by NUMA node.
    """
    if not any(shape.cpus for shape in own_shapes):
        return ()
    groups = [device for device in _cpus(inventories) if is_cpu_group(device) and _grouping(device) == _GROUPED]
    return tuple(sorted(groups, key=lambda group: (group.numa_nodes.bits if group.numa_nodes else 0, group.name)))


def why_uncounted(inventories: Iterable[Inventory]) -> str:
    """Explain why no CPUs are counted, for a shape that has some."""
    devices = _cpus(inventories)
    if not devices:
        return "no CPU service has reported"
    offered = _grouping(devices[0]) or CPU_CLASS
    return f"CPUs are offered by {offered}; set cpus.groups of the cpu service to {_GROUPED}"


def cpus_near(
    devices: Iterable[Device], wanted: int, groups: Sequence[Device], sockets: Mapping[int, int]
) -> dict[str, int] | str:
    """Say how many CPUs of which groups a shape takes: of its devices' NUMA nodes, else of their
    sockets. Several nodes give equally many whole cores, the first ones what is left over.

    Shapes: sockets — node id to bits of socket ids; result — group to number, or why it has none.
    """
    nodes = {node for device in devices for node in device.numa_nodes or ()}
    bits = _bits_of(nodes, sockets)
    near = [group for group in groups if not nodes.isdisjoint(group.numa_nodes or ())] or [
        group for group in groups if bits & _bits_of(group.numa_nodes or (), sockets)
    ]
    if not near:
        return f"wanted {wanted} cpu, and near which CPUs its devices are is not known"
    step = max(map(_step, near))
    if wanted % step:
        return f"wanted {wanted} cpu, and CPUs are given by whole cores of {step} here"
    threads = max(map(_threads, near))
    unit = threads if wanted % threads == 0 else step
    each, more = divmod(wanted // unit, len(near))
    shares = {group.name: unit * (each + (index < more)) for index, group in enumerate(near)}
    for group in near:
        if shares[group.name] > offered_cpus(group):
            return f"wanted {shares[group.name]} cpu of {group.name}, which has {offered_cpus(group)} for claims"
    return {name: count for name, count in shares.items() if count}


def offered_cpus(group: Device) -> int:
    """Count the CPUs that claims may have of a group, whole cores where only those are given."""
    return group.capacity.get(GROUP_CAPACITY, 0) // _step(group) * _step(group)


def for_claims(inventory: Inventory, may_have: CpuSet | None, reserved: CpuSet) -> Inventory:
    """Leave those CPUs in groups that claims may have: only these are counted.

    Shapes: may_have — None: all; reserved — never given exclusively.
    """
    if inventory.device_class != CPU_CLASS or not any(map(is_cpu_group, inventory.devices)):
        return inventory

    def cut(device: Device) -> Device:
        cpus = (device.near_cpus if may_have is None else device.near_cpus & may_have) - reserved
        capacity = {**device.capacity, GROUP_CAPACITY: len(cpus)}
        return structs.replace(device, near_cpus=cpus, capacity=capacity) if is_cpu_group(device) else device

    return structs.replace(inventory, devices=tuple(map(cut, inventory.devices)))


def cpus_left(groups: Mapping[str, CpuSet], ledger: Holders | None) -> dict[str, int]:
    """Count the CPUs that claims have or can have of each counted group of which others hold some. Claims
    that have CPUs by their names are such others, because no counter knows of them.

    It is never less than what claims have, since a scheduler gives nothing more of a pool of which a counter
    is overdrawn.

    Shapes: groups — with those of their CPUs that claims may have; result — without the groups of which
            claims have all that they may.
    """
    others, of_claims = CpuSet(), dict.fromkeys(groups, 0)
    for allocation in ledger.allocations.values() if ledger is not None and groups else ():
        for holding in allocation.holdings:
            cpus = holding.cpus
            if allocation.owner.kind is OwnerKind.CLAIM:
                for name, chosen in holding.groups.items():
                    cpus -= chosen
                    of_claims[name] = of_claims.get(name, 0) + len(chosen)
            others |= cpus
    left = {name: max(len(cpus - others), of_claims[name]) for name, cpus in groups.items()}
    return {name: count for name, count in left.items() if count != len(groups[name])}


def places_of(group: Device) -> tuple[Device, ...]:
    """Make the places of a group, named as its devices are, without the class.

    Their capacity `cpus` is what each takes. They have what is true of all CPUs of the group, and the
    attribute `numaNode` of a single CPU, so that a claim for single CPUs finds them as it finds those that
    are offered one by one.
    """
    step = _step(group)
    attributes = {name: value for name, value in group.attributes.items() if name not in _OF_GROUPS}
    if group.numa_nodes:
        attributes["numaNode"] = group.numa_nodes.lowest
    stem = group.name.removeprefix(f"{CPU_CLASS}-")
    return tuple(
        Device(
            name=f"{stem}-{number}",
            device_class=CPU_CLASS,
            numa_nodes=group.numa_nodes,
            pcie_roots=group.pcie_roots,
            attributes=attributes,
            capacity={GROUP_CAPACITY: step},
        )
        for number in range(offered_cpus(group) // step)
    )


def _cpus(inventories: Iterable[Inventory]) -> tuple[Device, ...]:
    return tuple(
        device for inventory in inventories if inventory.device_class == CPU_CLASS for device in inventory.devices
    )


def _grouping(device: Device) -> str:
    return str(device.attributes.get("group", ""))


def _step(group: Device) -> int:
    """Return the number of CPUs that are given together."""
    policy = group.capacity_policies.get(GROUP_CAPACITY)
    return (policy.step if policy is not None else None) or 1


def _threads(group: Device) -> int:
    threads = group.attributes.get("threadsPerCore")
    return threads if isinstance(threads, int) and threads > 0 else 1


def _bits_of(nodes: Iterable[int], sockets: Mapping[int, int]) -> int:
    bits = 0
    for node in nodes:
        bits |= sockets.get(node, 0)
    return bits
