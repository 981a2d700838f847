"""`topobus nodeallocationstates`: allocatable, allocated and prepared devices of each node, as classic DRA drivers kept them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from cyclopts import Parameter
from rich import box
from rich.table import Table
from rich.text import Text

from topobus.cli.exits import ExitCode
from topobus.cli.options import BUS_DEFAULTS, BusOptions, one_of, open_bus
from topobus.contracts.catalogue import INVENTORY, LEDGER, MACHINE
from topobus.contracts.kubernetes.classic_state import node_allocation_state
from topobus.domain.errors import PeerUnavailable

__all__ = ["nodeallocationstates"]


def nodeallocationstates(
    node: Annotated[str | None, Parameter(name="NODE", help="One node. Without it: all.")] = None, /, *, options: BusOptions = BUS_DEFAULTS
) -> int:
    """Show the node allocation state: what each node has, what claims hold of it, and what is prepared."""
    return asyncio.run(_show(node, options))


async def _show(node: str | None, options: BusOptions) -> int:
    output = options.output()
    async with open_bus(options) as bus:
        inventories = [entry.value for entry in await bus.list(INVENTORY)]
        ledgers = {entry.value.node: entry.value for entry in await bus.list(LEDGER)}
        nodes = sorted({entry.value.node for entry in await bus.list(MACHINE)} | {one.node for one in inventories} | ledgers.keys())
    if not nodes:
        raise PeerUnavailable("no node reports anything", next_step="`topobus doctor` tells what is missing")
    chosen = nodes if node is None else [one_of("node", node, nodes)]
    states = [node_allocation_state(one, inventories, ledgers.get(one)) for one in chosen]
    if output.is_json:
        output.document(states[0] if node is not None else {"apiVersion": "v1", "kind": "List", "items": states})
    else:
        output.show(_table(states))
    return ExitCode.OK


def _table(states: list[dict[str, Any]]) -> Table:
    """List nodes with their numbers, and below each node what claims hold."""
    table = Table(box=box.SIMPLE_HEAD, header_style="title")
    for title in ("node", "state", "allocatable", "allocated to claims", "prepared"):
        table.add_column(title, overflow="fold")
    for one in states:
        spec, status = one["spec"], one["status"]
        counts: dict[str, int] = {}
        for device in spec["allocatableDevices"]:
            counts[device["class"]] = counts.get(device["class"], 0) + 1
        allocatable = "\n".join(f"{count} {name}" for name, count in sorted(counts.items()))
        state = Text(status["state"], "ok" if status["state"] == "Ready" else "fail")
        if status.get("reason"):
            state.append(f": {status['reason']}")
        table.add_row(
            Text(one["metadata"]["name"], "name"),
            state,
            allocatable or "-",
            _claims(spec["allocatedClaims"]),
            _claims(spec["preparedClaims"]),
        )
    return table


def _claims(found: dict[str, Any]) -> str:
    lines = [
        f"{one['namespace']}/{one['name']}: {', '.join(name for names in one['devices'].values() for name in names)}"
        for one in found.values()
    ]
    return "\n".join(lines) or "-"
