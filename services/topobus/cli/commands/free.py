"""`topobus free`: what is free in any cluster, of any DRA driver, and how many more of a pod fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from topobus.cli.cluster_questions import SNAPSHOT_DEFAULTS, SnapshotOptions, ask, read_one
from topobus.cli.exits import ExitCode
from topobus.cli.render.grids import plain_table
from topobus.cli.render.output import Output, TextOrJson
from topobus.cli.render.verdict import verdict_view
from topobus.values.cluster_answers import FreeAnswer, FreeRow
from topobus.values.node_text import counted

__all__ = ["free"]

_BY = ("driver", "kind", "model")


def free(
    *,
    by: Annotated[
        tuple[Literal["driver", "kind", "model", "class", "node", "numa"], ...],
        Parameter(help="Tell rows apart by this, one or several. Default: driver, kind and model."),
    ] = (),
    wanted: Annotated[
        Path | None,
        Parameter(
            name="--for", help="A manifest of a pod, a claim or a claim template: how many more of it fit, and where."
        ),
    ] = None,
    output: TextOrJson = "text",
    options: SnapshotOptions = SNAPSHOT_DEFAULTS,
) -> int:
    """List the free devices of any cluster, how many of them lie together, and how many more of a pod
    fit.

    It reads and writes nothing, needs nothing in the cluster, and knows any DRA driver.
    """
    out = Output(is_json=output == "json")
    objects = read_one("count", wanted, out.note) if wanted is not None else []
    chosen = tuple(dict.fromkeys(by)) or _BY
    arguments = ["free", *options.arguments()]
    arguments += [word for name in chosen for word in ("--by", name)] + (["--for"] if objects else [])
    answer = msgspec.convert(ask(arguments, out, objects), FreeAnswer)
    out.document(answer)
    out.show(Group(*_parts(answer, chosen)))
    return ExitCode.OK if wanted is None or any(fit.count for fit in answer.fits) else ExitCode.NO


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
