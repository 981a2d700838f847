"""Lays out the table of all nodes of `topobus top`: totals, what waits, a row per node, and the
keys.

It gives exactly as many lines as the terminal has, none wider than it is. Pure. Where the terminal
is too narrow, classes are left out from the last one on, and a line of the table names their
number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Group
from rich.text import Text

from topobus.cli.render.listing import cut
from topobus.cli.top.fleet import ClassUse, Fleet, NodeRow, Rank, class_order, is_shown
from topobus.cli.top.screen import Palette, Screen
from topobus.cli.top.view import View, place_of, window

__all__ = ["fleet_lines", "fleet_screen", "page_of", "shown_rows"]

_ORDER = "used/total; not well first, then full, then by name"
_GAP = "  "
_MARK = "> "
# Least room of the reason before classes are left out, and most of a name on a narrow terminal.
_LEAST_WHY = 16
_STYLES = {Rank.UNHEALTHY: "fail", Rank.UNKNOWN: "warn", Rank.UNWELL: "warn", Rank.FULL: "name", Rank.WELL: ""}
# Head, totals, order, titles, the number of further rows, keys.
_FRAME = 6


@dataclass(frozen=True, kw_only=True)
class _Columns:
    name: int
    classes: tuple[tuple[str, int], ...]
    left_out: tuple[str, ...]
    has_waits: bool


def shown_rows(fleet: Fleet, view: View) -> tuple[NodeRow, ...]:
    """Return the rows that the filter selects."""
    return tuple(row for row in fleet.rows if is_shown(row, view.wanted)) if view.wanted.strip() else fleet.rows


def page_of(height: int) -> int:
    """Return how many rows a screen has at least."""
    return max(height - _FRAME, 1)


def fleet_screen(
    fleet: Fleet, rows: Sequence[NodeRow], view: View, width: int, height: int, palette: Palette
) -> tuple[Screen, View]:
    """Draw the table. Returns the view with the rows that are shown."""
    width = max(width, 20)
    columns = _columns(rows, width)
    head = [*_head(fleet, rows, view, width), *_titles(columns)]
    foot = _foot(view)
    room = max(height - len(head) - 1, 1)
    place = place_of(view, [row.node for row in rows])
    first = window(view.first, place, len(rows), room)
    below = len(rows) - first - room
    if first or below > 0:
        room = max(room - 1, 1)
        first = window(view.first, place, len(rows), room)
        below = len(rows) - first - room
    body = [
        _row(row, columns, width, is_selected=number == place)
        for number, row in enumerate(rows[first : first + room], first)
    ]
    texts = [*head, *(body or [_nothing(fleet, view)])]
    if first or below > 0:
        texts.append(
            Text("  … " + ", ".join([f"{first} above"] * (first > 0) + [f"{below} more"] * (below > 0)), "faint")
        )
    lines = palette.lines(Group(*(cut(text, width) if text.plain else Text(" ") for text in texts)), width)[
        : height - 1
    ]
    lines += [""] * (height - 1 - len(lines)) + palette.lines(cut(foot, width), width)
    return Screen(lines[-height:], 0), replace(view, first=first, place=place)


def fleet_lines(fleet: Fleet, width: int) -> list[Text]:
    """Return the whole table, for printing once."""
    columns = _columns(fleet.rows, width)
    rows = [_row(row, columns, width, is_selected=False) for row in fleet.rows]
    return [cut(text, width) for text in (*_head(fleet, fleet.rows, View(), width), *_titles(columns), *rows)]


def _head(fleet: Fleet, rows: Sequence[NodeRow], view: View, width: int) -> list[Text]:
    ranks = Counter(row.rank for row in fleet.rows)
    unwell = sum(ranks[rank] for rank in (Rank.UNHEALTHY, Rank.UNKNOWN, Rank.UNWELL))
    count = len(fleet.rows)
    line = Text.assemble(("topobus top", "title"), f"  {count:,} node{'' if count == 1 else 's'}, ")
    line.append(
        f"{unwell:,} not well" if unwell else "all well",
        "fail" if ranks[Rank.UNHEALTHY] else "warn" if unwell else "ok",
    )
    line.append(f", {ranks[Rank.FULL]:,} full" if ranks[Rank.FULL] else "")
    line.append("" if fleet.is_settled else "  reading …", "faint")
    totals = [_total_text(use) for use in fleet.totals()]
    if len(line) + sum(len(text) + 2 for text in totals) <= width:
        line.append("".join(f"  {text}" for text in totals))
        lines = [line]
    else:
        lines = [line, Text("  ".join(totals))] if totals else [line]
    waits = [_waits_text(kind, reasons) for kind, reasons in sorted(fleet.unplaced.items(), reverse=True)]
    if waits:
        lines.append(Text("waiting: " + "; ".join(waits), "warn"))
    if fleet.strangers:
        lines.append(Text(f"{len(fleet.strangers):,} nodes have inventories and no machine, and are not shown", "warn"))
    if view.typed is not None:
        lines.append(
            Text.assemble(("/", "title"), view.typed, ("_", "title"), (f"  {len(rows):,} of {count:,} nodes", "faint"))
        )
    elif view.filter:
        lines.append(
            Text.assemble(("/", "title"), view.filter, (f"  {len(rows):,} of {count:,} nodes; Esc: all", "faint"))
        )
    return lines


def _total_text(use: ClassUse) -> str:
    return f"{use.device_class} {use.used:,}/{use.total:,}"


def _waits_text(kind: str, reasons: Mapping[str, int]) -> str:
    count = sum(reasons.values())
    worst = max(sorted(reasons), key=lambda reason: reasons[reason])
    return (
        f"{count:,} {kind}{'' if count == 1 else 's'} "
        f"({worst}{f' and {len(reasons) - 1} more reasons' if len(reasons) > 1 else ''})"
    )


def _columns(rows: Sequence[NodeRow], width: int) -> _Columns:
    """Choose which classes have a column: all that leave room for the reason, from the first on."""
    sizes: dict[str, int] = {}
    for row in rows:
        for use in row.uses:
            sizes[use.device_class] = max(sizes.get(use.device_class, len(use.device_class)), len(_use_text(use)))
    name = min(max((len(row.node) for row in rows), default=4), max(width // 3, 8))
    has_waits = any(row.waits for row in rows)
    order = sorted(sizes, key=class_order)
    room = width - len(_MARK) - name - len(_GAP) - len("sick") - (len(_GAP) + len("waits") if has_waits else 0)
    kept: list[tuple[str, int]] = []
    for device_class in order:
        need = len(_GAP) + sizes[device_class]
        if room - need < len(_GAP) + _LEAST_WHY:
            break
        room -= need
        kept.append((device_class, sizes[device_class]))
    return _Columns(name=name, classes=tuple(kept), left_out=tuple(order[len(kept) :]), has_waits=has_waits)


def _titles(columns: _Columns) -> list[Text]:
    """Return how the table is sorted, what it has no room for, and the names of its columns."""
    notes = [_ORDER, *([f"too narrow for: {', '.join(columns.left_out)}"] if columns.left_out else [])]
    cells = ["node".ljust(columns.name), *(name.rjust(size) for name, size in columns.classes), "sick"]
    titles = " " * len(_MARK) + _GAP.join([*cells, *(["waits"] if columns.has_waits else []), "why"])
    return [*(Text(note, "faint") for note in notes), Text(titles, "title")]


def _row(row: NodeRow, columns: _Columns, width: int, *, is_selected: bool) -> Text:
    uses = {use.device_class: use for use in row.uses}
    style = _STYLES[row.rank]
    line = Text(_MARK if is_selected else " " * len(_MARK))
    line.append(_short(row.node, columns.name).ljust(columns.name), style or "")
    for name, size in columns.classes:
        use = uses.get(name)
        line.append(_GAP)
        line.append((_use_text(use) if use is not None else "-").rjust(size), _use_style(use))
    line.append(_GAP + (str(row.sick) if row.sick else "-").rjust(len("sick")), style if row.sick else "")
    if columns.has_waits:
        line.append(_GAP + (str(row.waits) if row.waits else "-").rjust(len("waits")), "warn" if row.waits else "")
    line.append(_GAP + row.why, style)
    line.rstrip()
    # One bar: colours within it would be harder to read, and the text has the same meaning without
    # them.
    return Text(line.plain.ljust(width), "reverse") if is_selected else line


def _short(name: str, width: int) -> str:
    """Cut a name at its beginning: nodes of a fleet differ at the end."""
    return name if len(name) <= width else f"…{name[len(name) - width + 1 :]}"


def _use_text(use: ClassUse) -> str:
    return f"{use.used}/{use.total}{'?' if use.is_silent else ''}"


def _use_style(use: ClassUse | None) -> str:
    if use is None:
        return "faint"
    return "warn" if use.sick or use.is_silent else "name" if use.is_full else ""


def _nothing(fleet: Fleet, view: View) -> Text:
    if fleet.rows:
        return Text(f"  no node fits {view.wanted!r}; ? lists the filters", "faint")
    if not fleet.is_settled:
        return Text("  reading …", "faint")
    return Text("  no node reports yet: is `topobus up` running? `topobus doctor` reports what is missing", "faint")


def _foot(view: View) -> Text:
    if view.typed is not None:
        return Text("Enter keep   Esc as it was   name, class, state, class:state, !word", "faint")
    return Text("q quit   ? help   Enter open   ↑↓ move   / filter", "faint")
