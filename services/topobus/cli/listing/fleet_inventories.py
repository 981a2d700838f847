"""Reads the inventories of a fleet, names first: a device service may fill its class's bucket with
nodes that do not exist, and a command must not read all of that.

Inventories of nodes with a machine are read, and of few others. The names of the nodes left unread
are returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from topobus.bus.bus import Bus, Entry
from topobus.formats.messages.catalogue import INVENTORY, MACHINE
from topobus.formats.messages.nouns import State
from topobus.values.device import Inventory
from topobus.values.node_text import first_of

__all__ = ["list_inventories", "list_inventories_as", "nodes_without_a_machine", "unread_text"]

M = TypeVar("M")

# Nodes whose discovery is late, or was stopped for a while, are read like others. A larger number
# than this is likely invented.
_MOST_STRANGERS = 16
_AT_ONCE = 8


async def list_inventories(
    bus: Bus, *, on_rejected: Callable[[str, str], None] | None = None
) -> tuple[tuple[Entry[Inventory], ...], tuple[str, ...]]:
    """Read all inventories, sorted by key. If many nodes have no machine, their inventories are
    left out and their names come second, sorted.
    """
    return await list_inventories_as(bus, INVENTORY, on_rejected=on_rejected)


async def list_inventories_as(
    bus: Bus, state: State[M], *, on_rejected: Callable[[str, str], None] | None = None
) -> tuple[tuple[Entry[M], ...], tuple[str, ...]]:
    """Read as `list_inventories` does, but each inventory as a message type with fewer fields:
    `INVENTORY.read_as`.
    """
    machines, nodes = await _places(bus)
    strangers = sorted(nodes - machines)
    members = sorted(nodes & machines)
    if len(strangers) <= _MOST_STRANGERS or not machines:
        return await bus.list(state, on_rejected=on_rejected), ()
    places = asyncio.Semaphore(_AT_ONCE)

    async def read(node: str) -> tuple[Entry[M], ...]:
        async with places:
            return await bus.list(state, on_rejected=on_rejected, node=node)

    entries = [entry for of_node in await asyncio.gather(*map(read, members)) for entry in of_node]
    return tuple(sorted(entries, key=lambda entry: INVENTORY.key(**entry.parts))), tuple(strangers)


async def nodes_without_a_machine(bus: Bus) -> tuple[str, ...]:
    """Name the nodes that have inventories and no machine, sorted."""
    machines, nodes = await _places(bus)
    return tuple(sorted(nodes - machines))


async def _places(bus: Bus) -> tuple[set[str], set[str]]:
    """Name the nodes that have a machine, and those that have inventories."""
    return {parts["node"] for parts in await bus.keys(MACHINE)}, {parts["node"] for parts in await bus.keys(INVENTORY)}


def unread_text(nodes: tuple[str, ...]) -> str:
    """Return which nodes were left unread, and why.

    >>> unread_text(("a", "b", "c", "d"))
    '4 nodes have inventories and no machine, and were not read: a, b, c and 1 more'
    """
    return f"{len(nodes)} nodes have inventories and no machine, and were not read: {first_of(nodes, 3)}"
