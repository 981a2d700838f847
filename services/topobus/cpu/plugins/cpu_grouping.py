"""Groups CPUs into devices: one for each NUMA node, socket or level-3 cache, or one for the
machine.

Each device is named `cpu-<unit>-<id>` and has a capacity `cpus`, of which claims take shares. The
node's ledger chooses the CPUs of a claim, not this service. A CPU whose unit is not known is in no
group of that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from topobus.cpu.config import CpuGroupSettings, Grouping
from topobus.cpu.plugins.cpu_facts import CpuFacts
from topobus.values.counters import CapacityPolicy
from topobus.values.cpu_groups import GROUP_CAPACITY
from topobus.values.device import AttributeValue, Device
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Cpu

__all__ = ["group_devices"]

T = TypeVar("T")

_UNITS: Mapping[Grouping, Callable[[Cpu], int | None]] = {
    "numa": lambda cpu: cpu.numa_node,
    "socket": lambda cpu: cpu.socket,
    "l3": lambda cpu: cpu.l3,
    "machine": lambda _: 0,
}


def group_devices(cpus: Sequence[Cpu], settings: CpuGroupSettings, driver: str, near: CpuFacts) -> tuple[Device, ...]:
    """List the groups of online CPUs, or none where CPUs are offered one by one.

    Order: by the units' ids.
    """
    unit_of = _UNITS.get(settings.groups)
    members: dict[int, list[Cpu]] = {}
    for cpu in cpus if unit_of is not None else ():
        unit = unit_of(cpu) if unit_of is not None else None
        if cpu.online and unit is not None:
            members.setdefault(unit, []).append(cpu)
    return tuple(_device(settings, driver, unit, group, near) for unit, group in sorted(members.items()))


def _only(values: Iterable[T | None]) -> T | None:
    """Return the one value that all have, or None when they differ or one of them is None."""
    different = set(values)
    return different.pop() if len(different) == 1 else None


def _device(settings: CpuGroupSettings, driver: str, unit: int, group: Sequence[Cpu], near: CpuFacts) -> Device:
    name = "cpu-machine" if settings.groups == "machine" else f"cpu-{settings.groups}-{unit}"
    cores = {cpu.core if cpu.core is not None else cpu.id for cpu in group}
    threads = max(1, len(group) // len(cores))
    step = threads if settings.whole_cores else 1
    nodes = {cpu.numa_node for cpu in group}
    shared: dict[str, AttributeValue | None] = {
        "socket": _only(cpu.socket for cpu in group),
        "die": _only(cpu.die for cpu in group),
        "l3": _only(cpu.l3 for cpu in group),
        "kind": _only(cpu.kind or None for cpu in group),
    }
    facts: dict[str, AttributeValue] = {key: value for key, value in shared.items() if value is not None}
    facts |= {"group": settings.groups, "cores": len(cores), "threadsPerCore": threads, "smtEnabled": threads > 1}
    return Device(
        name=name,
        device_class="cpu",
        driver=driver,
        numa_nodes=None if None in nodes else NodeSet.of(node for node in nodes if node is not None),
        pcie_roots=tuple(sorted({root for node in nodes for root in near.pcie_roots(node)})),
        near_cpus=CpuSet.of(cpu.id for cpu in group),
        allows_multiple=True,
        capacity={GROUP_CAPACITY: len(group)},
        capacity_policies={GROUP_CAPACITY: CapacityPolicy(default=step, minimum=step, step=step)},
        attributes=facts,
    )
