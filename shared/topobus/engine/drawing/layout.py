"""Lays out a machine for a drawing: NUMA nodes with their cores, root complexes, switches and
devices, and who holds what.

The result has every sign and text that a drawing shows, in the order in which it shows them. The
caller that draws it chooses width, colours and medium. Pure. Letters and signs carry everything
that colour shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from msgspec import Struct

from topobus.engine.drawing.leaves import Leaf, PciNames, leaves_of
from topobus.engine.drawing.letters import DrawnHolder, DrawnHolders, holders_of
from topobus.values.device import Inventory
from topobus.values.dra_names import CPU_CLASS
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Holders
from topobus.values.machine import Cpu, Machine, NumaNode

__all__ = ["DrawnCore", "MachineLayout", "NumaPanel", "Place", "RootBranch", "SwitchBranch", "human_bytes", "layout_of"]


class DrawnCore(Struct, frozen=True, kw_only=True):
    """One physical core, and its sign."""

    cpus: CpuSet
    sign: str
    """The owner's letter, small when a thread is free; `*` for two owners, `!` when sick, `·` when
    free."""
    holder: DrawnHolder | None = None
    """The holder whose letter it is; None for any other sign."""
    is_sick: bool = False
    l3: int | None = None
    """The lowest CPU that shares its level-3 cache; None when the machine does not show it."""


class SwitchBranch(Struct, frozen=True, kw_only=True):
    """Devices below one PCI switch."""

    switch: str
    """Its address; empty: directly below the root complex, or the machine does not show it."""
    leaves: tuple[Leaf, ...]


class RootBranch(Struct, frozen=True, kw_only=True):
    """All that is below one root complex."""

    root: str
    """Empty: it has no PCI address."""
    switches: tuple[SwitchBranch, ...]

    @property
    def title(self) -> str:
        """The name of the branch."""
        return f"root complex {self.root.removeprefix('pci')}" if self.root else "no PCI address"


class Place(Struct, frozen=True, kw_only=True):
    """CPUs and devices that are in one place."""

    sockets: tuple[int, ...] = ()
    """Of its CPUs, ascending."""
    cpu_count: int = 0
    free_cpu_count: int = 0
    cores: tuple[DrawnCore, ...] = ()
    """Those of one level-3 cache together."""
    caches: str = ""
    """Its level-3 caches in words; empty where the machine does not show them."""
    roots: tuple[RootBranch, ...] = ()

    @property
    def socket_text(self) -> str:
        """The sockets in words. Empty when the machine does not report them."""
        return f"socket {','.join(map(str, self.sockets))}" if self.sockets else ""

    @property
    def cpus_text(self) -> str:
        """How many CPUs there are, in how many cores, and how many are free."""
        cores = len(self.cores)
        threads = self.cpu_count // cores if cores and self.cpu_count % cores == 0 else 0
        return (
            f"{self.cpu_count} ({_count(cores, 'core')}{f' x {threads}' if threads > 1 else ''}), "
            f"{self.free_cpu_count} free"
        )


class NumaPanel(Place, frozen=True, kw_only=True):
    """One NUMA node with what is in it."""

    node: NumaNode

    @property
    def memory_text(self) -> str:
        """How much memory there is, and huge pages."""
        pools = [f"{pool.total} x {human_bytes(pool.page_bytes)}" for pool in self.node.hugepages if pool.total]
        return f"{human_bytes(self.node.memory_bytes)}{'; huge ' + ', '.join(pools) if pools else ''}"


class MachineLayout(Struct, frozen=True, kw_only=True):
    """One machine as it is drawn."""

    node: str
    generation: int
    """Of the machine."""
    summary: str
    """What the machine has, in one line."""
    sockets: tuple[tuple[NumaPanel, ...], ...]
    """NUMA nodes that have CPUs or devices, by socket and id: those of one socket together. Nodes
    whose socket the machine does not show come first."""
    elsewhere: Place | None
    """CPUs and devices whose NUMA node the machine does not show; None: there are none."""
    memory_only: str
    """NUMA nodes that have neither CPUs nor devices, in words; empty when there are none."""
    holders: DrawnHolders
    distances: str
    """NUMA distances in words; empty when there is one node, or the machine does not show them."""
    warnings: tuple[str, ...]

    @property
    def panels(self) -> tuple[NumaPanel, ...]:
        """All NUMA nodes that are drawn, by id."""
        return tuple(sorted((panel for panels in self.sockets for panel in panels), key=lambda panel: panel.node.id))


def layout_of(
    machine: Machine,
    inventories: Iterable[Inventory] = (),
    ledger: Holders | None = None,
    *,
    letters: Mapping[str, str] | None = None,
    names: PciNames | None = None,
) -> MachineLayout:
    """Lay out one machine.

    Without inventories the PCI functions are drawn by their `names`, or ids where they have none.

    Order: NUMA nodes by socket and id, cores by level-3 cache and number, devices by root complex,
            switch, class and name, holders by key. Owners keep the letters that they had
            (`letters`, by key). Others get one of their names.
    """
    all_inventories = tuple(inventories)
    holders = holders_of(ledger, letters)
    leaves = leaves_of(machine, all_inventories, names)
    sick_cpus = _sick_cpus(all_inventories)
    cpus_by_node = _cpus_by_node(machine)
    with_devices = {leaf.numa_node for leaf in leaves}
    drawn = [node for node in machine.numa_nodes if node.cpus or node.id in with_devices or cpus_by_node.get(node.id)]
    panels = {
        node.id: _of_node(
            node,
            _panel(
                machine,
                node.id,
                cpus_by_node.get(node.id, ()),
                [leaf for leaf in leaves if leaf.numa_node == node.id],
                holders,
                sick_cpus,
            ),
        )
        for node in drawn
    }
    lost_cpus = [cpu for node, cpus in cpus_by_node.items() if node not in panels for cpu in cpus]
    lost_leaves = [leaf for leaf in leaves if leaf.numa_node is None or leaf.numa_node not in panels]
    warnings = [(inventory.device_class, warning) for inventory in all_inventories for warning in inventory.warnings]
    by_socket: dict[int, list[NumaPanel]] = {}
    for panel in panels.values():
        by_socket.setdefault(next(iter(panel.sockets), -1), []).append(panel)
    return MachineLayout(
        node=machine.node,
        generation=machine.generation,
        summary=_summary(machine, all_inventories),
        sockets=tuple(tuple(by_socket[socket]) for socket in sorted(by_socket)),
        elsewhere=_panel(machine, None, lost_cpus, lost_leaves, holders, sick_cpus)
        if lost_cpus or lost_leaves
        else None,
        memory_only=_memory_only([node for node in machine.numa_nodes if node.id not in panels]),
        holders=holders,
        distances=_distances(machine),
        warnings=(*machine.warnings, *map(": ".join, warnings)),
    )


def human_bytes(count: int) -> str:
    """Write an amount of memory in binary units.

    >>> human_bytes(137438953472), human_bytes(0), human_bytes(1536), human_bytes(2**41)
    ('128 GiB', '0 B', '1.5 KiB', '2 TiB')
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def _cpus_by_node(machine: Machine) -> dict[int | None, tuple[Cpu, ...]]:
    """Group the online CPUs.

    CPUs whose node the machine does not report, or whose node is offline, are under None.
    """
    cpus_by_node: dict[int | None, list[Cpu]] = {}
    for cpu in machine.cpus:
        if cpu.online:
            cpus_by_node.setdefault(cpu.numa_node, []).append(cpu)
    return {node: tuple(cpus) for node, cpus in cpus_by_node.items()}


def _sockets(cpus: Iterable[Cpu]) -> tuple[int, ...]:
    return tuple(sorted({cpu.socket for cpu in cpus if cpu.socket is not None}))


def _sick_cpus(inventories: Iterable[Inventory]) -> frozenset[int]:
    return frozenset(
        device.cpu
        for inventory in inventories
        if inventory.device_class == CPU_CLASS
        for device in inventory.devices
        if device.cpu is not None and not device.is_allocatable
    )


def _summary(machine: Machine, inventories: Sequence[Inventory]) -> str:
    cpus = [cpu for cpu in machine.cpus if cpu.online]
    sockets = len(_sockets(cpus))
    offline = len(machine.cpus) - len(cpus)
    parts = [
        _count(sockets, "socket") if sockets else "",
        _count(len(machine.numa_nodes), "NUMA node"),
        _count(len(cpus), "CPU") + (f" ({offline} offline)" if offline else ""),
        human_bytes(sum(node.memory_bytes for node in machine.numa_nodes)),
        *(
            f"{len(inventory.devices)} {inventory.device_class}"
            for inventory in inventories
            if inventory.devices and inventory.device_class != CPU_CLASS
        ),
    ]
    return ", ".join(part for part in parts if part)


def _panel(
    machine: Machine,
    node: int | None,
    cpus: Sequence[Cpu],
    leaves: Sequence[Leaf],
    holders: DrawnHolders,
    sick: frozenset[int],
) -> Place:
    cores = [tuple(group) for _, group in groupby(sorted(cpus, key=_core_key), key=_core_key)]
    return Place(
        sockets=_sockets(cpus),
        cpu_count=len(cpus),
        free_cpu_count=sum(1 for cpu in cpus if cpu.id not in holders.by_cpu and cpu.id not in sick),
        cores=tuple(_core(core, holders, sick) for core in cores),
        caches=_caches(machine, node, cores),
        roots=_roots(leaves),
    )


def _of_node(node: NumaNode, place: Place) -> NumaPanel:
    return NumaPanel(node=node, **{name: getattr(place, name) for name in place.__struct_fields__})


def _core_key(cpu: Cpu) -> tuple[int, int]:
    """Order by level-3 cache, then by core, so that cores that share a cache are adjacent."""
    core = cpu.core if cpu.core is not None else cpu.id
    return (cpu.l3 if cpu.l3 is not None else -1), core


def _caches(machine: Machine, node: int | None, cores: Sequence[Sequence[Cpu]]) -> str:
    """Write which level-3 caches the cores of a node have.

    A cache that CPUs of other nodes also share is marked as shared with them.
    """
    sizes = {cache.cpu: cache.size_bytes for cache in machine.l3_caches}
    caches = Counter(core[0].l3 for core in cores if core[0].l3 is not None)
    if not caches:
        return ""
    kinds = Counter((sizes.get(cache, 0), count) for cache, count in caches.items())
    parts = [
        f"{f'{number} x ' if number > 1 else ''}{human_bytes(size) if size else '?'}"
        + (f" for {_count(count, 'core')}{' each' if number > 1 else ''}" if len(caches) > 1 else "")
        for (size, count), number in sorted(kinds.items(), reverse=True)
    ]
    others = sorted({cpu.numa_node for cpu in machine.cpus if cpu.l3 in caches and cpu.numa_node not in (None, node)})
    shared = f", shared with node{'s' if len(others) > 1 else ''} {','.join(map(str, others))}" if others else ""
    return f"{' + '.join(parts)}{shared}"


def _core(core: Sequence[Cpu], holders: DrawnHolders, sick: frozenset[int]) -> DrawnCore:
    cpus, l3 = CpuSet.of(cpu.id for cpu in core), core[0].l3
    if any(cpu.id in sick for cpu in core):
        return DrawnCore(cpus=cpus, sign="!", is_sick=True, l3=l3)
    held = [holders.by_cpu[cpu.id] for cpu in core if cpu.id in holders.by_cpu]
    if not held:
        return DrawnCore(cpus=cpus, sign="·", l3=l3)
    if len({holder.allocation.owner.key for holder in held}) > 1:
        return DrawnCore(cpus=cpus, sign="*", l3=l3)
    letter = held[0].letter
    return DrawnCore(cpus=cpus, sign=letter if len(held) == len(core) else letter.lower(), holder=held[0], l3=l3)


def _roots(leaves: Iterable[Leaf]) -> tuple[RootBranch, ...]:
    return tuple(
        RootBranch(
            root=root,
            switches=tuple(
                SwitchBranch(switch=switch, leaves=tuple(group))
                for switch, group in groupby(under_root, key=lambda leaf: leaf.switch)
            ),
        )
        for root, under_root in groupby(leaves, key=lambda leaf: leaf.root)
    )


def _memory_only(nodes: Sequence[NumaNode]) -> str:
    if not nodes:
        return ""
    total = human_bytes(sum(node.memory_bytes for node in nodes))
    if len(nodes) == 1:
        return f"memory-only NUMA node {nodes[0].id}: {total}"
    return f"memory-only NUMA nodes {NodeSet.of(node.id for node in nodes)}: {_count(len(nodes), 'node')}, {total}"


def _distances(machine: Machine) -> str:
    remote = sorted({distance for row in machine.distances for distance in row if distance != 10})
    if not remote:
        return ""
    span = f"{remote[0]}" if len(remote) == 1 else f"{remote[0]} to {remote[-1]}"
    return f"NUMA distance 10 local, {span} to others"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
