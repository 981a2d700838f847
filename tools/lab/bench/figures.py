"""Figures of a benchmark that measures a floor in the same run: medians, 99th percentiles,
processor time, and the ratios of both to the floor's.

A machine's speed changes by a factor of four from one to another, and by two with other load. A
ratio of two measures that were taken in turns changes far less, so budgets are ratios where there
is a floor.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Mapping, Sequence

from msgspec import Struct

__all__ = [
    "Figure",
    "clocked",
    "draw_figure",
    "draw_processors",
    "figure",
    "machine_facts",
    "percentile",
    "processor_ms",
]


class Figure(Struct, frozen=True, kw_only=True):
    """One measured thing."""

    case: str
    unit: str = "ms"
    value: float
    """The median, or the single value."""
    p99: float | None = None
    rounds: int = 1
    budget: float | None = None
    budget_p99: float | None = None
    floor: float | None = None
    """The floor's median, in the same unit. None: it has none."""
    floor_p99: float | None = None
    budget_ratio: float | None = None
    """The greatest ratio to the floor."""
    budget_ratio_p99: float | None = None
    processors: dict[str, float] = {}
    """Processor time per call, in ms, by process: all threads."""
    floor_processors: dict[str, float] = {}

    @property
    def ratio(self) -> float | None:
        """Return the ratio of the median to the floor's."""
        return _ratio(self.value, self.floor)

    @property
    def ratio_p99(self) -> float | None:
        """Return the ratio of the 99th percentile to the floor's."""
        return _ratio(self.p99, self.floor_p99)

    @property
    def processor_ratio(self) -> float | None:
        """Return the ratio of the processor time to the floor's, all processes together."""
        return _ratio(sum(self.processors.values()), sum(self.floor_processors.values())) if self.processors else None

    @property
    def is_within(self) -> bool:
        """Say whether it is within its budgets."""
        pairs = (
            (self.value, self.budget),
            (self.p99, self.budget_p99),
            (self.ratio, self.budget_ratio),
            (self.ratio_p99, self.budget_ratio_p99),
        )
        return all(budget is None or value is None or value <= budget for value, budget in pairs)

    def as_row(self) -> dict[str, object]:
        """Return all of it for JSON, including the ratios."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        ratios = {"ratio": self.ratio, "ratio_p99": self.ratio_p99, "processor_ratio": self.processor_ratio}
        return {**fields, **ratios, "is_within": self.is_within}


def figure(
    case: str,
    spent_s: Sequence[float],
    *,
    floor_s: Sequence[float] = (),
    processors: Mapping[str, float] | None = None,
    floor_processors: Mapping[str, float] | None = None,
    budget: float | None = None,
    budget_p99: float | None = None,
    budget_ratio: float | None = None,
    budget_ratio_p99: float | None = None,
) -> Figure:
    """Make a figure in ms from the seconds of single calls. `floor_s` are the floor's, taken in
    turns with them.

    >>> made = figure("x", [0.004, 0.002, 0.003], floor_s=[0.001, 0.0015, 0.0015], budget_ratio=2.0)
    >>> made.value, made.p99, made.ratio, made.is_within
    (3.0, 4.0, 2.0, True)
    """
    return Figure(
        case=case,
        value=round(statistics.median(spent_s) * 1000, 3),
        p99=round(percentile(spent_s, 0.99) * 1000, 3),
        rounds=len(spent_s),
        budget=budget,
        budget_p99=budget_p99,
        floor=round(statistics.median(floor_s) * 1000, 3) if floor_s else None,
        floor_p99=round(percentile(floor_s, 0.99) * 1000, 3) if floor_s else None,
        budget_ratio=budget_ratio,
        budget_ratio_p99=budget_ratio_p99,
        processors=dict(processors or {}),
        floor_processors=dict(floor_processors or {}),
    )


def machine_facts() -> dict[str, object]:
    """Return what figures depend on, for the report: the machine, and its load at this moment."""
    return {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


async def clocked(call: Awaitable[object]) -> float:
    """Return the seconds of one call."""
    began = time.perf_counter()
    await call
    return time.perf_counter() - began


def percentile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least so large a part of all values does not exceed.

    >>> percentile([3.0, 1.0, 2.0], 0.99), percentile(range(1, 101), 0.99), percentile([5.0], 0.5)
    (3.0, 99, 5.0)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * part) - 1)]


def processor_ms(before: Mapping[str, float], after: Mapping[str, float], calls: int) -> dict[str, float]:
    """Return each process's processor time per call, in ms, from its seconds before and after.

    >>> processor_ms({"gateway": 1.0, "topology": 2.0}, {"gateway": 1.3, "topology": 2.1}, 100)
    {'gateway': 3.0, 'topology': 1.0}
    """
    return {name: round((after[name] - before[name]) * 1000 / calls, 3) for name in before}


def draw_figure(shown: Figure) -> str:
    """Write a figure on one line, with its floor and its budgets."""
    worst = f"p99 {shown.p99:9.3f}" if shown.p99 is not None else " " * 13
    parts = [f"{shown.case:<62} {shown.value:9.3f} {shown.unit:<8} {worst}"]
    if shown.ratio is not None and shown.ratio_p99 is not None:
        parts.append(
            f"floor {shown.floor:.3f} / {shown.floor_p99:.3f}  ratio {shown.ratio:.2f} / {shown.ratio_p99:.2f}"
        )
    budgets = _budgets("budget", shown.budget, shown.budget_p99) + _budgets(
        "budget of the ratio", shown.budget_ratio, shown.budget_ratio_p99
    )
    if budgets:
        parts.append(f"{', '.join(budgets)}{'' if shown.is_within else '  OVER'}")
    return "  ".join(parts).rstrip()


def draw_processors(shown: Figure) -> list[str]:
    """Write the processor time per call of a figure's processes and of its floor's, one line each.

    Empty when none was measured.
    """
    if not shown.processors:
        return []
    lines = [f"  processor, ms a call: {_sum(shown.processors)}"]
    if shown.floor_processors:
        lines.append(f"  … of the floor: {_sum(shown.floor_processors)}; ratio {shown.processor_ratio:.2f}")
    return lines


def _sum(spent: Mapping[str, float]) -> str:
    return f"{sum(spent.values()):.2f} = {' + '.join(f'{name} {value:.2f}' for name, value in spent.items())}"


def _budgets(name: str, median: float | None, p99: float | None) -> list[str]:
    texts = [f"{value:g}" if value is not None else "-" for value in (median, p99)]
    return [f"{name} {'/'.join(texts)}"] if texts != ["-", "-"] else []


def _ratio(value: float | None, floor: float | None) -> float | None:
    return round(value / floor, 3) if value is not None and floor else None
