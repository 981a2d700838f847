"""Writes the drawing of a machine as text: sockets and NUMA nodes side by side, CPUs as bars, root
complexes, switches and devices, and their holders.

`topobus.engine.drawing` decides the place of each part. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, zip_longest

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from topobus.cli.render.listing import cut, hanging
from topobus.cli.render.output import DRAWING_WIDTH
from topobus.cli.render.styles import HEALTH_STYLES, holder_style
from topobus.engine.drawing.layout import DrawnCore, MachineLayout, NumaPanel, Place, RootBranch, layout_of
from topobus.engine.drawing.leaves import HEALTH_SIGNS, Leaf, PciNames, short_address
from topobus.engine.drawing.letters import DrawnHolders
from topobus.values.device import Inventory
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine

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
    inventories: Iterable[Inventory],
    ledger: Ledger | None,
    *,
    width: int = DRAWING_WIDTH,
    letters: Mapping[str, str] | None = None,
    names: PciNames | None = None,
) -> RenderableType:
    """Draw one machine.

    Without inventories the PCI functions are drawn by their `names`, or ids where they have none.

    Order: by socket and node id. Two sockets make two columns, and where there is room for more
    columns, rows. A wider terminal leaves the rest empty. Letters are those that owners have had
    (`letters`, by key), else of their names.
    """
    all_inventories = tuple(inventories)
    layout = layout_of(machine, all_inventories, ledger, letters=letters, names=names)
    per_row = _columns(len(layout.panels), width)
    panel_width = min(width // per_row, DRAWING_WIDTH if per_row == 1 else _WIDEST_PANEL)
    width = min(width, max(panel_width * per_row, DRAWING_WIDTH))
    grid = Table.grid(padding=0)
    for _ in range(per_row):
        grid.add_column(width=panel_width)
    for row in _rows(layout, per_row):
        grid.add_row(*(_node_panel(panel, layout.holders, panel_width) if panel is not None else "" for panel in row))
    below: list[RenderableType] = []
    if layout.elsewhere is not None:
        body = Text("\n").join(_panel_lines(layout.elsewhere, layout.holders, width - _FRAME))
        below.append(
            Panel(body, title="NUMA node not reported by the machine", title_align="left", box=box.ROUNDED, width=width)
        )
    if layout.memory_only:
        below.append(Text(layout.memory_only))
    # Before the drawing: a reader cannot see what a drawing lacks.
    warnings = [Text(f" warning: {warning}", "warn") for warning in layout.warnings]
    return Group(
        _headline(layout, width), *warnings, grid, *below, *_legend(layout, width, has_signs=bool(all_inventories))
    )


def _columns(nodes: int, width: int) -> int:
    """Choose how many panels are side by side: as many as there is room for, without a row shorter
    than the others.
    """
    if width < 80 or nodes <= 1:
        return 1
    if nodes > _MANY_NODES:
        return max(4, width // _SMALL_PANEL)
    return next((columns for columns in range(min(nodes, width // _PANEL), 2, -1) if nodes % columns == 0), 2)


def _rows(layout: MachineLayout, per_row: int) -> Iterable[tuple[NumaPanel | None, ...]]:
    """Lay out the panels: two sockets side by side, any other number in rows by id."""
    if per_row == 2 and len(layout.sockets) == 2:
        left, right = layout.sockets
        yield from zip_longest(left, right)
        return
    panels = layout.panels
    for start in range(0, len(panels), per_row):
        row: list[NumaPanel | None] = list(panels[start : start + per_row])
        yield tuple(row + [None] * (per_row - len(row)))


def _headline(layout: MachineLayout, width: int) -> Text:
    line = Text.assemble((layout.node or "this machine", "bold"), f"  {layout.summary}")
    line.append(f"  (machine generation {layout.generation})", "faint")
    return cut(line, width)


def _node_panel(panel: NumaPanel, holders: DrawnHolders, panel_width: int) -> Panel:
    lines = _panel_lines(panel, holders, panel_width - _FRAME)
    where = f"{panel.socket_text} · " if panel.socket_text and panel_width > 30 else ""
    return Panel(
        Text("\n").join(lines),
        title=f"{where}NUMA node {panel.node.id}",
        title_align="left",
        box=box.ROUNDED,
        width=panel_width,
        expand=True,
    )


def _panel_lines(panel: Place, holders: DrawnHolders, inner: int) -> list[Text]:
    lines: list[Text] = []
    if panel.cores:
        lines.append(cut(Text(f"cpus    {panel.cpus_text}"), inner))
        lines.extend(_core_bars(panel.cores, [_core_cell(core) for core in panel.cores], inner, indent=len(_LABEL)))
        if panel.caches:
            lines.append(cut(Text(f"L3      {panel.caches}"), inner))
    if isinstance(panel, NumaPanel):
        lines.append(cut(Text(f"{_LABEL}{panel.memory_text}"), inner))
    lines.extend(_tree_lines(panel.roots, holders, inner))
    return lines


def _core_cell(core: DrawnCore) -> tuple[str, str]:
    """Return a core's sign with its style."""
    return core.sign, "fail" if core.is_sick else holder_style(core.holder, "faint" if core.sign == "·" else "bold")


def _tree_lines(roots: Iterable[RootBranch], holders: DrawnHolders, inner: int) -> Iterable[Text]:
    """Draw root complex, switch, device. A level that the machine does not report is left out."""
    for root in roots:
        yield cut(Text(root.title, "title"), inner)
        for place, branch in enumerate(root.switches):
            is_last = place == len(root.switches) - 1
            if not branch.switch:
                for number, leaf in enumerate(branch.leaves):
                    yield _leaf_line(
                        "└─" if is_last and number == len(branch.leaves) - 1 else "├─", leaf, holders, inner
                    )
                continue
            yield cut(Text(f"{'└─' if is_last else '├─'} switch {short_address(branch.switch)}"), inner)
            stem = "   " if is_last else "│  "
            for number, leaf in enumerate(branch.leaves):
                yield _leaf_line(stem + ("└─" if number == len(branch.leaves) - 1 else "├─"), leaf, holders, inner)


def _leaf_line(stem: str, leaf: Leaf, holders: DrawnHolders, inner: int) -> Text:
    holder = holders.by_device.get((leaf.device_class, leaf.name))
    style = HEALTH_STYLES[leaf.health] or holder_style(holder)
    line = Text(f"{stem} ")
    line.append(holder.letter if holder else "·", holder_style(holder, "faint"))
    line.append(HEALTH_SIGNS[leaf.health], HEALTH_STYLES[leaf.health])
    line.append(leaf.name, style)
    line.append(f" {leaf.text}", HEALTH_STYLES[leaf.health] or "faint")
    sharers = holders.sharers.get((leaf.device_class, leaf.name), ())
    if len(sharers) > 1:
        line.append(f" shared by {''.join(sharer.letter for sharer, _ in sharers)}", holder_style(holder, "faint"))
    return cut(line, inner)


def _legend(layout: MachineLayout, width: int, *, has_signs: bool) -> Iterable[RenderableType]:
    for holder in layout.holders.all:
        style = holder_style(holder)
        yield from hanging(
            Text.assemble((f" {holder.letter} ", style)),
            Text.assemble((holder.name, style), f"  {holder.held_text}"),
            width,
        )
    signs = ["· free", "! unhealthy", "? unknown", "r recovering", "~ degraded"]
    if layout.holders.by_cpu:
        signs.append("small letter: one thread of the core")
    if has_signs:
        yield from _signs(signs, width)
    if layout.distances:
        yield from hanging(Text(" "), Text(layout.distances, "faint"), width)


def _signs(signs: Iterable[str], width: int) -> Iterable[Text]:
    """Write the meaning of the signs, each on one line."""
    line = ""
    for sign in signs:
        if line and len(line) + 2 + len(sign) > width:
            yield cut(Text(line, "faint"), width)
            line = ""
        line += f"{'  ' if line else ' '}{sign}"
    yield cut(Text(line, "faint"), width)


_Cell = tuple[str, str]
"""A sign and its style."""

_ROWS = 2
# With gaps between caches a bar may be higher: 12 caches of 8 cores on one node, as large EPYCs
# have, are three rows of a narrow panel.
_ROWS_WITH_GAPS = 4
_FREE = "·"


def _core_bars(cores: Sequence[DrawnCore], cells: Sequence[_Cell], width: int, *, indent: int) -> Iterable[Text]:
    """Draw one sign per core, cores of one level-3 cache together.

    When they do not fit into the rows, one sign covers several cores, and there are no gaps.

    Shapes: cells — one per core.
    """
    room = width - indent
    groups = [
        [cell for _, cell in group] for _, group in groupby(zip(cores, cells, strict=True), key=lambda pair: pair[0].l3)
    ]
    rows = _rows_of_groups(groups, room)
    if len(groups) > 1 and 0 < len(rows) <= _ROWS_WITH_GAPS:
        for row in rows:
            yield Text(" " * indent) + Text(" ").join(_run(group) for group in row)
        return
    scale = -(-len(cells) // (room * _ROWS))
    merged = [_merged(cells[start : start + scale]) for start in range(0, len(cells), scale)]
    length = -(-len(merged) // -(-len(merged) // room))
    for start in range(0, len(merged), length):
        yield Text(" " * indent) + _run(merged[start : start + length])
    if scale > 1:
        yield Text(f"{' ' * indent}({scale} cores a sign)", "faint")


def _rows_of_groups(groups: Sequence[Sequence[_Cell]], room: int) -> list[list[Sequence[_Cell]]]:
    """Lay whole groups into rows, evenly. Empty when one is longer than a row."""
    longest = max(map(len, groups))
    if longest > room:
        return []
    fitting = max((room + 1) // (longest + 1), 1)
    number = -(-len(groups) // fitting)
    length = -(-len(groups) // number)
    return [list(groups[start : start + length]) for start in range(0, len(groups), length)]


def _run(cells: Sequence[_Cell]) -> Text:
    runs = [(len(tuple(same)), cell) for cell, same in groupby(cells)]
    return Text.assemble(*((sign * count, style) for count, (sign, style) in runs))


def _merged(cells: Sequence[_Cell]) -> _Cell:
    """Return the most frequent sign that is not free."""
    taken = [cell for cell in cells if cell[0] != _FREE]
    return Counter(taken).most_common(1)[0][0] if taken else cells[0]
