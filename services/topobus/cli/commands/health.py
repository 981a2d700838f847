"""`topobus health`: the present health of devices, and `topobus health watch`: its changes from now
on.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import App, Parameter
from msgspec import Struct
from rich.text import Text

from topobus.bus.bus import Start
from topobus.cli.commands.inventory import no_device, read_inventories, read_ledgers, selected
from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.listing.list_options import LIST_DEFAULTS, ListOptions
from topobus.cli.options import BUS_DEFAULTS, BusOptions, ClassFilter, NodeFilter, cancel_at, check_known, open_bus
from topobus.cli.render.device_listings import health_listing
from topobus.cli.render.gaps import Gaps
from topobus.cli.render.listing import Listing, Row
from topobus.cli.render.styles import health_text
from topobus.formats.messages.catalogue import HEALTH, INVENTORY, LEDGER
from topobus.formats.messages.messages import HealthEvent
from topobus.values.timestamps import short_time

__all__ = ["WatchedEvent", "event_line", "health_app"]

health_app = App(name="health", help="How devices are.")


class WatchedEvent(Struct, frozen=True, kw_only=True):
    """One line of `topobus health watch --json`."""

    sequence: int
    """The event's sequence in the stream."""
    is_present_state: bool
    """True for a state from before the watch began."""
    event: HealthEvent


@health_app.default
async def health(
    of_class: Annotated[str | None, Parameter(name="CLASS", help="gpu, nic, fpga, cpu or a plugin's class.")] = None,
    /,
    *,
    node: NodeFilter = None,
    device_class: ClassFilter = None,
    is_all: Annotated[bool, Parameter(name="--all", help="Include healthy devices.")] = False,
    listing: ListOptions = LIST_DEFAULTS,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Show the devices that are unhealthy now, and count the others."""
    if device_class is not None and of_class not in (None, device_class):
        raise UsageError(f"two classes are named: {of_class} and {device_class}", next_step="name one of them")
    device_class = of_class or device_class
    lister = listing.lister(is_json=options.json)
    well = [0]
    unmatched = ""
    async with open_bus(options) as bus:

        async def collect() -> list[Listing]:
            nonlocal unmatched
            ledgers, read = await read_ledgers(bus), await read_inventories(bus, node, device_class)
            inventories = [selected(lister, each, ledgers.get(each.node)) for each in read]
            is_none = bool(lister.selector.requirements) and not any(each.devices for each in inventories)
            unmatched = no_device(lister, read, ledgers) if is_none else ""
            table, well[0] = health_listing(inventories, is_all=is_all, ledgers=ledgers)
            return [table]

        rest = lister.without_selector()
        if lister.options.watch:
            return await rest.follow(bus, [(INVENTORY, {}), (LEDGER, {})], collect)
        listings = await collect()

    def document(rows: Sequence[Row]) -> Any:
        # A silent service is one row for people, and all its devices for programs.
        return {
            "devices": [
                device
                for row in rows
                for device in (row.document if isinstance(row.document, list) else [row.document])
            ]
        }

    rest.show(listings, document, thing="device", empty=unmatched)
    if lister.is_text and not is_all and not lister.options.no_headers and not unmatched:
        lister.output().show(Text(f"{well[0]} devices are well", "ok" if not listings[0].rows else ""))
    return ExitCode.OK


@health_app.command(name="watch")
async def watch(
    *, node: NodeFilter = None, device_class: ClassFilter = None, options: BusOptions = BUS_DEFAULTS
) -> int:
    """Follow health: first the present state of each device, then every change. No change is
    repeated or lost.
    """
    output = options.output()
    parts = {key: value for key, value in (("node", node), ("device_class", device_class)) if value is not None}
    cancel_at(signal.SIGTERM)
    noted: set[str] = set()

    def note_once(trouble: str) -> None:
        if trouble not in noted:
            noted.add(trouble)
            output.note(f"waiting: {trouble}")

    async with open_bus(options) as bus:
        await check_known(bus, node=node, device_class=device_class)
        gaps = Gaps(output, "changes", is_stored=True)
        with contextlib.suppress(asyncio.CancelledError), gaps.telling(bus):
            following = bus.follow(
                HEALTH, start=Start.PRESENT, on_waiting=note_once, on_replaced=gaps.note_replaced, **parts
            )
            async with contextlib.aclosing(following) as events:
                async for received in events:
                    watched = WatchedEvent(
                        sequence=received.sequence, is_present_state=received.is_replay, event=received.value
                    )
                    output.line(watched)
                    output.show(event_line(watched))
    return ExitCode.OK


def event_line(watched: WatchedEvent) -> Text:
    """Write one event in one line: when, which device, from what to what,
    why, and who is affected.
    """
    event = watched.event
    worst = event.health.worst
    line = Text.assemble((f"{short_time(event.time)}  ", "faint"), (f"{event.node}/{event.device}", "name"), "  ")
    if event.previous is not None and not watched.is_present_state:
        line.append(f"{event.previous} -> ", "faint")
    line.append_text(health_text(event.health.state))
    if event.is_removed:
        line.append("  gone from the inventory", "warn")
    if worst is not None:
        line.append(f"  {worst.reason}: {worst.message}" if worst.message else f"  {worst.reason}")
        if worst.action != "none":
            line.append(f"  do: {worst.action}", "warn")
    if event.affected:
        line.append(f"  affects {', '.join(map(str, event.affected))}", "fail")
    users = [pod for pod in event.pods if pod not in event.affected]
    if users:
        line.append(f"  used by {', '.join(map(str, users))}", "fail")
    if watched.is_present_state:
        line.append("  (present state)", "faint")
    return line
