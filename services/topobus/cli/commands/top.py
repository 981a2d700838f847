"""`topobus top`: the drawing of a machine, live: who holds what, how devices are, and the newest events.

State comes from watches and events from streams, so a change is on the screen when it happened. Only whether services still answer is asked now and then: silence
writes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from topobus.cli.commands.health import WatchedEvent, event_line
from topobus.cli.exits import ExitCode
from topobus.cli.options import BUS_DEFAULTS, BusOptions, open_bus, the_node
from topobus.cli.pci_names import read_pci_names
from topobus.cli.render.answers import answer_text, short_time
from topobus.cli.render.output import Output
from topobus.cli.system.fleet_inventories import list_inventories
from topobus.cli.system.responding_services import as_of_now
from topobus.cli.top.keys import Key
from topobus.cli.top.scene import Scene, ShownEvent
from topobus.cli.top.screen import Palette, painted, screen, whole_view
from topobus.cli.top.terminal import full_screen
from topobus.contracts.catalogue import DECISION, HEALTH, INVENTORY, LEDGER, MACHINE
from topobus.contracts.messages import DecisionEvent
from topobus.domain.outcome import Refusal
from topobus.runtime.bus import Bus, Change, ChangeKind, Received, Start
from topobus.sysfs.report import machine_report

__all__ = ["top"]

_FIRST_EVENTS = 20
# A burst of changes is drawn together: nobody reads more than so many screens a second.
_BETWEEN_DRAWINGS_S = 0.1
# Long beside the second that topology waits for a service, short beside a person's patience.
_BETWEEN_SIGNS_S = 5.0


def top(
    *,
    node: Annotated[str | None, Parameter(help="The node to begin with; arrow keys show the others.")] = None,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Draw machines live: holders, health and the newest events. Without a terminal it prints once."""
    return asyncio.run(_top(node, options))


async def _top(node: str | None, options: BusOptions) -> int:
    output = options.output()
    async with open_bus(options) as bus:
        scene = Scene(wanted=await the_node(bus, node) if node is not None else None)
        await _read(bus, scene)
        why_once = _why_once(output)
        if why_once:
            await _show_once(bus, scene, output, why_once, node)
            return ExitCode.OK
        with contextlib.suppress(asyncio.CancelledError):
            await _live(bus, scene, output)
    return ExitCode.OK


def _why_once(output: Output) -> str:
    """Say why the screen cannot be live; empty when it can."""
    if output.is_json:
        return "JSON"
    if not sys.stdout.isatty():
        return "stdout is no terminal"
    if not sys.stdin.isatty():
        return "stdin is no terminal, and keys come from there"
    return f"the terminal is {os.environ.get('TERM') or 'of no kind'}" if os.environ.get("TERM", "dumb") in ("dumb", "") else ""


async def _show_once(bus: Bus, scene: Scene, output: Output, why: str, node: str | None) -> None:
    scene.wanted = await the_node(bus, node or scene.node or None)
    await _look_for_silence(bus, scene)
    if output.is_json:
        name = scene.node
        output.document(
            {
                "node": name,
                "machine": machine_report(scene.machines[name]),
                "inventories": scene.inventories_of(name),
                "ledger": scene.ledgers.get(name),
            }
        )
        return
    output.note(f"{why}: printed once")
    output.show(*whole_view(scene, output.console.width))


async def _read(bus: Bus, scene: Scene) -> None:
    """Read what there is, so that the first screen is a whole one."""
    for machine in await bus.list(MACHINE):
        scene.take_machine(Change(kind=ChangeKind.PUT, parts=machine.parts, revision=machine.revision, value=machine.value))
    functions = [function for described in scene.machines.values() for function in described.pci_devices]
    scene.pci_names |= read_pci_names(functions, Path("/"))
    for inventory in (await list_inventories(bus))[0]:
        scene.take_inventory(Change(kind=ChangeKind.PUT, parts=inventory.parts, revision=inventory.revision, value=inventory.value))
    for ledger in await bus.list(LEDGER):
        scene.take_ledger(Change(kind=ChangeKind.PUT, parts=ledger.parts, revision=ledger.revision, value=ledger.value))
    for decision in await bus.last(DECISION, limit=_FIRST_EVENTS):
        _add_decision(scene, decision.value)
    for event in await bus.last(HEALTH, limit=_FIRST_EVENTS):
        # What a service said of a device when it started is no news.
        if event.value.previous is not None:
            scene.add_event(_health(event))


async def _live(bus: Bus, scene: Scene, output: Output) -> None:
    me = asyncio.current_task()
    assert me is not None
    changed = asyncio.Event()
    palette = Palette(output.console)
    shown: list[str] = []

    def press(keys: list[Key]) -> None:
        if Key.REDRAW in keys:
            shown.clear()
        for key in keys:
            if not scene.press(key):
                me.cancel()
        changed.set()

    def redraw() -> None:
        shown.clear()
        changed.set()

    with full_screen(sys.stdin.fileno(), sys.stdout, on_keys=press, on_change=redraw, on_end=me.cancel) as terminal:
        async with asyncio.TaskGroup() as group:
            for reading in _readings(bus, scene, changed):
                group.create_task(reading)
            while True:
                changed.clear()
                width, height = terminal.size()
                lines = screen(scene, width, height, palette)
                terminal.write(painted(shown, lines) if len(shown) == len(lines) else "\x1b[2J" + painted([], lines))
                shown[:] = lines
                await changed.wait()
                await asyncio.sleep(_BETWEEN_DRAWINGS_S)


def _readings(bus: Bus, scene: Scene, changed: asyncio.Event) -> list[Any]:
    """Everything that changes the scene, each as long as the screen is shown."""

    async def watch(state: Any, take: Any) -> None:
        async with contextlib.aclosing(bus.watch(state)) as changes:
            async for change in changes:
                take(change)
                changed.set()

    async def follow_decisions() -> None:
        async with contextlib.aclosing(bus.follow(DECISION, start=Start.NEW, on_waiting=None)) as events:
            async for received in events:
                _add_decision(scene, received.value)
                changed.set()

    async def follow_health() -> None:
        async with contextlib.aclosing(bus.follow(HEALTH, start=Start.NEW, on_waiting=None)) as events:
            async for received in events:
                scene.add_event(_health(received))
                changed.set()

    async def look_for_silence() -> None:
        while True:
            before = dict(scene.silent)
            await _look_for_silence(bus, scene)
            if scene.silent != before:
                changed.set()
            await asyncio.sleep(_BETWEEN_SIGNS_S)

    return [
        watch(MACHINE, scene.take_machine),
        watch(INVENTORY, scene.take_inventory),
        watch(LEDGER, scene.take_ledger),
        follow_decisions(),
        follow_health(),
        look_for_silence(),
    ]


async def _look_for_silence(bus: Bus, scene: Scene) -> None:
    """Ask the services of the node that is shown whether they answer; devices of one that does not are shown as unknown."""
    node = scene.node
    inventories = [inventory for (place, _), inventory in sorted(scene.inventories.items()) if place == node]
    now = await as_of_now(bus, inventories)
    scene.silent = {node: tuple(after for before, after in zip(inventories, now, strict=True) if after is not before)}


def _add_decision(scene: Scene, event: DecisionEvent) -> None:
    """Add a decision; a dry run changes nothing that is drawn."""
    if event.is_dry_run:
        return
    line = Text.assemble((f"{short_time(event.time)}  ", "faint"), f"{event.text}: ")
    line.append(answer_text(event), "fail" if isinstance(event.outcome, Refusal) else "ok")
    scene.add_event(ShownEvent(time=event.time, node=event.node, line=line))


def _health(received: Received[Any]) -> ShownEvent:
    event = received.value
    line = event_line(WatchedEvent(sequence=received.sequence, is_present_state=False, event=event))
    return ShownEvent(time=event.time, node=event.node, line=line)
