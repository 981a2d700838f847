"""The arithmetic of a benchmark with a floor, and its lines; nothing here is timed."""

from __future__ import annotations

import json
import os

import pytest
from msgspec import structs

from lab.bench.figures import Figure, draw_figure, draw_processors, figure, percentile, processor_ms
from lab.bench.process_use import processor_s

MEASURED = figure(
    "Allocate",
    [0.004] * 98 + [0.010, 0.030],
    floor_s=[0.002] * 98 + [0.004, 0.090],
    processors={"gateway": 2.0, "topology": 1.0},
    floor_processors={"gateway": 1.0, "topology": 0.5},
    budget_ratio=2.0,
    budget_ratio_p99=5.0,
)


def test_figure_sets_both_percentiles_against_the_floors_when_there_is_one() -> None:
    """Median against median, 99th percentile against 99th percentile, all processes' time against
    all of the floor's.
    """
    assert (MEASURED.value, MEASURED.p99, MEASURED.floor, MEASURED.floor_p99) == (4.0, 10.0, 2.0, 4.0)
    assert (MEASURED.ratio, MEASURED.ratio_p99, MEASURED.processor_ratio) == (2.0, 2.5, 2.0)
    assert MEASURED.is_within


@pytest.mark.parametrize(
    "slower",
    [
        {"value": 4.1},
        {"p99": 20.1},
        {"budget": 3.9},
        {"budget_p99": 9.9},
        {"budget_ratio": 1.9},
        {"budget_ratio_p99": 2.4},
    ],
    ids=str,
)
def test_figure_is_not_within_when_any_budget_is_exceeded(slower: dict[str, float]) -> None:
    """Each of the four budgets counts by itself."""
    assert not structs.replace(MEASURED, **slower).is_within


def test_figure_has_no_ratio_when_there_is_no_floor() -> None:
    """Without a floor, or with one of nothing, there is nothing to divide by, and a budget of the
    ratio says nothing.
    """
    plain = structs.replace(MEASURED, floor=None, floor_p99=0.0, floor_processors={})

    assert (plain.ratio, plain.ratio_p99, plain.processor_ratio) == (None, None, None)
    assert plain.is_within


@pytest.mark.parametrize(("count", "worst"), [(1, 1), (99, 99), (100, 99), (101, 100), (300, 297)])
def test_percentile_is_a_measured_value_when_calls_are_few_or_many(count: int, worst: int) -> None:
    """Of a hundred calls it is the second slowest."""
    assert percentile(range(1, count + 1), 0.99) == worst


def test_processor_ms_divides_by_the_calls_when_time_was_used() -> None:
    """What a process used between the two counts is told a call."""
    assert processor_ms({"gateway": 10.0}, {"gateway": 10.5}, 200) == {"gateway": 2.5}


def test_processor_s_is_this_process_own_clock_when_asked_for_it() -> None:
    """All threads' time, read from outside, is what the process itself reads."""
    assert os.times().user <= processor_s(os.getpid()) <= sum(os.times()[:2]) + 1.0


def test_as_row_has_floors_and_ratios_when_written_as_json() -> None:
    """JSON has what the lines have, and whether the budgets are kept."""
    row = json.loads(json.dumps(MEASURED.as_row()))

    assert row["case"] == "Allocate"
    assert (row["floor"], row["floor_p99"], row["ratio"], row["ratio_p99"], row["processor_ratio"]) == (
        2.0,
        4.0,
        2.0,
        2.5,
        2.0,
    )
    assert row["processors"] == {"gateway": 2.0, "topology": 1.0}
    assert row["is_within"] is True


def test_draw_figure_shows_floor_ratio_and_budget_when_it_has_them() -> None:
    """One line says all; what exceeds a budget is marked."""
    over = draw_figure(structs.replace(MEASURED, value=5.0))

    assert "floor 2.000 / 4.000  ratio 2.50 / 2.50  budget of the ratio 2/5  OVER" in over
    assert "OVER" not in draw_figure(MEASURED)
    assert draw_figure(Figure(case="pods", unit="pods", value=3)).split() == ["pods", "3.000", "pods"]


def test_draw_processors_adds_up_when_processes_were_counted() -> None:
    """The sum, its parts, and the floor's; nothing at all where nothing was counted."""
    assert draw_processors(MEASURED) == [
        "  processor, ms a call: 3.00 = gateway 2.00 + topology 1.00",
        "  … of the floor: 1.50 = gateway 1.00 + topology 0.50; ratio 2.00",
    ]
    assert draw_processors(structs.replace(MEASURED, processors={})) == []
