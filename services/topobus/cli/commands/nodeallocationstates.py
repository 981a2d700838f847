"""`topobus nodeallocationstates`: allocatable, allocated and prepared devices of each node, in the form that classic DRA drivers kept."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import yaml
from cyclopts import Parameter
from rich import box
from rich.table import Table
from rich.text import Text

from topobus.cli.exits import ExitCode
from topobus.cli.options import BUS_DEFAULTS, BusOptions, one_of, open_bus
from topobus.cli.render.output import Output
from topobus.contracts.catalogue import INVENTORY, LEDGER, MACHINE
from topobus.domain.errors import PeerUnavailable
from topobus.kubernetes.api.classic_state import node_allocation_state

__all__ = ["nodeallocationstates", "show_states"]


def nodeallocationstates(
    node: Annotated[str | None, Parameter(name="NODE", help="One node. Without it: all.")] = None, /, *, options: BusOptions = BUS_DEFAULTS
) -> int:
    """Show the node allocation state: what each node has, what claims hold of it, and what is prepared."""
    return asyncio.run(show_states((node,) if node is not None else (), "json" if options.json else "table", options))


async def show_states(names: tuple[str, ...], form: str, options: BusOptions) -> int:
    """Show the states of these nodes, or of all, in a form of `topobus get`."""
    async with open_bus(options) as bus:
        inventories = [entry.value for entry in await bus.list(INVENTORY)]
        ledgers = {entry.value.node: entry.value for entry in await bus.list(LEDGER)}
        nodes = sorted(
            {entry.value.node for entry in await bus.list(MACHINE)} | {inventory.node for inventory in inventories} | ledgers.keys()
        )
    if not nodes:
        raise PeerUnavailable("no node reports anything", next_step="`topobus doctor` tells what is missing")
    chosen = [one_of("node", name, nodes) for name in names] or nodes
    states = [node_allocation_state(node, inventories, ledgers.get(node)) for node in chosen]
    document = states[0] if len(names) == 1 else {"apiVersion": "v1", "kind": "List", "items": states}
    match form:
        case "json":
            Output(is_json=True).document(document)
        case "yaml":
            print(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120), end="")
        case "name":
            for name in chosen:
                print(f"nodeallocationstate/{name}")
        case _:
            options.output().show(_table(states))
    return ExitCode.OK


def _table(states: list[dict[str, Any]]) -> Table:
    """List nodes with their numbers, and below each node what claims hold."""
    table = Table(box=box.SIMPLE_HEAD, header_style="title")
    for title in ("node", "state", "allocatable", "allocated to claims", "prepared"):
        table.add_column(title, overflow="fold")
    for other_state in states:
        spec, status = other_state["spec"], other_state["status"]
        counts: dict[str, int] = {}
        for device in spec["allocatableDevices"]:
            counts[device["class"]] = counts.get(device["class"], 0) + 1
        allocatable = "\n".join(f"{count} {name}" for name, count in sorted(counts.items()))
        state = Text(status["state"], "ok" if status["state"] == "Ready" else "fail")
        if status.get("reason"):
            state.append(f": {status['reason']}")
        table.add_row(
            Text(other_state["metadata"]["name"], "name"),
            state,
            allocatable or "-",
            _claims(spec["allocatedClaims"]),
            _claims(spec["preparedClaims"]),
        )
    return table


def _claims(claims: dict[str, Any]) -> str:
    lines = [
        f"{claim['namespace']}/{claim['name']}: {', '.join(name for names in claim['devices'].values() for name in names)}"
        for claim in claims.values()
    ]
    return "\n".join(lines) or "-"
