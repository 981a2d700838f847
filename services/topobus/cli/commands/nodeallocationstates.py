"""`topobus get nodeallocationstates`: allocatable, allocated and prepared devices of each node, in the
form that classic DRA drivers kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from topobus.bus.bus import Bus
from topobus.cli.exits import ExitCode
from topobus.cli.listing.fleet_inventories import list_inventories
from topobus.cli.listing.list_options import Lister
from topobus.cli.options import BusOptions, one_of, open_bus
from topobus.cli.render.listing import Column, Fit, Listing, Row
from topobus.engine.ledger.classic_state import node_allocation_state
from topobus.formats.messages.catalogue import INVENTORY, LEDGER, MACHINE
from topobus.values.errors import PeerUnavailable

__all__ = ["show_states", "states_listing"]


async def show_states(names: tuple[str, ...], lister: Lister, options: BusOptions) -> int:
    """Show what each of these nodes, or of all, has, what claims hold of it, and what is prepared."""
    async with open_bus(options) as bus:

        async def collect() -> list[Listing]:
            return [states_listing(await _states(bus, names))]

        if lister.options.watch:
            return await lister.follow(bus, [(INVENTORY, {}), (LEDGER, {})], collect)
        listings = await collect()

    def document(rows: Sequence[Row]) -> Any:
        states = [row.document for row in rows]
        return states[0] if len(names) == 1 and states else {"apiVersion": "v1", "kind": "List", "items": states}

    lister.show(listings, document, thing="node")
    return ExitCode.OK


async def _states(bus: Bus, names: tuple[str, ...]) -> list[dict[str, Any]]:
    inventories = [entry.value for entry in (await list_inventories(bus))[0]]
    ledgers = {entry.value.node: entry.value for entry in await bus.list(LEDGER)}
    nodes = sorted(
        {entry.value.node for entry in await bus.list(MACHINE)}
        | {inventory.node for inventory in inventories}
        | ledgers.keys()
    )
    if not nodes:
        raise PeerUnavailable("no node reports anything", next_step="`topobus doctor` reports what is missing")
    chosen = [one_of("node", name, nodes) for name in names] or nodes
    return [node_allocation_state(node, inventories, ledgers.get(node)) for node in chosen]


def states_listing(states: Sequence[dict[str, Any]]) -> Listing:
    """List nodes with their numbers and what claims hold."""
    return Listing(
        columns=(
            Column(title="node", fit=Fit.NAME),
            Column(title="state"),
            Column(title="allocatable", fit=Fit.NAME),
            Column(title="allocated to claims"),
            Column(title="prepared"),
            Column(title="not well", fit=Fit.NUMBER, is_wide=True),
        ),
        rows=tuple(map(_row, states)),
    )


def _row(node_state: dict[str, Any]) -> Row:
    spec, status, name = node_state["spec"], node_state["status"], node_state["metadata"]["name"]
    counts: dict[str, int] = {}
    for device in spec["allocatableDevices"]:
        counts[device["class"]] = counts.get(device["class"], 0) + 1
    state = Text(status["state"], "ok" if status["state"] == "Ready" else "fail")
    if status.get("reason"):
        state.append(f": {status['reason']}")
    return Row(
        name=f"nodeallocationstate/{name}",
        cells=(
            Text(name, "name"),
            state,
            "\n".join(f"{count} {device_class}" for device_class, count in sorted(counts.items())) or "-",
            _claims(spec["allocatedClaims"]),
            _claims(spec["preparedClaims"]),
            str(sum(device["health"] != "Healthy" for device in spec["allocatableDevices"])),
        ),
        document=node_state,
        labels={"node": name, "state": str(status["state"])},
    )


def _claims(claims: dict[str, Any]) -> str:
    lines = [
        f"{claim['namespace']}/{claim['name']}: "
        f"{', '.join(name for names in claim['devices'].values() for name in names)}"
        for claim in claims.values()
    ]
    return "\n".join(lines) or "-"
