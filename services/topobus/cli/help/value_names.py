"""Names of what runs, for a shell that completes a command line: nodes, classes, devices, objects,
holders, decisions, contexts, and recorded machines.

Any failure gives no names: a shell that waits for a key must not print errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

from topobus.bus.bus import Bus
from topobus.cli.contexts import ContextFolder
from topobus.cli.objects.kinds import kind_of
from topobus.cli.options import BusOptions, NamesSystem, open_bus
from topobus.formats.messages.catalogue import DECISION, INVENTORY, LEDGER, MACHINE, OBJECT
from topobus.values.errors import TopobusError
from topobus.values.request import OwnerKind

__all__ = ["names_of", "options_of"]

_NEWEST_DECISIONS = 50


def names_of(what: str, options: BusOptions) -> list[str]:
    """Return the names, sorted. Empty when they are not known in time."""
    if what == "contexts":
        return [context.name for context in ContextFolder().all()]
    if what == "machines":
        # Imported here: only one completion needs it.
        from topobus.simulation.machines import PROFILES

        return sorted(PROFILES)
    try:
        if what == "logs":
            # Imported here: only one completion needs it.
            from topobus.cli.commands.logs import log_folder

            return sorted(path.stem for path in log_folder(options.context).glob("*.log"))
        return asyncio.run(_ask(what, options))
    except (TopobusError, TimeoutError, OSError):
        return []


def options_of(words: Sequence[str]) -> BusOptions:
    """Read from an unfinished command line which system it names."""
    given = {name: value for name, value in pairwise(words[:-1]) if name in ("--nats", "--context")}
    given |= {
        name: value
        for name, equals, value in (word.partition("=") for word in words[:-1])
        if equals and name in ("--nats", "--context")
    }
    return BusOptions(nats=given.get("--nats"), context=given.get("--context"))


async def _ask(what: str, options: BusOptions) -> list[str]:
    # A user has pressed a key and waits: all steps together may take no longer than a command waits
    # for its connection.
    async with asyncio.timeout(options.settings().connect_timeout_s), open_bus(options, NamesSystem.NEVER) as bus:
        return sorted(await _names(bus, what))


async def _names(bus: Bus, what: str) -> set[str]:
    if what == "nodes":
        return {entry.parts["node"] for entry in await bus.list(MACHINE)}
    if what in ("classes", "devices"):
        inventories = [entry.value for entry in await bus.list(INVENTORY)]
        if what == "classes":
            return {inventory.device_class for inventory in inventories}
        return {device.name for inventory in inventories for device in inventory.devices}
    if what == "decisions":
        return {received_event.value.id for received_event in await bus.last(DECISION, limit=_NEWEST_DECISIONS)}
    if what == "holders":
        owners = [
            allocation.owner for entry in await bus.list(LEDGER) for allocation in entry.value.allocations.values()
        ]
        return {f"{owner.namespace}/{owner.name}" for owner in owners if owner.kind is OwnerKind.POD}
    kind = kind_of(what.removeprefix("objects ").partition(",")[0])
    return {entry.value.metadata.get("name", "") for entry in await bus.list(OBJECT) if entry.value.kind == kind} - {""}
