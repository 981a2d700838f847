"""`topobus size`: what a fleet of so many nodes needs, from measured figures."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter, validators
from rich.table import Table
from rich.text import Text

from topobus.cli.exits import ExitCode
from topobus.cli.options import MachineSource
from topobus.cli.render.grids import plain_table
from topobus.cli.render.output import Output, TextOrJson
from topobus.cli.rules.fleet_size import FleetSize, size_fleet
from topobus.cli.simulation.node import open_machine
from topobus.values.node_text import counted

__all__ = ["size"]


def size(
    *,
    nodes: Annotated[
        int,
        Parameter(
            help="How many nodes the fleet has, 1,000,000 at most.", validator=validators.Number(gte=1, lte=1_000_000)
        ),
    ],
    machine: MachineSource,
    claims_per_hour: Annotated[
        float,
        Parameter(
            help="How many claims the controllers allocate in an hour, over all nodes.",
            validator=validators.Number(gte=0, lte=1_000_000_000),
        ),
    ] = 0.0,
    output: TextOrJson = "text",
) -> int:
    """Show what a fleet of equal nodes needs: memory, processor, disk, messages, the shape of NATS,
    with the page that has each measurement.
    """
    out = Output(is_json=output == "json")
    with open_machine(machine) as opened:
        devices = sum(len(inventory.devices) for inventory in opened.snapshot.inventories)
        for warning in opened.warnings:
            out.note(f"warning: {warning}")
    answer = size_fleet(nodes, max(devices, 1), claims_per_hour)
    out.document(answer)
    out.show(_head(answer), _table(answer))
    return ExitCode.OK


def _head(answer: FleetSize) -> Text:
    regions = f", {answer.regions} regions, each as below" if answer.regions > 1 else ""
    devices = f"{counted(answer.devices, 'device')}{' each' if answer.nodes > 1 else ''}"
    return Text(
        f"{counted(answer.nodes, 'node')} with {devices}, {answer.claims_per_hour:g} claims an hour: "
        f"shape {answer.shape}{regions}",
        "title",
    )


def _table(answer: FleetSize) -> Table:
    table = plain_table("of", "what")
    table.add_column("needs", justify="right")
    for title in ("", "from", ""):
        table.add_column(title)
    for need in answer.needs:
        value = f"{need.value:,.0f}" if need.value >= 10 else f"{need.value:g}"
        page = need.source.rpartition("/")[2].removesuffix(".md")
        table.add_row(need.part, need.what, value, need.unit, page, "extrapolated" if need.is_extrapolated else "")
    return table
