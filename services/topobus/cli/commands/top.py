"""`topobus top`: a fleet as a table and each node as a drawing, live: what is in use, what is
unhealthy, the holders, and the newest events.

State comes from watches and events from streams, so a change is on the screen when it happens, and
nothing is read twice. Of the drawn node everything is read, of the others what a row needs. Only
whether the drawn node's services still answer is asked at an interval, since a silent service
causes no event.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from topobus.bus.bus import Bus, Change, ChangeKind, Entry, Received, Start
from topobus.cli.commands.health import WatchedEvent, event_line
from topobus.cli.exits import ExitCode
from topobus.cli.listing.fleet_inventories import list_inventories_as
from topobus.cli.listing.responding_services import as_of_now
from topobus.cli.options import BUS_DEFAULTS, BusOptions, one_of, open_bus
from topobus.cli.pci_names import read_pci_names
from topobus.cli.render.output import Output
from topobus.cli.top.fleet import CountedInventory, Fleet, NodeRow
from topobus.cli.top.fleet_screen import fleet_lines, fleet_screen, page_of, shown_rows
from topobus.cli.top.keys import Key, Press
from topobus.cli.top.scene import Scene, ShownEvent
from topobus.cli.top.screen import Palette, help_screen, node_screen, painted, whole_view
from topobus.cli.top.terminal import FullScreen, full_screen
from topobus.cli.top.view import View, press
from topobus.formats.messages.catalogue import ALIGNMENT, DECISION, HEALTH, INVENTORY, LEDGER, MACHINE, OBJECT
from topobus.formats.messages.messages import DecisionEvent
from topobus.formats.messages.nouns import Event, State
from topobus.sysfs.report import machine_report
from topobus.values.errors import PeerUnavailable
from topobus.values.ledger import Holders
from topobus.values.outcome import Refusal
from topobus.values.timestamps import short_time

__all__ = ["top"]

_COUNTED = INVENTORY.read_as(CountedInventory)
_HELD = LEDGER.read_as(Holders)
_FIRST_EVENTS = 20
# A burst of changes is drawn together: a person reads no more screens a second.
_BETWEEN_DRAWINGS_S = 0.1
# Long compared with the second that topology waits for a service, short compared with a person's
# patience.
_BETWEEN_SIGNS_S = 5.0
# Nodes with a machine's key and no inventory are read one by one, for the machine of the key may be
# gone. At most so many are read.
_MOST_LOOKS = 64


async def top(
    *,
    node: Annotated[str | None, Parameter(help="The node to begin with; Esc shows all.")] = None,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Show all nodes live as a table, sick ones first, and draw one: holders, health and the newest
    events.

    Without a terminal it prints once.
    """
    output = options.output()
    async with open_bus(options) as bus:
        if node is not None and await bus.get(MACHINE, node=node) is None:
            one_of("node", node, await _members(bus, set()))
        why_once = _why_once(output)
        if why_once:
            await _show_once(bus, output, why_once, node)
            return ExitCode.OK
        with contextlib.suppress(asyncio.CancelledError):
            await _Live(bus, output, node).run()
    return ExitCode.OK


def _why_once(output: Output) -> str:
    """Return why the screen cannot be live. Empty when it can."""
    if output.is_json:
        return "JSON"
    if not sys.stdout.isatty():
        return "stdout is no terminal"
    if not sys.stdin.isatty():
        return "stdin is no terminal, and keys come from there"
    return (
        f"the terminal is {os.environ.get('TERM') or 'of no kind'}"
        if os.environ.get("TERM", "dumb") in ("dumb", "")
        else ""
    )


async def _show_once(bus: Bus, output: Output, why: str, node: str | None) -> None:
    members = await _members(bus, set())
    if node is None and not members:
        raise PeerUnavailable(
            "no node reports a machine", next_step="is topobus-discovery running there? `topobus doctor` reports it"
        )
    if node is None and len(members) > 1:
        fleet = await _read_fleet(bus, members)
        if output.is_json:
            output.document({"nodes": [_document(row) for row in fleet.rows], "waiting": fleet.unplaced})
            return
        output.note(f"{why}: printed once")
        output.show(*fleet_lines(fleet, output.console.width))
        return
    scene = Scene(node=node or members[0])
    await _read_node(bus, scene)
    if output.is_json and scene.machine is not None:
        output.document(
            {
                "node": scene.node,
                "machine": machine_report(scene.machine),
                "inventories": scene.shown_inventories,
                "ledger": scene.ledger,
            }
        )
        return
    output.note(f"{why}: printed once")
    output.show(*whole_view(scene, output.console.width))


def _document(row: NodeRow) -> dict[str, object]:
    return {
        "node": row.node,
        "state": row.rank.name.lower(),
        "classes": {
            use.device_class: {
                "total": use.total,
                "used": use.used,
                "free": use.free,
                "sick": use.sick,
                "isSilent": use.is_silent,
            }
            for use in row.uses
        },
        "sick": row.sick,
        "waiting": row.waits,
        "why": row.why,
    }


async def _members(bus: Bus, counted: set[str]) -> list[str]:
    """Name the nodes that report a machine, sorted. `counted` are those known to exist, as they
    have an inventory.
    """
    names = {parts["node"] for parts in await bus.keys(MACHINE)}
    doubtful = sorted(names - counted)[:_MOST_LOOKS]
    if len(names - counted) > _MOST_LOOKS:
        return sorted(names)
    gone = [
        name
        for name, entry in zip(doubtful, [await bus.get(MACHINE, node=name) for name in doubtful], strict=True)
        if entry is None
    ]
    return sorted(names - set(gone))


async def _read_fleet(bus: Bus, members: list[str]) -> Fleet:
    fleet = Fleet()
    fleet.know_members(members)
    for inventory in (await list_inventories_as(bus, _COUNTED))[0]:
        fleet.take_inventory(_as_change(inventory))
    for ledger in await bus.list(_HELD):
        fleet.take_ledger(_as_change(ledger))
    for alignment in await bus.list(ALIGNMENT):
        fleet.take_alignment(_as_change(alignment))
    for api_object in await bus.list(OBJECT):
        fleet.take_object(_as_change(api_object))
    fleet.is_settled = True
    return fleet


def _as_change(entry: Entry[Any]) -> Change[Any]:
    return Change(kind=ChangeKind.PUT, parts=entry.parts, revision=entry.revision, value=entry.value)


async def _read_node(bus: Bus, scene: Scene) -> None:
    """Read the state of one node."""
    machine = await bus.get(MACHINE, node=scene.node)
    if machine is not None:
        scene.take_machine(_as_change(machine))
        await _name_functions(scene)
    for inventory in await bus.list(INVENTORY, node=scene.node):
        scene.take_inventory(_as_change(inventory))
    ledger = await bus.get(LEDGER, node=scene.node)
    if ledger is not None:
        scene.take_ledger(_as_change(ledger))
    await _read_events(bus, scene)
    await _look_for_silence(bus, scene)


async def _read_events(bus: Bus, scene: Scene) -> None:
    for decision in await bus.last(DECISION, limit=_FIRST_EVENTS, node=scene.node):
        _add_decision(scene, decision.value)
    for event in await bus.last(HEALTH, limit=_FIRST_EVENTS, node=scene.node):
        # A service's first report of a device at its start is no news.
        if event.value.previous is not None:
            scene.add_event(_health(event))


async def _name_functions(scene: Scene) -> None:
    if scene.machine is not None:
        scene.pci_names.update((await asyncio.to_thread(read_pci_names, scene.machine.pci_devices, Path("/"))).items())


class _Live:
    """The screen, while it is shown."""

    def __init__(self, bus: Bus, output: Output, node: str | None) -> None:
        self._bus = bus
        self._palette = Palette(output.console)
        self._fleet = Fleet(time.monotonic)
        self._view = View(opened=node or "")
        self._scene: Scene | None = None
        self._page = 1
        self._shown: list[str] = []
        self._changed = asyncio.Event()
        self._unsettled = {state.name for state in (INVENTORY, LEDGER, OBJECT)}

    async def run(self) -> None:
        """Show it until a key or a signal ends it."""
        me = asyncio.current_task()
        assert me is not None
        with full_screen(
            sys.stdin.fileno(),
            sys.stdout,
            on_presses=lambda presses: self._press(presses, me.cancel),
            on_change=self._redraw,
            on_end=me.cancel,
        ) as terminal:
            async with asyncio.TaskGroup() as group:
                for reading in (
                    self._watch(_COUNTED, self._fleet.take_inventory),
                    self._watch(_HELD, self._fleet.take_ledger),
                    self._watch(ALIGNMENT, self._fleet.take_alignment),
                    self._watch(OBJECT, self._fleet.take_object),
                    self._listen(),
                ):
                    group.create_task(reading)
                following: asyncio.Task[None] | None = None
                while True:
                    self._changed.clear()
                    opened = self._opened()
                    if opened != (self._scene.node if self._scene is not None else ""):
                        if following is not None:
                            following.cancel()
                        self._scene = Scene(node=opened) if opened else None
                        following = group.create_task(self._follow(self._scene)) if self._scene is not None else None
                    self._draw(terminal)
                    await self._changed.wait()
                    await asyncio.sleep(_BETWEEN_DRAWINGS_S)

    def _opened(self) -> str:
        """The node that is drawn. With a single node there is no table."""
        rows = self._fleet.rows
        if self._fleet.is_settled and not self._view.opened and len(rows) == 1:
            self._view = replace(self._view, opened=rows[0].node)
        return self._view.opened

    def _draw(self, terminal: FullScreen) -> None:
        width, height = terminal.size()
        rows = shown_rows(self._fleet, self._view)
        self._page = page_of(height)
        if self._view.has_help:
            screen = help_screen(self._view.scroll, width, height, self._palette)
            self._view = replace(self._view, scroll=screen.scroll)
        elif self._scene is not None:
            nodes = [row.node for row in rows]
            place = (
                f"{nodes.index(self._scene.node) + 1} of {len(nodes):,}"
                if len(nodes) > 1 and self._scene.node in nodes
                else ""
            )
            is_alone = len(self._fleet.rows) <= 1
            screen = node_screen(
                self._scene, self._view.scroll, width, height, self._palette, place=place, is_alone=is_alone
            )
            self._view = replace(self._view, scroll=screen.scroll)
        else:
            screen, self._view = fleet_screen(self._fleet, rows, self._view, width, height, self._palette)
        shown, lines = self._shown, screen.lines
        terminal.write(painted(shown, lines) if len(shown) == len(lines) else "\x1b[2J" + painted([], lines))
        self._shown = lines

    def _press(self, presses: list[Press], end: Callable[[], object]) -> None:
        for pressed in presses:
            if pressed.key is Key.REDRAW:
                self._shown = []
            nodes = [row.node for row in shown_rows(self._fleet, self._view)]
            self._view = press(self._view, pressed, nodes, page=self._page, has_fleet=len(self._fleet.rows) > 1)
        if self._view.is_ended:
            end()
        self._changed.set()

    def _redraw(self) -> None:
        self._shown = []
        self._changed.set()

    async def _watch(self, state: State[Any], take: Callable[[Change[Any]], None]) -> None:
        async with contextlib.aclosing(self._bus.watch(state)) as changes:
            async for change in changes:
                if change.kind is ChangeKind.SNAPSHOT_END:
                    self._unsettled.discard(state.name)
                    self._fleet.is_settled = not self._unsettled
                else:
                    take(change)
                self._changed.set()

    async def _listen(self) -> None:
        """Find silent topologies, and the nodes that report a machine. The latter are not watched,
        for a machine is large and hardly changes.
        """
        while True:
            if self._fleet.listen(is_connected=self._bus.is_connected):
                self._changed.set()
            if self._fleet.is_settled and self._bus.is_connected:
                with contextlib.suppress(PeerUnavailable):
                    if self._fleet.know_members(await _members(self._bus, self._fleet.counted)):
                        self._changed.set()
            await asyncio.sleep(_BETWEEN_SIGNS_S)

    async def _follow(self, scene: Scene) -> None:
        """Follow everything of the node that is drawn."""
        node = scene.node

        async def watch(state: State[Any], take: Callable[[Change[Any]], None]) -> None:
            async with contextlib.aclosing(self._bus.watch(state, node=node)) as changes:
                async for change in changes:
                    take(change)
                    if state is MACHINE:
                        await _name_functions(scene)
                    self._changed.set()

        async def follow(events: Event[Any], take: Callable[[Received[Any]], None]) -> None:
            async with contextlib.aclosing(
                self._bus.follow(events, start=Start.NEW, on_waiting=None, node=node)
            ) as received:
                async for each in received:
                    take(each)
                    self._changed.set()

        async def read_events() -> None:
            with contextlib.suppress(PeerUnavailable):
                await _read_events(self._bus, scene)
            self._changed.set()

        async def look_for_silence() -> None:
            while True:
                before = scene.silent
                await _look_for_silence(self._bus, scene)
                if scene.silent != before:
                    self._changed.set()
                await asyncio.sleep(_BETWEEN_SIGNS_S)

        readings: list[Coroutine[Any, Any, None]] = [
            watch(MACHINE, scene.take_machine),
            watch(INVENTORY, scene.take_inventory),
            watch(LEDGER, scene.take_ledger),
            follow(DECISION, lambda received: _add_decision(scene, received.value)),
            follow(HEALTH, lambda received: scene.add_event(_health(received))),
            read_events(),
            look_for_silence(),
        ]
        async with asyncio.TaskGroup() as group:
            for reading in readings:
                group.create_task(reading)


async def _look_for_silence(bus: Bus, scene: Scene) -> None:
    """Ask the node's services whether they answer.

    Devices of a silent one are shown as unknown.
    """
    inventories = [inventory for _, inventory in sorted(scene.inventories.items())]
    now = await as_of_now(bus, inventories)
    scene.silent = tuple(after for before, after in zip(inventories, now, strict=True) if after is not before)


def _add_decision(scene: Scene, event: DecisionEvent) -> None:
    """Add a decision. A dry run changes nothing that is drawn."""
    if event.is_dry_run:
        return
    line = Text.assemble((f"{short_time(event.time)}  ", "faint"), f"{event.text}: ")
    line.append(event.answer, "fail" if isinstance(event.outcome, Refusal) else "ok")
    scene.add_event(ShownEvent(time=event.time, line=line))


def _health(received: Received[Any]) -> ShownEvent:
    event = received.value
    line = event_line(WatchedEvent(sequence=received.sequence, is_present_state=False, event=event))
    return ShownEvent(time=event.time, line=line)
