"""Draws the cores of a NUMA node as bars, one sign per core, with a gap between cores of different
level-3 caches.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.text import Text

from topobus.engine.drawing.layout import DrawnCore

__all__ = ["Cell", "core_bars"]

Cell = tuple[str, str]
"""A sign and its style."""

_ROWS = 2
# With gaps between caches a bar may be higher: 12 caches of 8 cores on one node, as large EPYCs
# have, are three rows of a narrow panel.
_ROWS_WITH_GAPS = 4
_FREE = "·"


def core_bars(cores: Sequence[DrawnCore], cells: Sequence[Cell], width: int, *, indent: int) -> Iterable[Text]:
    """Draw one sign per core, cores of one level-3 cache together.

    When they do not fit into the rows, one sign covers several cores, and there are no gaps.

    Shapes: cells — one per core.
    """
    room = width - indent
    groups = [
        [cell for _, cell in group] for _, group in groupby(zip(cores, cells, strict=True), key=lambda pair: pair[0].l3)
    ]
    rows = _rows_of_groups(groups, room)
    if len(groups) > 1 and 0 < len(rows) <= _ROWS_WITH_GAPS:
        for row in rows:
            yield Text(" " * indent) + Text(" ").join(_run(group) for group in row)
        return
    scale = -(-len(cells) // (room * _ROWS))
    merged = [_merged(cells[start : start + scale]) for start in range(0, len(cells), scale)]
    length = -(-len(merged) // -(-len(merged) // room))
    for start in range(0, len(merged), length):
        yield Text(" " * indent) + _run(merged[start : start + length])
    if scale > 1:
        yield Text(f"{' ' * indent}({scale} cores a sign)", "faint")


def _rows_of_groups(groups: Sequence[Sequence[Cell]], room: int) -> list[list[Sequence[Cell]]]:
    """Lay whole groups into rows, evenly. Empty when one is longer than a row."""
    longest = max(map(len, groups))
    if longest > room:
        return []
    fitting = max((room + 1) // (longest + 1), 1)
    number = -(-len(groups) // fitting)
    length = -(-len(groups) // number)
    return [list(groups[start : start + length]) for start in range(0, len(groups), length)]


def _run(cells: Sequence[Cell]) -> Text:
    runs = [(len(tuple(same)), cell) for cell, same in groupby(cells)]
    return Text.assemble(*((sign * count, style) for count, (sign, style) in runs))


def _merged(cells: Sequence[Cell]) -> Cell:
    """Return the most frequent sign that is not free."""
    taken = [cell for cell in cells if cell[0] != _FREE]
    return Counter(taken).most_common(1)[0][0] if taken else cells[0]
