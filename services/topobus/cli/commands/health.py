"""`topobus health`: the present health of devices, and `topobus health watch`: its changes from now on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Annotated

from cyclopts import App, Parameter
from msgspec import Struct
from rich import box
from rich.table import Table
from rich.text import Text

from topobus.cli.exits import ExitCode
from topobus.cli.options import BUS_DEFAULTS, BusOptions, one_of, open_bus
from topobus.cli.render.answers import short_time
from topobus.cli.render.leaves import HEALTH_STYLES
from topobus.cli.system.responding_services import as_of_now
from topobus.contracts.catalogue import HEALTH, INVENTORY
from topobus.contracts.messages import HealthEvent
from topobus.domain.device import Inventory
from topobus.domain.silence import SERVICE_SILENT
from topobus.runtime.bus import Bus, Start

__all__ = ["WatchedEvent", "event_line", "health_app"]

health_app = App(name="health", help="How devices are.")


class WatchedEvent(Struct, frozen=True, kw_only=True):
    """One line of `topobus health watch --json`."""

    sequence: int
    """The event's place in the stream; grows."""
    is_present_state: bool
    """True for what was so before the watch began."""
    event: HealthEvent


NodeFilter = Annotated[str | None, Parameter(help="Only this node.")]
ClassFilter = Annotated[str | None, Parameter(name="--class", help="Only this device class.")]


@health_app.default
def health(
    *,
    node: NodeFilter = None,
    device_class: ClassFilter = None,
    is_all: Annotated[bool, Parameter(name="--all", negative="", help="Healthy devices, too.")] = False,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Show the devices that are not well now, and count the others."""
    return asyncio.run(_health(node, device_class, is_all, options))


@health_app.command(name="watch")
def watch(*, node: NodeFilter = None, device_class: ClassFilter = None, options: BusOptions = BUS_DEFAULTS) -> int:
    """Follow health: first the present state of each device, then every change, nothing twice and nothing lost."""
    return asyncio.run(_watch(node, device_class, options))


async def _inventories(bus: Bus, node: str | None, device_class: str | None) -> list[Inventory]:
    inventories = [entry.value for entry in await bus.list(INVENTORY)]
    if node is not None:
        one_of("node", node, (inventory.node for inventory in inventories))
    if device_class is not None:
        one_of("device class", device_class, (inventory.device_class for inventory in inventories))
    return [inventory for inventory in inventories if node in (None, inventory.node) and device_class in (None, inventory.device_class)]


async def _health(node: str | None, device_class: str | None, is_all: bool, options: BusOptions) -> int:
    output = options.output()
    async with open_bus(options) as bus:
        inventories = await as_of_now(bus, await _inventories(bus, node, device_class))
    if output.is_json:
        devices = [
            {"node": inventory.node, "device_class": inventory.device_class, "device": device.name, "health": device.health}
            for inventory in inventories
            for device in inventory.devices
        ]
        output.document({"devices": devices})
        return ExitCode.OK
    table = Table(box=box.SIMPLE_HEAD, header_style="title")
    for title in ("device", "node", "health", "since", "what"):
        table.add_column(title, overflow="fold")
    well = 0
    for inventory in inventories:
        unheard = 0
        for device in inventory.devices:
            worst = device.health.worst
            if worst is not None and worst.reason == SERVICE_SILENT:
                # The same of all of them; CPUs would fill screens.
                unheard += 1
                continue
            if worst is None and not is_all:
                well += 1
                continue
            what = f"{worst.reason}: {worst.message}" + (f" (do: {worst.action})" if worst.action != "none" else "") if worst else "-"
            table.add_row(
                Text(device.name, "name"),
                inventory.node,
                _state_text(device.health.state.value),
                short_time(device.health.since) or "-",
                what,
            )
        if unheard:
            table.add_row(
                Text(f"{unheard} of class {inventory.device_class}", "name"),
                inventory.node,
                _state_text("unknown"),
                "-",
                inventory.warnings[0],
            )
    if table.row_count:
        output.show(table)
    if not is_all:
        output.show(Text(f"{well} devices are well", "ok" if not table.row_count else ""))
    return ExitCode.OK


async def _watch(node: str | None, device_class: str | None, options: BusOptions) -> int:
    output = options.output()
    parts = {key: value for key, value in (("node", node), ("device_class", device_class)) if value is not None}
    loop = asyncio.get_running_loop()
    me = asyncio.current_task()
    assert me is not None
    # SIGTERM ends a watch as Ctrl-C does; both are the ordinary way to end it.
    loop.add_signal_handler(signal.SIGTERM, me.cancel)
    said: set[str] = set()

    def note_once(trouble: str) -> None:
        if trouble not in said:
            said.add(trouble)
            output.note(f"waiting: {trouble}")

    async with open_bus(options) as bus:
        with contextlib.suppress(asyncio.CancelledError):
            async with contextlib.aclosing(bus.follow(HEALTH, start=Start.PRESENT, on_waiting=note_once, **parts)) as events:
                async for received in events:
                    watched = WatchedEvent(sequence=received.sequence, is_present_state=received.is_replay, event=received.value)
                    if output.is_json:
                        output.line(watched)
                    else:
                        output.show(event_line(watched))
    return ExitCode.OK


def event_line(watched: WatchedEvent) -> Text:
    """Write one event in one line: when, which device, from what to what, why, and who is affected."""
    event = watched.event
    worst = event.health.worst
    line = Text.assemble((f"{short_time(event.time)}  ", "faint"), (f"{event.node}/{event.device}", "name"), "  ")
    if event.previous is not None and not watched.is_present_state:
        line.append(f"{event.previous} -> ", "faint")
    line.append_text(_state_text(event.health.state.value))
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


def _state_text(state: str) -> Text:
    style = {str(key.value): value for key, value in HEALTH_STYLES.items()}[state]
    return Text(state, style or "ok")
