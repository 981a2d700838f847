"""What a search costs: it ends at its budget, sees what cannot be before it tries it, and goes back
past choices that have no part in a miss.
"""

from __future__ import annotations

import pytest

from topobus.engine.allocation import search
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import (
    AllocationInput,
    Fault,
    GaveUp,
    NoFit,
)
from unit.controller.allocation import COMPILER, claim, device, given, gpus, request, slice_of, solve

ROOT = "resource.kubernetes.io/pcieRoot"


def test_allocate_gives_up_when_the_budget_is_spent() -> None:
    """A search that would take longer than it may has an outcome of its own, which is not "does not
    fit".
    """
    plain = claim(*(request(f"r{index}", count=2) for index in range(10)))

    outcome = solve(given([slice_of(gpus(20))], plain), step_budget=10)

    assert isinstance(outcome, GaveUp)


def test_allocate_sees_that_no_value_is_common_before_it_tries_all() -> None:
    """A constraint that no devices can satisfy together is refused, however many ways there are to
    serve the requests before it.
    """
    devices = gpus(24, pair=[index // 2 for index in range(24)], serial=list(range(24)))
    hopeless = claim(
        *(request(f"r{index}", count=2) for index in range(6)),
        request("last", count=2),
        constraints=[
            *({"requests": [f"r{index}"], "matchAttribute": "gpu.example.com/pair"} for index in range(6)),
            {"requests": ["last"], "matchAttribute": "gpu.example.com/serial"},
        ],
    )

    outcome = solve(given([slice_of(devices)], hopeless), step_budget=2000)

    assert isinstance(outcome, NoFit)


@pytest.mark.parametrize("count", [5, 31, 128])
def test_allocate_answers_at_once_when_one_device_too_many_is_wanted(count: int) -> None:
    """n+1 of n equal devices is refused in a few steps; trying all combinations would take 2^n."""
    slices = [
        slice_of(gpus(count)[start : start + 64], name=f"s-{start}", count=-(-count // 64))
        for start in range(0, count, 64)
    ]
    claims = [claim(request(count=min(32, count + 1 - start)), name=f"a/{start}") for start in range(0, count + 1, 32)]

    outcome = solve(given(slices, *claims), step_budget=2000)

    assert isinstance(outcome, NoFit)


def test_allocate_solves_what_upstream_cannot_when_devices_are_equal() -> None:
    """A constraint that no combination of equal devices satisfies is refused, though there are
    millions of combinations.
    """
    same = slice_of(gpus(40, pair=[index // 20 for index in range(40)]))
    hard = claim(
        request("a", count=14),
        request("b", count=14),
        constraints=[{"matchAttribute": "gpu.example.com/pair"}],
    )

    outcome = solve(given([same], hard))

    assert isinstance(outcome, NoFit)


def _thrashing(count: int) -> AllocationInput:
    """Give a claim whose last request cannot be served, after `count` devices that it does not
    mind: every one of them is another as far as constraints tell.
    """
    counters = [{"name": "card", "counters": {"parts": {"value": "5"}}}]
    plain = [device(f"a-{index:02d}", attributes={"model": "a", "side": index}) for index in range(20)]
    takes = [{"counterSet": "card", "counters": {"parts": {"value": "2"}}}]
    parts = [device(f"b-{index}", attributes={"model": "b", "side": 0}, consumesCounters=takes) for index in range(4)]
    hopeless = claim(
        request("a", count=count, where=["device.attributes['gpu.example.com'].model == 'a'"]),
        request("b", count=3, where=["device.attributes['gpu.example.com'].model == 'b'"]),
        constraints=[{"requests": ["b"], "matchAttribute": "gpu.example.com/side"}],
    )
    return given(
        [slice_of([*plain, *parts], count=2, name="a"), slice_of([], count=2, name="b", sharedCounters=counters)],
        hopeless,
    )


def test_allocate_goes_back_past_choices_that_have_no_part_in_a_miss() -> None:
    """Twenty devices that the last request does not mind make 38,760 combinations of six.

    None of them is tried twice over for its sake.
    """
    outcome = solve(_thrashing(6), step_budget=2000)

    assert isinstance(outcome, NoFit)
    assert isinstance(allocate(_thrashing(6), COMPILER, step_budget=30_000, is_clever=False), GaveUp)


def test_allocate_gives_up_when_nobody_waits_any_more() -> None:
    """A search that is abandoned ends within some steps, and says so by its own outcome, not by
    "does not fit".
    """
    asked = 0

    def is_abandoned() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    outcome = allocate(_thrashing(6), COMPILER, is_clever=False, is_abandoned=is_abandoned)

    assert isinstance(outcome, GaveUp)
    assert (asked, outcome.steps < 1000) == (3, True)


@pytest.mark.parametrize("count", [33, 128])
def test_allocate_counts_before_it_searches_when_many_are_wanted(count: int) -> None:
    """n+1 of n is known from a count alone: not one step is made when nobody reads the reasons, and
    one way down when somebody does.
    """
    slices = [
        slice_of(gpus(count)[start : start + 64], name=f"s-{start}", count=-(-count // 64))
        for start in range(0, count, 64)
    ]
    claims = [claim(request(count=min(32, count + 1 - start)), name=f"a/{start}") for start in range(0, count + 1, 32)]

    brief = allocate(given(slices, *claims), COMPILER, is_brief=True)
    spoken = allocate(given(slices, *claims), COMPILER)

    assert brief == NoFit((), 0)
    assert isinstance(spoken, NoFit)
    assert spoken.steps <= count + 2 * len(claims)
    assert spoken.reasons[0].code == "too-few-devices"


def test_allocate_sees_that_values_do_not_go_round_before_it_searches() -> None:
    """Two requests that must match and share no value with enough devices are refused by matching
    values, not by trying devices.
    """
    devices = gpus(24, model=["a", "b"] * 12, side=[index // 2 if index % 2 else 100 + index for index in range(24)])
    apart = claim(
        request("a", count=4, where=["device.attributes['gpu.example.com'].model == 'a'"]),
        request("b", count=4, where=["device.attributes['gpu.example.com'].model == 'b'"]),
        constraints=[{"matchAttribute": "gpu.example.com/side"}],
    )

    outcome = solve(given([slice_of(devices)], apart), step_budget=100)

    assert isinstance(outcome, NoFit)


def test_allocate_meets_the_broken_constraint_of_all_devices_when_equal_ones_were_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the second of two equal devices taken "all" breaks its constraint, with the first it
    only lacks one: that is no reason to leave the second out.
    """
    monkeypatch.setattr(search, "_HARD_STEPS", 0)
    everything = claim(
        request(allocationMode="All"), name="default/all", constraints=[{"matchAttribute": "gpu.example.com/root"}]
    )

    outcome = solve(given([slice_of(gpus(3))], claim(request()), everything))

    assert isinstance(outcome, Fault)
    assert outcome.reason.code == "constraint-on-all"
