"""Lays out one screen of `topobus top`: a line about a node, its drawing, the newest events and the
keys, or the help.

It gives exactly as many lines as the terminal has, none wider than it is. Pure.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.text import Text

from topobus.cli.render.listing import cut
from topobus.cli.render.machine_drawing import draw_machine
from topobus.cli.render.output import answer_console
from topobus.cli.top.scene import Scene, ShownEvent
from topobus.engine.drawing.letters import holders_of
from topobus.values.node_text import counted

__all__ = ["Palette", "Screen", "event_lines", "help_screen", "node_screen", "painted", "whole_view"]

_SCROLL_KEYS = "↑↓ scroll"
# On a small screen the drawing gets most of the room. A big one shows more events.
_LEAST_EVENTS = 3
_MOST_EVENTS = 12
_HELP = (
    ("All nodes", ""),
    ("↑ ↓ k j", "the row above, below"),
    ("PgUp PgDn Space", "a screen of rows"),
    ("Home End g G", "the first row, the last"),
    ("Enter →", "draw the node of the row"),
    ("/", "filter; Enter keeps it, Esc leaves it as it was"),
    ("Esc", "without the filter"),
    ("One node", ""),
    ("↑ ↓ k j PgUp PgDn", "scroll the drawing"),
    ("← → h l Tab", "the node before, the next one of the table"),
    ("Esc Backspace", "back to all nodes"),
    ("Everywhere", ""),
    ("?", "this help; Esc or ? closes it"),
    ("Ctrl-L", "redraw"),
    ("q Ctrl-C", "end"),
    ("Filters", ""),
    ("rack7", "nodes with that in their name, or in the reason of a sick device"),
    (
        "sick full free waiting",
        "nodes with such a device; also unhealthy, unknown, recovering, degraded, kept-back, silent, well",
    ),
    ("fpga", "nodes that have devices of the class"),
    ("gpu:full nic:sick", "the same of one class"),
    ("rack7 !full", "all words must fit; ! in front: must not"),
    ("The table", ""),
    ("3/8", "in use, of all; ? behind it: the service of the class does not answer"),
    ("sick", "devices that are not well, or withheld by an operator"),
    ("waits", "pods and claims that wait and can go to no other node"),
)


@dataclass(frozen=True)
class Screen:
    """Finished lines, and how far they are scrolled: never beyond the end."""

    lines: list[str]
    scroll: int


class Palette:
    """How colours are written on this terminal."""

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


def node_screen(
    scene: Scene, scroll: int, width: int, height: int, palette: Palette, *, place: str = "", is_alone: bool = True
) -> Screen:
    """Draw one node. `place`: its number, and how many there are."""
    width = max(width, 20)
    head = palette.lines(_head(scene, width, place), width)
    drawing = palette.lines(_drawing(scene, width), width)
    room = height - len(head) - 1
    events = max(min(_MOST_EVENTS, room - len(drawing) - 1), min(_LEAST_EVENTS, room // 3))
    body = max(room - events - 1, 1) if events > 0 else room
    scroll = min(scroll, max(len(drawing) - body, 0))
    shown = drawing[scroll : scroll + body]
    shown += [""] * (body - len(shown))
    below = len(drawing) - scroll - body
    lines = [*head, *shown]
    if events > 0:
        lines += palette.lines(Text("events", "title"), width)
        newest = [palette.lines(cut(line, width), width)[0] for line in event_lines(scene.events, events)]
        lines += newest + [""] * (events - len(newest))
    keys = ["q quit", "? help", *(["Esc all nodes", "←→ node"] if not is_alone else []), _SCROLL_KEYS]
    return Screen(_with_foot(lines, keys, below, width, height, palette), scroll)


def help_screen(scroll: int, width: int, height: int, palette: Palette) -> Screen:
    """Show what the keys do, and what can be filtered by."""
    left = min(max(len(keys) for keys, meaning in _HELP if meaning), width // 2)
    texts: list[Text] = []
    for keys, meaning in _HELP:
        if not meaning:
            texts += [Text(""), Text(keys, "title")] if texts else [Text(keys, "title")]
            continue
        rest = Text(meaning).wrap(_PLAIN, max(width - left - 4, 10))
        heads = Text(keys, "name").wrap(_PLAIN, left)
        for number in range(max(len(rest), len(heads))):
            head = heads[number] if number < len(heads) else Text()
            head.rstrip()
            line = Text("  ").append_text(head)
            line.pad_right(left + 4 - len(line))
            texts.append(line.append_text(rest[number]) if number < len(rest) else line)
    lines = [palette.lines(cut(text, width), width)[0] if text.plain else "" for text in texts]
    body = max(height - 1, 1)
    scroll = min(scroll, max(len(lines) - body, 0))
    shown = lines[scroll : scroll + body]
    shown += [""] * (body - len(shown))
    return Screen(
        _with_foot(shown, ["Esc close", _SCROLL_KEYS], len(lines) - scroll - body, width, height, palette), scroll
    )


# Only for breaking lines.
_PLAIN = answer_console(file=io.StringIO(), width=200)


def _with_foot(
    lines: list[str], keys: Iterable[str], below: int, width: int, height: int, palette: Palette
) -> list[str]:
    foot = "   ".join(keys) + (f"   {below} more lines below" if below > 0 else "")
    lines = lines[: height - 1] + palette.lines(cut(Text(foot, "faint"), width), width)
    return lines[-height:] if height < 3 else lines


def whole_view(scene: Scene, width: int) -> list[RenderableType]:
    """Return everything about the node, for printing once."""
    return [
        _head(scene, width, ""),
        _drawing(scene, width),
        Text("events", "title"),
        *event_lines(scene.events, _MOST_EVENTS),
    ]


def event_lines(events: Iterable[ShownEvent], count: int) -> list[Text]:
    """Choose the newest events, newest last."""
    lines = [event.line for event in events]
    return lines[-count:] if count > 0 else []


def _head(scene: Scene, width: int, place: str) -> Text:
    devices = [device for inventory in scene.shown_inventories for device in inventory.devices]
    sick = [device for device in devices if not device.health.is_allocatable]
    unwell = [device for device in devices if device.health.worst is not None]
    owners = len(scene.ledger.allocations) if scene.ledger is not None else 0
    line = Text.assemble(
        ("topobus top", "title"), f"  {scene.node}{f' ({place})' if place else ''}  {counted(len(devices), 'device')}, "
    )
    line.append(f"{len(unwell)} not well" if unwell else "all well", "fail" if sick else "warn" if unwell else "ok")
    line.append(f", {owners} holder{'' if owners == 1 else 's'}")
    return cut(line, width)


def _drawing(scene: Scene, width: int) -> RenderableType:
    if scene.machine is None:
        text = (
            f"{scene.node} reports no machine: is topobus-discovery running there? `topobus doctor` reports it"
            if scene.is_read
            else "reading …"
        )
        return Text(text, "faint")
    holders = holders_of(scene.ledger, scene.letters)
    scene.letters |= {holder.allocation.owner.key: holder.letter for holder in holders.all}
    return draw_machine(
        scene.machine, scene.shown_inventories, scene.ledger, width=width, letters=scene.letters, names=scene.pci_names
    )


def painted(old: Sequence[str], new: Sequence[str]) -> str:
    """Write what changed between two screens of the same size, so that the terminal does not
    flicker and a slow line carries little.
    """
    # A line is cleared before it is written. After the last column the cursor stays on that column,
    # and clearing would remove its character.
    return "".join(
        f"\x1b[{row};1H\x1b[K{line}" for row, line in enumerate(new, 1) if row > len(old) or old[row - 1] != line
    )
