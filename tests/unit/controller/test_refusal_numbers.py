"""The numbers of a refusal: the most devices that a request can have at once, and what keeps it
from each other one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from topobus.engine.allocation import nearest_miss
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.allocation.suggestions import nearest
from topobus.engine.allocation.values import DeviceId, Mode, NoFit
from topobus.values.quantity import Quantity
from unit.controller.allocation import claim, device, given, gpus, request, slice_of, solve

TAG = "example.com/tag"
TAINT = {"taints": [{"key": "x", "effect": "NoSchedule"}]}
SLOT = {"consumesCounters": [{"counterSet": "card", "counters": {"slots": {"value": "1"}}}]}


def tainted(healthy: int, sick: int) -> list[Any]:
    """One slice with healthy devices, then tainted ones."""
    return [slice_of([*gpus(healthy), *(device(f"sick-{index}", **TAINT) for index in range(sick))])]


def card(devices: list[Any], slots: int = 4) -> list[Any]:
    """A card with slots, and what it is cut into."""
    counters = [{"name": "card", "counters": {"slots": {"value": str(slots)}}}]
    return [slice_of([], name="0", count=2, sharedCounters=counters), slice_of(devices, name="1", count=2)]


def message_of(slices: list[Any], *claims: Any, **fields: Any) -> str:
    """The line that says why claims do not fit, without the name of the node."""
    outcome = solve(given(slices, *claims, **fields))
    assert isinstance(outcome, NoFit), outcome
    return summarize(outcome.reasons).removeprefix("node node-1: ")


@pytest.mark.parametrize(
    ("slices", "asked", "wanted"),
    [
        pytest.param(
            tainted(2, 1), claim(request(count=4)), "found 2 of 3 (1 device: tainted x=:NoSchedule)", id="more-than-all"
        ),
        pytest.param(
            tainted(2, 1),
            claim(request(count=3)),
            "found 2 of 3 (1 device: tainted x=:NoSchedule)",
            id="all-but-the-tainted",
        ),
        pytest.param(
            tainted(8, 8),
            claim(request(count=12)),
            "found 8 of 16 (8 devices: tainted x=:NoSchedule)",
            id="half-of-them",
        ),
        pytest.param(
            tainted(8, 8),
            claim(request(count=16)),
            "found 8 of 16 (8 devices: tainted x=:NoSchedule)",
            id="as-many-as-named",
        ),
        pytest.param(
            tainted(8, 8),
            claim(request(count=17)),
            "found 8 of 16 (8 devices: tainted x=:NoSchedule)",
            id="one-more-than-named",
        ),
        pytest.param(
            card([device(f"part-{index}", **SLOT) for index in range(8)]),
            claim(request(count=9)),
            "found 4 of 8 (4 devices (part-4, part-5, part-6, part-7): the card's shared counters are used up)",
            id="counters",
        ),
        pytest.param(
            card(
                [
                    device("whole", consumesCounters=[{"counterSet": "card", "counters": {"slots": {"value": "4"}}}]),
                    *(device(f"part-{index}", **SLOT) for index in range(4)),
                ]
            ),
            claim(request(count=5)),
            "found 4 of 5 (1 device (whole): the card's shared counters are used up)",
            id="counters-that-the-first-device-would-use-up",
        ),
        pytest.param(
            [slice_of(gpus(5, **{TAG: ["x", "y", "y", "y", "x"]}))],
            claim(request(count=4), constraints=[{"matchAttribute": TAG}]),
            f"found 3 of 5 (2 devices: constraint #0 wants {TAG} = y)",
            id="equal-values",
        ),
        pytest.param(
            [slice_of(gpus(4, **{TAG: ["x", "y", "x", "y"]}))],
            claim(request(count=3), constraints=[{"distinctAttribute": TAG}]),
            f"found 2 of 4 (2 devices: constraint #0 wants another {TAG} than x, y)",
            id="different-values",
        ),
        pytest.param(
            [
                slice_of(
                    [device(f"dev-{index}", memory=str(index), allowMultipleAllocations=True) for index in (1, 2, 3)]
                )
            ],
            claim(request(count=3, capacity={"requests": {"memory": "2"}})),
            "found 2 of 3 (1 device (dev-1): its free capacity is too small: memory: 2 wanted, 1 left of 1)",
            id="shares",
        ),
        pytest.param(
            tainted(2, 1),
            claim(request(allocationMode="All")),
            "found 2 of 3 (1 device: tainted x=:NoSchedule)",
            id="all",
        ),
        pytest.param(
            tainted(2, 1),
            claim(
                {
                    "name": "r",
                    "firstAvailable": [
                        {"name": name, "deviceClassName": "gpu", "count": count}
                        for name, count in (("many", 8), ("few", 3))
                    ],
                }
            ),
            "found 2 of 3 (1 device: tainted x=:NoSchedule)",
            id="the-alternative-that-lacks-least",
        ),
    ],
)
def test_refusal_counts_what_a_request_can_have_at_once_when_devices_are_too_few(
    slices: list[Any], asked: Any, wanted: str
) -> None:
    """Taints, counters, constraints and shares are minded, and the request's own devices stand in
    nobody's way.
    """
    assert message_of(slices, asked).partition(", ")[2] == wanted


def test_refusal_names_the_first_request_without_devices_when_several_ask() -> None:
    """The requests before it have theirs where they leave most to it.

    Those of another claim count, too.
    """
    first = request("any", count=1)
    second = request("front", count=3, where=["device.attributes['gpu.example.com'].front"])
    slices = [slice_of(gpus(3, front=[True, True, False]))]

    one_claim = message_of(slices, claim(first, second, request("last", count=9)))
    two_claims = message_of(slices, claim(first, name="a/1"), claim(second, name="a/2"))

    wanted = (
        "request front wants 3 devices of class gpu, found 2 of 3 (1 device: taken by another request of the "
        "same claims)"
    )
    assert (one_claim, two_claims) == (wanted, f"claim a/2, {wanted}")


def test_refusal_names_the_limit_when_devices_are_there_and_the_claim_is_full() -> None:
    """Devices that a claim may not have are not lacking on the node."""
    alternatives = [
        {"name": "many", "deviceClassName": "gpu", "count": 20},
        {"name": "other", "deviceClassName": "nic", "count": 10},
    ]

    text = message_of(
        [slice_of(gpus(40))], claim({"name": "a", "firstAvailable": alternatives}, request("b", count=15))
    )

    assert text == (
        "request b wants 15 devices of class gpu, found 12 of 40 "
        "(20 devices: taken by another request of the same claims; 8 devices: a claim may have 32 devices at most)"
    )


@pytest.mark.parametrize(("steps", "wanted"), [(0, "at least 0 of 5"), (16, "at least 1 of 5"), (2_000, "3 of 5")])
def test_refusal_says_at_least_when_a_number_is_not_measured_to_the_end(steps: int, wanted: str) -> None:
    """A lower bound is told as one, and the nearest miss repeats it."""
    asked = claim(request(count=4), constraints=[{"matchAttribute": TAG}])

    with patch.object(nearest_miss, "_STEPS", steps):
        outcome = solve(given([slice_of(gpus(5, **{TAG: ["x", "y", "y", "y", "x"]}))], asked))

    assert isinstance(outcome, NoFit)
    assert f"found {wanted}" in outcome.reasons[0].message
    miss = nearest(["n"], [outcome])
    assert miss is not None
    assert f"has {wanted.partition(' of')[0]} of 4 devices" in miss[1].message


def test_refusal_speaks_of_a_request_that_may_be_to_blame_when_it_cannot_tell_which_is() -> None:
    """Without work to find out which request fails, the first is told, with what is known of it."""
    asked = claim(request("a"), request("b"), request("c", count=3))

    with patch.object(nearest_miss, "_STEPS", 0):
        text = message_of([slice_of(gpus(4))], asked)

    assert text == "request a wants 1 device of class gpu, found at least 0 of 4"


def test_nearest_miss_is_the_node_with_most_to_be_had_when_another_has_more_that_are_tainted() -> None:
    """Ten tainted devices are no nearer to eleven than none."""
    outcomes = [
        solve(given(tainted(0, 10), claim(request(count=11)))),
        solve(given(tainted(8, 0), claim(request(count=11)))),
    ]

    miss = nearest(["a", "b"], outcomes)

    assert miss is not None
    assert miss[1].message == "nearest miss: node b has 8 of 11 devices for request r"


def test_refusal_counts_for_admin_access_what_others_hold_when_it_looks_only() -> None:
    """Admin access has what others have: only its own claim's devices are out of reach."""
    text = message_of([slice_of(gpus(2))], claim(request(count=3, adminAccess=True)), held=["gpu/dev-0"])

    assert text == "request r wants 3 devices of class gpu, found 2 of 2"


def test_refusal_counts_no_part_of_a_card_when_more_is_held_than_it_has() -> None:
    """Counters that are overdrawn serve nobody, not even a device that takes nothing of them."""
    free = device("free", consumesCounters=[{"counterSet": "card", "counters": {"slots": {"value": "0"}}}])
    big = device("big", consumesCounters=[{"counterSet": "card", "counters": {"slots": {"value": "2"}}}])

    text = message_of(card([free, big], slots=1), claim(request()), held=["gpu/big"])

    assert (
        text.partition(", ")[2]
        == "found 0 of 2 (1 device (free): big is held by claim a/b; 1 device: held by claim a/b)"
    )


def test_refusal_counts_shares_that_are_left_when_others_have_some() -> None:
    """A shared device pays its card once: with a share held it can be had whatever the card has
    left.
    """
    shared = [device(f"dev-{index}", memory="4", allowMultipleAllocations=True, **SLOT) for index in range(3)]
    situation = given(card(shared, slots=1), claim(request(count=2, capacity={"requests": {"memory": "1"}})))
    usage = replace(
        situation.usage, consumed={DeviceId("gpu.example.com", "node-1", "dev-1"): {"memory": Quantity.parse("1")}}
    )

    outcome = solve(replace(situation, usage=usage))

    assert isinstance(outcome, NoFit)
    assert "found 1 of 3 (2 devices (dev-0, dev-2): dev-1 is held by those who share it)" in summarize(outcome.reasons)


@pytest.mark.parametrize("mode", Mode)
def test_refusal_has_the_same_numbers_when_kubernetes_defects_are_kept(mode: Mode) -> None:
    """In both modes a tainted part of a card is not counted, whatever it did to the counters."""
    text = message_of(
        card([device("sick", **SLOT, **TAINT), device("part", **SLOT), device("plain")]),
        claim(request(count=3)),
        mode=mode,
    )

    assert "found 2 of 3 (1 device: tainted x=:NoSchedule)" in text
