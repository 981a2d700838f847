"""Draws line charts side by side as SVG without dependencies: how times and sizes grow with what is
measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

__all__ = ["Line", "Panel", "draw_charts"]

_WIDTH, _HEIGHT, _TOP, _BOTTOM, _GAP = 340, 320, 78, 50, 30
# Numbers on the axis closer than this would overlap.
_LABEL_WIDTH = 34
_LINE_HEIGHT = 16


class Line(Struct, frozen=True):
    """One line, with its points from left to right."""

    text: str
    colour: str
    points: Sequence[tuple[float, float]]


class Panel(Struct, frozen=True, kw_only=True):
    """One chart."""

    title: str
    axis: str
    """What grows to the right."""
    lines: Sequence[Line]
    is_logarithmic: bool = False
    """Powers of ten upwards. Otherwise both axes begin at zero, so that a straight line through the
    corner is linear growth."""


def draw_charts(panels: Sequence[Panel]) -> str:
    """Draw panels side by side."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{len(panels) * (_WIDTH + _GAP)}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, panel in enumerate(panels):
        parts += _draw_panel(place * (_WIDTH + _GAP), panel)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw_panel(left: int, panel: Panel) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    inner_left, inner_right = left + 50, left + _WIDTH - 10
    most_x = max((x for x, _ in points), default=1.0)
    marks = _marks([y for _, y in points], is_logarithmic=panel.is_logarithmic)
    scale = math.log10 if panel.is_logarithmic else float
    low, high = scale(marks[0]), scale(marks[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        part = (scale(max(y, marks[0])) - low) / (high - low)
        across = inner_left + x / most_x * (inner_right - inner_left)
        return across, _HEIGHT - _BOTTOM - part * (_HEIGHT - _BOTTOM - _TOP)

    parts = [f'<text x="{left + 10}" y="18" font-weight="bold">{panel.title}</text>']
    for mark in marks:
        _, y = at(0, mark)
        parts.append(f'<line x1="{inner_left}" y1="{y:.1f}" x2="{inner_right}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{inner_left - 6}" y="{y + 4:.1f}" text-anchor="end">{mark:,g}</text>')
    last = math.inf
    # From the right: sizes are close to each other on the left, and the largest is the most
    # important.
    for size in sorted({x for x, _ in points}, reverse=True):
        x, _ = at(size, 0)
        if last - x >= _LABEL_WIDTH:
            last = x
            parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{size:g}</text>')
    middle = (inner_left + inner_right) / 2
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 12}" text-anchor="middle">{panel.axis}</text>')
    for place, line in enumerate(panel.lines):
        spots = [at(x, y) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}"/>' for x, y in spots]
        height = 36 + place * _LINE_HEIGHT
        parts.append(f'<text x="{inner_left + 4}" y="{height}" fill="{line.colour}">{line.text}</text>')
    return parts


def _marks(values: Sequence[float], *, is_logarithmic: bool) -> list[float]:
    """Choose the numbers on the axis upwards, of which the first and the last are its ends.

    >>> _marks([37.0, 2.0], is_logarithmic=False), _marks([0.02, 3.0], is_logarithmic=True)
    ([0.0, 10.0, 20.0, 30.0, 40.0], [0.01, 0.1, 1.0, 10.0])
    """
    most = max(values, default=0.0)
    if most <= 0:
        return [0.0, 1.0]
    if is_logarithmic:
        least = min(value for value in values if value > 0)
        return [10.0**power for power in range(math.floor(math.log10(least)), math.floor(math.log10(most)) + 2)]
    step = 10.0 ** math.floor(math.log10(most))
    top = next(factor * step for factor in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if factor * step >= most)
    return [top * part / 4 for part in range(5)]
