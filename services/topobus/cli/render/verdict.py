"""Renders why a pod has no node: the verdict in one sentence, nodes by what keeps the pod off them,
and the smallest changes. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from topobus.cli.render.answers import reason_lines
from topobus.cli.render.grids import marked_line, plain_table
from topobus.values.cluster_answers import Holder, NodeGroup, Verdict
from topobus.values.node_text import first_of

__all__ = ["verdict_view"]

_SHOWN_HOLDERS = 6
_SHOWN_DEVICES = 4


def verdict_view(verdict: Verdict) -> RenderableType:
    """Show a verdict on one screen."""
    style = "ok" if verdict.code in ("scheduled", "fits", "allocated") else "fail"
    return Group(Text(verdict.message, style), *_parts(verdict))


def _parts(verdict: Verdict) -> Iterator[RenderableType]:
    reasons = [reason for reason in verdict.reasons if not verdict.message.endswith(reason.message)]
    if reasons:
        yield from (Text("reasons", "title"), *reason_lines(reasons))
    if verdict.groups:
        yield _group_table(verdict.groups)
    holders = [holder for group in verdict.groups for holder in group.holders][:_SHOWN_HOLDERS]
    if holders:
        yield _holder_table(holders)
    if verdict.changes:
        yield Text("what helps, each tried by a search", "title")
        for number, change in enumerate(verdict.changes, start=1):
            yield marked_line(f"{number}.", change.message)
    elif verdict.code in ("not-ready", "invalid", "no-node-fits"):
        yield Text("no change was found that helps", "faint")
    if verdict.remarks:
        yield Text("what this rests on", "title")
        for remark in verdict.remarks:
            yield marked_line("-", remark.message)


def _group_table(groups: tuple[NodeGroup, ...]) -> Table:
    table = plain_table()
    table.add_column("nodes", justify="right")
    table.add_column("such as", style="name")
    table.add_column("why not", overflow="fold")
    for group in groups:
        table.add_row(str(group.count), group.nodes[0], group.message)
    return table


def _holder_table(holders: list[Holder]) -> Table:
    table = plain_table("node", "held by claim", "of pod", "devices")
    for holder in holders:
        devices = first_of(sorted(holder.devices), _SHOWN_DEVICES)
        table.add_row(holder.node, holder.claim, ", ".join(holder.pods) or "-", devices)
    return table
