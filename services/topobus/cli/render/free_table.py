"""Renders what is free in a cluster: a table of devices, how many lie together, and how many more of
a pod fit. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from topobus.cli.render.grids import plain_table
from topobus.cli.render.verdict import verdict_view
from topobus.values.cluster_answers import FreeAnswer, FreeRow
from topobus.values.node_text import counted

__all__ = ["free_view"]


def free_view(answer: FreeAnswer, by: Sequence[str]) -> RenderableType:
    """Show the devices by the groupings asked for, then how many pods fit."""
    return Group(*_parts(answer, by))


def _parts(answer: FreeAnswer, by: Sequence[str]) -> Iterator[RenderableType]:
    if not answer.rows:
        yield Text("no node has a device of any driver: there is no ResourceSlice with one, or no Node", "warn")
    else:
        yield _table(answer.rows, by)
    if answer.fits:
        total = sum(fit.count * fit.nodes for fit in answer.fits)
        yield Text(f"{total} more fit", "ok" if total else "fail")
        for fit in answer.fits:
            others = f"each on {fit.such_as[0]} and {counted(fit.nodes - 1, 'other node')}"
            yield Text(f"  {fit.count} {others if fit.nodes > 1 else f'on {fit.such_as[0]}'}")
    if answer.verdict is not None:
        yield verdict_view(answer.verdict)


def _table(rows: Sequence[FreeRow], by: Sequence[str]) -> Table:
    table = plain_table()
    for name in by:
        table.add_column(name, style="name", overflow="fold")
    if "node" not in by:
        table.add_column("nodes", justify="right")
    for title in ("devices", "free"):
        table.add_column(title, justify="right")
    for title in ("the others", "free together"):
        table.add_column(title, overflow="fold")
    has_drawing = any(row.drawing for row in rows) and "node" in by
    if has_drawing:
        table.add_column("□ free ■ held ▨ tainted", overflow="fold")
    for row in rows:
        cells = [row.group[name] or "-" for name in by]
        cells += [] if "node" in by else [str(row.nodes)]
        cells += [str(row.devices), str(row.free), row.others_text, row.together_text]
        table.add_row(*cells, *([row.drawing] if has_drawing else []))
    return table
