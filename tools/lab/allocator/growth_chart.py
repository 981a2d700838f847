"""Draws two curves as SVG without dependencies: the time for a claim against the number of nodes,
and against the share of devices in use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["draw_growth"]

# Numbers on the axis closer than this would overlap.
_LABEL_WIDTH = 30
_WIDTH, _HEIGHT, _TOP, _BOTTOM = 360, 300, 60, 50


def draw_growth(nodes: Sequence[Mapping[str, Any]], taken: Sequence[Mapping[str, Any]]) -> str:
    """Draw both plots side by side.

    Both begin at zero, so that a straight line through the corner is linear growth.
    """
    every, place = "judged on every node_ms", "placed on the first that fits_ms"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * _WIDTH + 40}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_plot(
            0,
            "a claim against nodes, half taken (ms)",
            [(node["nodes"], node[every], node[place]) for node in nodes],
            "nodes",
        ),
        *_plot(
            _WIDTH + 40,
            f"a claim against what is taken, {taken[0]['nodes']} nodes (ms)",
            [(row["taken"] * 100, row[every], 1000 / row["claims a second"]) for row in taken],
            "% of devices taken",
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _plot(left: int, title: str, points: Sequence[tuple[float, float, float]], axis: str) -> list[str]:
    inner_left, inner_right = left + 50, left + _WIDTH - 10
    most_x = max(point[0] for point in points) or 1
    most_y = _round_up(max(max(point[1:]) for point in points))

    def at(x: float, y: float) -> tuple[float, float]:
        across = inner_left + x / most_x * (inner_right - inner_left)
        return across, _HEIGHT - _BOTTOM - y / most_y * (_HEIGHT - _BOTTOM - _TOP)

    parts = [f'<text x="{left + 10}" y="18" font-weight="bold">{title}</text>']
    for step in range(5):
        value = most_y * step / 4
        _, y = at(0, value)
        parts.append(f'<line x1="{inner_left}" y1="{y:.1f}" x2="{inner_right}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{inner_left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    last = float("-inf")
    for point in points:
        x, _ = at(point[0], 0)
        if x - last < _LABEL_WIDTH:
            continue
        last = x
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{point[0]:g}</text>')
    parts.append(
        f'<text x="{(inner_left + inner_right) / 2:.0f}" y="{_HEIGHT - 12}" text-anchor="middle">{axis}</text>'
    )
    for place, (colour, text) in enumerate(
        (("#27c", "judged on every node"), ("#c52", "placed on the first that fits")), start=1
    ):
        spots = [at(point[0], point[place]) for point in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots]
        parts.append(f'<text x="{inner_left + 4 + (place - 1) * 140}" y="38" fill="{colour}">{text}</text>')
    return parts


def _round_up(value: float) -> float:
    """Return the next number that four lines divide well."""
    step = 10 ** math.floor(math.log10(value or 1))
    return float(next(factor * step for factor in (1, 2, 4, 8, 10) if factor * step >= value))
