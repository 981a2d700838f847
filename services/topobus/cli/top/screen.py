"""Lays out one screen of `topobus top`: a line about the node, the drawing, the newest events, and the keys.

Flows in: a scene and the terminal's size. Flows out: exactly as many lines as the terminal has, none wider than it is. Pure.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from topobus.cli.render.machine_drawing import draw_machine
from topobus.cli.render.output import answer_console
from topobus.cli.top.scene import Scene, ShownEvent
from topobus.domain.drawing.letters import holders_of

__all__ = ["Palette", "event_lines", "painted", "screen", "whole_view"]

_KEYS = "q quit   ←→ node   ↑↓ scroll"
# Of a small screen the drawing gets most; a big one shows more events.
_LEAST_EVENTS = 3
_MOST_EVENTS = 12


class Palette:
    """How colours are written on this terminal; gives finished lines."""

    def __init__(self, terminal: Console) -> None:
        self._terminal = terminal

    def lines(self, what: RenderableType, width: int) -> list[str]:
        """Render to lines with their colours, each complete in itself."""
        terminal = self._terminal
        written = io.StringIO()
        console = answer_console(
            file=written,
            width=width,
            force_terminal=terminal.is_terminal,
            color_system=terminal.color_system,
            no_color=terminal.no_color,
        )
        console.print(what)
        return written.getvalue().splitlines()


def screen(scene: Scene, width: int, height: int, palette: Palette) -> list[str]:
    """Draw one screen; scrolling beyond the drawing's end is undone in the scene."""
    width = max(width, 20)
    head = palette.lines(_head(scene, width), width)
    if len(scene.nodes) > 1:
        head += palette.lines(_tabs(scene, width), width)
    drawing = palette.lines(_drawing(scene, width), width)
    room = height - len(head) - 1
    events = max(min(_MOST_EVENTS, room - len(drawing) - 1), min(_LEAST_EVENTS, room // 3))
    body = max(room - events - 1, 1) if events > 0 else room
    scene.scroll = min(scene.scroll, max(len(drawing) - body, 0))
    shown = drawing[scene.scroll : scene.scroll + body]
    shown += [""] * (body - len(shown))
    below = len(drawing) - scene.scroll - body
    lines = [*head, *shown]
    if events > 0:
        lines += palette.lines(Text("events", "title"), width)
        newest = [palette.lines(_cut(line, width), width)[0] for line in event_lines(scene.events, scene.node, events)]
        lines += newest + [""] * (events - len(newest))
    foot = _KEYS + (f"   {below} more lines below" if below > 0 else "")
    lines = lines[: height - 1] + palette.lines(_cut(Text(foot, "faint"), width), width)
    return lines[-height:] if height < 3 else lines


def whole_view(scene: Scene, width: int) -> list[RenderableType]:
    """Give all that there is of the node, for printing once."""
    return [_head(scene, width), _drawing(scene, width), Text("events", "title"), *event_lines(scene.events, scene.node, _MOST_EVENTS)]


def event_lines(events: Iterable[ShownEvent], node: str, count: int) -> list[Text]:
    """Choose the newest events of a node, newest last."""
    of_node = [event.line for event in events if event.node == node]
    return of_node[-count:] if count > 0 else []


def _head(scene: Scene, width: int) -> Text:
    node = scene.node
    if not node:
        return _cut(
            Text.assemble(("topobus top", "title"), f"  no node reports a machine yet{f': {scene.trouble}' if scene.trouble else ''}"),
            width,
        )
    devices = [device for inventory in scene.inventories_of(node) for device in inventory.devices]
    sick = [device for device in devices if not device.health.is_allocatable]
    unwell = [device for device in devices if device.health.worst is not None]
    owners = len(scene.ledgers[node].allocations) if node in scene.ledgers else 0
    line = Text.assemble(("topobus top", "title"), f"  {node}  {len(devices)} devices, ")
    line.append(f"{len(unwell)} not well" if unwell else "all well", "fail" if sick else "warn" if unwell else "ok")
    line.append(f", {owners} holder{'' if owners == 1 else 's'}")
    if scene.trouble:
        line.append(f"  {scene.trouble}", "warn")
    return _cut(line, width)


def _tabs(scene: Scene, width: int) -> Text:
    """Name the nodes, so that the one that is shown is always in sight."""
    nodes, node = scene.nodes, scene.node
    place = nodes.index(node)
    line = Text(f"{place + 1}/{len(nodes)} ")
    start = place
    while start > 0 and sum(len(name) + 2 for name in nodes[start - 1 : place + 1]) < width // 2:
        start -= 1
    for name in nodes[start:]:
        line.append(f" {name} ", "reverse" if name == node else _health_style(scene, name))
    return _cut(line, width)


def _health_style(scene: Scene, node: str) -> str:
    devices = [device for inventory in scene.inventories_of(node) for device in inventory.devices]
    return "fail" if any(not device.health.is_allocatable for device in devices) else ""


def _drawing(scene: Scene, width: int) -> RenderableType:
    node = scene.node
    if not node:
        return Text("is `topobus up` running? `topobus doctor` tells what is missing", "faint")
    ledger = scene.ledgers.get(node)
    holders = holders_of(ledger, scene.letters)
    scene.letters |= {holder.allocation.owner.key: holder.letter for holder in holders.all}
    return draw_machine(scene.machines[node], scene.inventories_of(node), ledger, width=width, letters=scene.letters, names=scene.pci_names)


def _cut(line: Text, width: int) -> Text:
    # A copy: an event that is cut here is whole again on a wider screen.
    cut = line.copy()
    cut.truncate(width, overflow="ellipsis")
    cut.no_wrap = True
    return cut


def painted(old: Sequence[str], new: Sequence[str]) -> str:
    """Write what changed between two screens of the same size: the terminal shows no flicker, and a slow line carries little."""
    # A line is cleared before it is written: after the last column the cursor stands on that column, and clearing would take its sign away.
    return "".join(f"\x1b[{row};1H\x1b[K{line}" for row, line in enumerate(new, 1) if row > len(old) or old[row - 1] != line)
