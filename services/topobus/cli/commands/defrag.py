"""`topobus defrag`: which pods would have to move so that one more fits, and their eviction."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.text import Text

from topobus.cli.cluster_questions import SNAPSHOT_DEFAULTS, SnapshotOptions, ask, read_one
from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.render.grids import plain_table
from topobus.cli.render.output import Output, TextOrJson
from topobus.values.cluster_answers import Evictions, MovePlan
from topobus.values.node_text import counted

__all__ = ["defrag"]


def defrag(
    *,
    wanted: Annotated[
        Path, Parameter(name="--for", help="A manifest of the pod, the claim or the claim template that is to fit.")
    ],
    evict: Annotated[
        bool, Parameter(help="Evict these pods one by one, by the eviction API. It stops when the cluster has changed.")
    ] = False,
    output: TextOrJson = "text",
    options: SnapshotOptions = SNAPSHOT_DEFAULTS,
) -> int:
    """Show the fewest pods that would have to move so that one more pod fits.

    Only pods that their owner replaces, that fit elsewhere, and whose disruption budget allows it
    are moved. Without --evict it writes nothing.
    """
    if evict and options.snapshot is not None:
        raise UsageError(
            "got --evict and --snapshot, wanted one of them", next_step="a file has no pods to evict: leave it out"
        )
    out = Output(is_json=output == "json")
    objects = read_one("make room for", wanted, out.note)
    arguments = ["defrag", *options.arguments(), *(["--evict"] if evict else [])]
    answer = ask(arguments, out, objects)
    out.document(answer)
    if not evict:
        plan = msgspec.convert(answer, MovePlan)
        _show_plan(out, plan)
        return ExitCode.OK if plan.node else ExitCode.NO
    evictions = msgspec.convert(answer, Evictions)
    _show_plan(out, evictions.plan)
    for move in evictions.evicted:
        out.show(Text(f"evicted pod {move.namespace}/{move.name}"))
    out.show(Text(evictions.stopped, "fail") if evictions.stopped else Text("it fits now", "ok"))
    return ExitCode.NO if evictions.stopped else ExitCode.OK


def _show_plan(out: Output, plan: MovePlan) -> None:
    if not plan.node:
        out.show(Text("no pods were found that could move so that it fits, and fit elsewhere themselves", "fail"))
        out.show(Text(plan.why))
    elif not plan.moves:
        out.show(Text(f"it fits on node {plan.node}, and no pod has to move", "ok"))
    else:
        verb = "moves" if len(plan.moves) == 1 else "move"
        out.show(Text(f"it fits on node {plan.node} once {counted(len(plan.moves), 'pod')} {verb}", "ok"))
        table = plain_table("pod", "owner", "priority", "fits on")
        for move in plan.moves:
            table.add_row(f"{move.namespace}/{move.name}", move.owner, str(move.priority), move.to)
        out.show(table)
    for why, count in plan.kept.items():
        out.show(Text(f"kept: {counted(count, 'pod')}, {why}", "faint"))
    if not plan.is_complete:
        out.show(Text("not all sets of pods were tried: a smaller one may exist", "warn"))
