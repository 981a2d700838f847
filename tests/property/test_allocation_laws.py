"""Laws of the allocator: what holds for any machine and any claim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from support.laws import examples
from topobus.engine.allocation import search
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import (
    Allocated,
    AllocationInput,
    Mode,
    Outcome,
)
from unit.controller.allocation import COMPILER, claim, device, given, request, slice_of, solve

ROOT = "resource.kubernetes.io/pcieRoot"


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Any], list[Any], list[str]]:
    """Draw slices of two drivers, claims with constraints, and what is held."""
    slices = []
    names: list[str] = []
    for driver in ("gpu", "nic"):
        count = draw(st.integers(0, 5))
        devices = []
        for index in range(count):
            attributes: dict[str, Any] = {"model": draw(st.sampled_from(["a", "b"]))}
            if draw(st.booleans()):
                attributes[ROOT] = draw(st.sampled_from(["r0", "r1", "r2"]))
            taints = [{"key": "k", "effect": "NoSchedule"}] if draw(st.integers(0, 9)) == 0 else []
            slots = {"slots": {"value": draw(st.integers(1, 2))}}
            taken = [{"counterSet": "card", "counters": slots}] if draw(st.booleans()) else []
            devices.append(device(f"dev-{index}", attributes=attributes, taints=taints, consumesCounters=taken))
            names.append(f"{driver}/dev-{index}")
        cut = draw(st.integers(0, count))
        card = [{"name": "card", "counters": {"slots": {"value": draw(st.integers(1, 5))}}}]
        slices += [
            slice_of(devices[:cut], driver=driver, name=f"{driver}-0", count=3),
            slice_of(devices[cut:], driver=driver, name=f"{driver}-1", count=3),
            slice_of([], driver=driver, name=f"{driver}-2", count=3, sharedCounters=card),
        ]
    claims = []
    for number in range(draw(st.integers(1, 2))):
        requests = [
            request(
                f"r{index}",
                device_class=draw(st.sampled_from(["gpu", "nic"])),
                count=draw(st.integers(1, 3)),
                where=draw(st.sampled_from([[], ["device.attributes[device.driver].model == 'a'"]])),
            )
            for index in range(draw(st.integers(1, 2)))
        ]
        constraints = draw(
            st.sampled_from([[], [{"matchAttribute": ROOT}], [{"requests": ["r0"], "distinctAttribute": ROOT}]])
        )
        claims.append(claim(*requests, name=f"default/c{number}", constraints=constraints))
    held = draw(st.lists(st.sampled_from(names), unique=True, max_size=3)) if names else []
    return slices, claims, held


def _answer(outcome: Outcome) -> object:
    return outcome.results if isinstance(outcome, Allocated) else type(outcome)


@settings(deadline=None, max_examples=examples(150))
@for_all(situations(), st.randoms(use_true_random=False))
def test_allocate_gives_the_same_answer_in_any_order_of_arrival(
    situation: tuple[list[Any], list[Any], list[str]], random: Any
) -> None:
    """Slices and holders may arrive in any order: the answer is the same."""
    slices, claims, held = situation
    shuffled = random.sample(slices, len(slices))

    outcome = solve(given(slices, *claims, held=held))
    other = solve(given(shuffled, *claims, held=list(reversed(held))))

    assert _answer(outcome) == _answer(other)


@settings(deadline=None, max_examples=examples(150))
@for_all(situations())
def test_allocate_gives_no_device_twice_and_keeps_every_promise(
    situation: tuple[list[Any], list[Any], list[str]],
) -> None:
    """What is allocated is free, wanted in this number, untainted, unique, and satisfies the
    constraints.
    """
    slices, claims, held = situation
    outcome = solve(given(slices, *claims, held=held))
    if not isinstance(outcome, Allocated):
        return
    published = {
        (resource_slice.spec.driver, found_device.name): found_device
        for resource_slice in slices
        for found_device in resource_slice.spec.devices
    }
    granted = [
        (granted_device.driver, granted_device.device)
        for result in outcome.results
        for granted_device in result.devices.results
    ]

    assert len(set(granted)) == len(granted)
    assert not {f"{driver.split('.')[0]}/{name}" for driver, name in granted} & set(held)
    assert not any(published[device].taints for device in granted)
    for wanted, result in zip(claims, outcome.results, strict=True):
        for each_request in wanted.spec.devices.requests:
            granted_devices = [granted for granted in result.devices.results if granted.request == each_request.name]
            assert len(granted_devices) == each_request.exactly.count
            assert {granted.driver for granted in granted_devices} == {
                f"{each_request.exactly.device_class_name}.example.com"
            }
        for constraint in wanted.spec.devices.constraints:
            values = [
                published[granted_device.driver, granted_device.device].attributes.get(ROOT)
                for granted_device in result.devices.results
                if not constraint.requests or granted_device.request in constraint.requests
            ]
            texts = [value.string for value in values if value is not None]
            assert len(texts) == len(values)
            assert len(set(texts)) == (1 if constraint.match_attribute else len(texts))


@settings(deadline=None, max_examples=examples(300))
@for_all(situations(), st.sampled_from(Mode), st.booleans())
def test_allocate_leaves_out_only_what_must_fail_when_clever(
    situation: tuple[list[Any], list[Any], list[str]], mode: Mode, keeps_counters: bool
) -> None:
    """The short cuts of the search change how long it takes, never the answer."""
    slices, claims, held = situation
    allocation_input = replace(given(slices, *claims, held=held, mode=mode), keeps_counters=keeps_counters)

    with patch.object(search, "_HARD_STEPS", 0):
        clever = allocate(allocation_input, COMPILER)
    plain = allocate(allocation_input, COMPILER, is_clever=False)

    assert _answer(clever) == _answer(plain)
    assert clever.steps <= plain.steps


@settings(deadline=None, max_examples=examples(100))
@for_all(situations())
def test_allocate_refuses_only_what_a_fresh_look_refuses_too(situation: tuple[list[Any], list[Any], list[str]]) -> None:
    """The same input gives the same outcome, reasons and steps included: nothing is kept between
    two searches.
    """
    slices, claims, held = situation
    allocation_input: AllocationInput = given(slices, *claims, held=held)

    assert solve(allocation_input) == solve(allocation_input)
