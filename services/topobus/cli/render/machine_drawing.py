"""Draws a machine: sockets and NUMA nodes side by side, CPUs as bars, root complexes, switches and devices, and their holders.

Flows in: Machine, Inventories, Ledger. Flows out: a rich renderable at most `width` columns wide. Pure. Letters and signs carry everything that
colour shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, zip_longest

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from topobus.cli.pci_names import PciIds
from topobus.cli.render.byte_sizes import human_bytes
from topobus.cli.render.core_bars import core_bars, l3_line
from topobus.cli.render.holders import Holder, Holders, holders_of
from topobus.cli.render.leaves import (
    HEALTH_SIGNS,
    HEALTH_STYLES,
    Leaf,
    leaves_of,
    short_address,
)
from topobus.cli.render.output import DRAWING_WIDTH
from topobus.domain.device import Inventory
from topobus.domain.idset import NodeSet
from topobus.domain.ledger import Ledger
from topobus.domain.machine import Cpu, Machine, NumaNode

__all__ = ["draw_machine"]

# More CPU nodes than this are drawn four abreast and without room for models.
_MANY_NODES = 8
# Columns for a panel: with room for models, without it, and the most that any text needs.
_PANEL = 46
_SMALL_PANEL = 25
_WIDEST_PANEL = 72
# Border and padding of a panel, both sides.
_FRAME = 4
_LABEL = "memory  "


def draw_machine(
    machine: Machine,
    inventories: Iterable[Inventory] = (),
    ledger: Ledger | None = None,
    *,
    width: int = DRAWING_WIDTH,
    letters: Mapping[str, str] | None = None,
    names: Mapping[PciIds, str] | None = None,
) -> RenderableType:
    """Draw one machine; without inventories the PCI functions are drawn by their `names`, or ids where they have none.

    Order: by socket and node id; two sockets make two columns, and where there is room for more columns, rows. What a wide terminal has beyond that stays empty.
    Letters are those that owners have had (`letters`, by key), else of their names.
    """
    all_inventories = tuple(inventories)
    holders = holders_of(ledger, letters)
    leaves = leaves_of(machine, all_inventories, names)
    sick_cpus = _sick_cpus(all_inventories)
    cpus_by_node = _cpus_by_node(machine)
    with_devices = {leaf.numa_node for leaf in leaves}
    drawn = [node for node in machine.numa_nodes if node.cpus or node.id in with_devices or cpus_by_node.get(node.id)]
    per_row = _columns(len(drawn), width)
    panel_width = min(width // per_row, DRAWING_WIDTH if per_row == 1 else _WIDEST_PANEL)
    width = min(width, max(panel_width * per_row, DRAWING_WIDTH))
    panels = {
        node.id: _node_panel(
            node,
            machine,
            cpus_by_node.get(node.id, ()),
            [leaf for leaf in leaves if leaf.numa_node == node.id],
            holders,
            sick_cpus,
            panel_width,
        )
        for node in drawn
    }
    grid = Table.grid(padding=0)
    for _ in range(per_row):
        grid.add_column(width=panel_width)
    for row in _rows(drawn, cpus_by_node, per_row):
        grid.add_row(*(panels[node.id] if node is not None else "" for node in row))
    homeless = [leaf for leaf in leaves if leaf.numa_node is None or leaf.numa_node not in panels]
    below: list[RenderableType] = []
    if homeless:
        body = Text("\n").join(_tree_lines(homeless, holders, width - _FRAME))
        below.append(Panel(body, title="NUMA node not told by the machine", title_align="left", box=box.ROUNDED, width=width))
    memory_only = [node for node in machine.numa_nodes if node.id not in panels]
    if memory_only:
        total = human_bytes(sum(node.memory_bytes for node in memory_only))
        below.append(Text(f"memory-only NUMA nodes {NodeSet.of(node.id for node in memory_only)}: {len(memory_only)} nodes, {total}"))
    return Group(_headline(machine, all_inventories, width), grid, *below, *_legend(machine, holders, all_inventories, width))


def _columns(nodes: int, width: int) -> int:
    """Choose how many panels stand side by side: as many as there is room for, and no row shorter than the others."""
    if width < 80 or nodes <= 1:
        return 1
    if nodes > _MANY_NODES:
        return max(4, width // _SMALL_PANEL)
    return next((columns for columns in range(min(nodes, width // _PANEL), 2, -1) if nodes % columns == 0), 2)


def _cpus_by_node(machine: Machine) -> dict[int, tuple[Cpu, ...]]:
    found_cpus: dict[int, list[Cpu]] = {}
    only = machine.numa_nodes[0].id if len(machine.numa_nodes) == 1 else None
    for cpu in machine.cpus:
        node = cpu.numa_node if cpu.numa_node is not None else only
        if node is not None and cpu.online:
            found_cpus.setdefault(node, []).append(cpu)
    return {node: tuple(cpus) for node, cpus in found_cpus.items()}


def _rows(nodes: Sequence[NumaNode], cpus: dict[int, tuple[Cpu, ...]], per_row: int) -> Iterable[tuple[NumaNode | None, ...]]:
    """Lay out the panels: two sockets stand side by side, anything else flows by id."""
    sockets: dict[int, list[NumaNode]] = {}
    for node in nodes:
        socket = next(iter(_sockets(cpus.get(node.id, ()))), -1)
        sockets.setdefault(socket, []).append(node)
    if per_row == 2 and len(sockets) == 2:
        left, right = (sockets[key] for key in sorted(sockets))
        yield from zip_longest(left, right)
        return
    for start in range(0, len(nodes), per_row):
        row: list[NumaNode | None] = list(nodes[start : start + per_row])
        yield tuple(row + [None] * (per_row - len(row)))


def _sockets(cpus: Iterable[Cpu]) -> list[int]:
    return sorted({cpu.socket for cpu in cpus if cpu.socket is not None})


def _sick_cpus(inventories: Iterable[Inventory]) -> frozenset[int]:
    return frozenset(
        device.cpu
        for inventory in inventories
        if inventory.device_class == "cpu"
        for device in inventory.devices
        if device.cpu is not None and not device.is_allocatable
    )


def _headline(machine: Machine, inventories: Sequence[Inventory], width: int) -> Text:
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
            if inventory.devices and inventory.device_class != "cpu"
        ),
    ]
    line = Text.assemble((machine.node or "this machine", "bold"), "  ", ", ".join(part for part in parts if part))
    line.append(f"  (machine generation {machine.generation})", "faint")
    line.truncate(width, overflow="ellipsis")
    return line


def _node_panel(
    node: NumaNode,
    machine: Machine,
    cpus: Sequence[Cpu],
    leaves: Sequence[Leaf],
    holders: Holders,
    sick: frozenset[int],
    panel_width: int,
) -> Panel:
    inner = panel_width - _FRAME
    lines: list[Text] = []
    if cpus:
        cores = [tuple(group) for _, group in groupby(sorted(cpus, key=_core_key), key=_core_key)]
        free = sum(1 for cpu in cpus if cpu.id not in holders.by_cpu and cpu.id not in sick)
        threads = len(cpus) // len(cores) if len(cpus) % len(cores) == 0 else 0
        shape = f"{_count(len(cores), 'core')}{f' x {threads}' if threads > 1 else ''}"
        lines.append(_fit(Text(f"cpus    {len(cpus)} ({shape}), {free} free"), inner))
        lines.extend(core_bars(cores, [_core_cell(core, holders, sick) for core in cores], inner, indent=len(_LABEL)))
        caches = l3_line(machine, cores)
        if caches:
            lines.append(_fit(Text(f"L3      {caches}"), inner))
    pools = [f"{pool.total} x {human_bytes(pool.page_bytes)}" for pool in node.hugepages if pool.total]
    lines.append(_fit(Text(f"{_LABEL}{human_bytes(node.memory_bytes)}{'; huge ' + ', '.join(pools) if pools else ''}"), inner))
    lines.extend(_tree_lines(leaves, holders, inner))
    sockets = _sockets(cpus)
    where = f"socket {','.join(map(str, sockets))} · " if sockets and panel_width > 30 else ""
    return Panel(
        Text("\n").join(lines), title=f"{where}NUMA node {node.id}", title_align="left", box=box.ROUNDED, width=panel_width, expand=True
    )


def _core_key(cpu: Cpu) -> tuple[int, int]:
    """Order by level-3 cache, then by core: what shares a cache stands together."""
    core = cpu.core if cpu.core is not None else cpu.id
    return (cpu.l3 if cpu.l3 is not None else -1), core


def _core_cell(core: Sequence[Cpu], holders: Holders, sick: frozenset[int]) -> tuple[str, str]:
    """One sign for one core: the owner's letter, small when a thread is free, `*` for two owners, `!` when sick."""
    if any(cpu.id in sick for cpu in core):
        return "!", "fail"
    held: list[Holder] = [holders.by_cpu[cpu.id] for cpu in core if cpu.id in holders.by_cpu]
    if not held:
        return "·", "faint"
    if len({holder.allocation.owner.key for holder in held}) > 1:
        return "*", "bold"
    letter = held[0].letter
    return (letter if len(held) == len(core) else letter.lower()), held[0].style


def _tree_lines(leaves: Sequence[Leaf], holders: Holders, inner: int) -> Iterable[Text]:
    """Draw root complex, switch, device; a level that the machine does not tell is left out."""
    for root, under_root in groupby(leaves, key=lambda leaf: leaf.root):
        yield _fit(Text(f"root complex {root.removeprefix('pci')}" if root else "no PCI address", "title"), inner)
        branches = [(switch, list(group)) for switch, group in groupby(under_root, key=lambda leaf: leaf.switch)]
        for place, (switch, group) in enumerate(branches):
            is_last = place == len(branches) - 1
            if not switch:
                for number, leaf in enumerate(group):
                    yield _leaf_line("└─" if is_last and number == len(group) - 1 else "├─", leaf, holders, inner)
                continue
            yield _fit(Text(f"{'└─' if is_last else '├─'} switch {short_address(switch)}"), inner)
            stem = "   " if is_last else "│  "
            for number, leaf in enumerate(group):
                yield _leaf_line(stem + ("└─" if number == len(group) - 1 else "├─"), leaf, holders, inner)


def _leaf_line(stem: str, leaf: Leaf, holders: Holders, inner: int) -> Text:
    holder = holders.by_device.get((leaf.device_class, leaf.name))
    style = HEALTH_STYLES[leaf.health] or (holder.style if holder else "")
    line = Text(f"{stem} ")
    line.append(holder.letter if holder else "·", holder.style if holder else "faint")
    line.append(HEALTH_SIGNS[leaf.health], HEALTH_STYLES[leaf.health])
    line.append(leaf.name, style)
    line.append(f" {leaf.text}", HEALTH_STYLES[leaf.health] or "faint")
    sharers = holders.sharers.get((leaf.device_class, leaf.name), ())
    if len(sharers) > 1:
        line.append(f" shared by {''.join(sharer.letter for sharer, _ in sharers)}", holder.style if holder else "faint")
    return _fit(line, inner)


def _legend(machine: Machine, holders: Holders, inventories: Sequence[Inventory], width: int) -> Iterable[RenderableType]:
    for holder in holders.all:
        held = [f"{len(names)} {device_class}" for device_class, names in holder.devices.items() if device_class != "cpu"]
        cpus = holder.cpus
        if cpus:
            held.append(f"{len(cpus)} cpus {cpus}")
        line = Text.assemble((f" {holder.letter} ", holder.style), (holder.name, holder.style), f"  {', '.join(held) or 'nothing'}")
        yield _fit(line, width)
    signs = "· free  ! unhealthy  ? unknown  r recovering  ~ degraded"
    if holders.by_cpu:
        signs += "  small letter: one thread of the core"
    if inventories:
        yield _fit(Text(f" {signs}", "faint"), width)
    remote = sorted({distance for row in machine.distances for distance in row if distance != 10})
    if remote:
        span = f"{remote[0]}" if len(remote) == 1 else f"{remote[0]} to {remote[-1]}"
        yield _fit(Text(f" NUMA distance 10 local, {span} to others", "faint"), width)
    for warning in (
        *machine.warnings,
        *(f"{inventory.device_class}: {warning}" for inventory in inventories for warning in inventory.warnings),
    ):
        yield Text(f" warning: {warning}", "warn")


def _fit(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
