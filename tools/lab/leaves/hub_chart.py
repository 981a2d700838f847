"""Draws how a hub grows with its nodes as SVG without dependencies: memory, times and idle
messages, side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

__all__ = ["draw_growth"]

# Numbers on the axis closer than this would overlap.
_LABEL_WIDTH = 34
_WIDTH, _HEIGHT, _TOP, _BOTTOM, _GAP = 340, 320, 78, 50, 30
_LINE_HEIGHT = 16


class _Line(Struct, frozen=True):
    figure: str
    text: str
    colour: str


_PANELS: tuple[tuple[str, tuple[_Line, ...]], ...] = (
    (
        "resident memory (MiB)",
        (
            _Line("idle: hub_mib", "the hub", "#27c"),
            _Line("controller_mib", "a controller", "#c52"),
        ),
    ),
    (
        "all nodes at the same time (s)",
        (
            _Line("join: all are known_s", "they come, until each is known whole", "#27c"),
            _Line("controller: until ready_s", "a controller starts", "#c52"),
            _Line("restart: all linked again_s", "the hub was restarted, all linked", "#2a7"),
        ),
    ),
    (
        "messages a second at the hub, at rest",
        (
            _Line("with a controller: hub's messages_per_s", "with a controller", "#c52"),
            _Line("idle: hub's messages_per_s", "nodes and a watcher alone", "#27c"),
        ),
    ),
)


def draw_growth(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draw three panels.

    Both axes begin at zero, so that a straight line through the corner is linear growth.

    Shapes: rows — one per size of the fleet; a figure that a row lacks is left out of its line.
    """
    width = len(_PANELS) * (_WIDTH + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, (title, lines) in enumerate(_PANELS):
        parts += _panel(place * (_WIDTH + _GAP), title, lines, rows)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(left: int, title: str, lines: Sequence[_Line], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    series = [
        (line, [(float(row["nodes"]), float(row[line.figure])) for row in rows if line.figure in row]) for line in lines
    ]
    inner_left, inner_right = left + 50, left + _WIDTH - 10
    most_x = max((float(row["nodes"]) for row in rows), default=1.0)
    most_y = _round_up(max((y for _, points in series for _, y in points), default=1.0))

    def at(x: float, y: float) -> tuple[float, float]:
        across = inner_left + x / most_x * (inner_right - inner_left)
        return across, _HEIGHT - _BOTTOM - y / most_y * (_HEIGHT - _BOTTOM - _TOP)

    parts = [f'<text x="{left + 10}" y="18" font-weight="bold">{title}</text>']
    for step in range(5):
        value = most_y * step / 4
        _, y = at(0, value)
        parts.append(f'<line x1="{inner_left}" y1="{y:.1f}" x2="{inner_right}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{inner_left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,g}</text>')
    last = math.inf
    # From the right: sizes are close to each other on the left, and the largest is the most
    # important.
    for row in reversed(rows):
        x, _ = at(float(row["nodes"]), 0)
        if last - x >= _LABEL_WIDTH:
            last = x
            parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{row["nodes"]}</text>')
    parts.append(f'<text x="{(inner_left + inner_right) / 2:.0f}" y="{_HEIGHT - 12}" text-anchor="middle">nodes</text>')
    for place, (line, points) in enumerate(series):
        spots = [at(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}"/>' for x, y in spots]
        parts.append(
            f'<text x="{inner_left + 4}" y="{36 + place * _LINE_HEIGHT}" fill="{line.colour}">{line.text}</text>'
        )
    return parts


def _round_up(value: float) -> float:
    """Return the next number that four lines divide well.

    >>> _round_up(37.0), _round_up(0.0)
    (40.0, 1.0)
    """
    if value <= 0:
        return 1.0
    step = 10.0 ** math.floor(math.log10(value))
    return next(factor * step for factor in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if factor * step >= value)
