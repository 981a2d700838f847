"""Where mode `corrected` differs from upstream: a situation for each row of the reference, and none
that the reference has not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from topobus.engine.allocation.values import (
    ALL_GATES,
    Allocated,
    AllocationInput,
    DeviceId,
    Gate,
    Mode,
    Outcome,
    Usage,
)
from topobus.formats.kubernetes.resource import DeviceClassSpec
from topobus.values.quantity import Quantity
from unit.controller.allocation import NODE, claim, device, gpus, request, slice_of, solve
from unit.controller.allocation import given as put_together

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "allocation.md"
TAG = "example.com/tag"


def given(mode: Mode, slices: list[Any], claims: Any, gates: frozenset[Gate] = ALL_GATES) -> AllocationInput:
    """Put an input together."""
    return put_together(slices, claims, mode=mode, gates=gates)


def tagged(*values: Any) -> list[dict[str, Any]]:
    """Describe devices with one attribute."""
    return gpus(len(values), **{TAG: values})


def counted(name: str, **fields: Any) -> dict[str, Any]:
    """Describe a device that uses one slot."""
    return device(name, consumesCounters=[{"counterSet": "card", "counters": {"slots": {"value": 1}}}], **fields)


def counters(driver: str, slots: int = 1) -> Any:
    """Publish the slots of a card, as the first of two slices."""
    return slice_of(
        [],
        driver=driver,
        name=f"{driver}-0",
        count=2,
        sharedCounters=[{"name": "card", "counters": {"slots": {"value": slots}}}],
    )


def cards(driver: str, *devices: dict[str, Any]) -> list[Any]:
    """Publish a card with devices that use its one slot."""
    return [counters(driver), slice_of(devices, driver=driver, name=f"{driver}-1", count=2)]


def shared_then_two(mode: Mode) -> AllocationInput:
    """The first choice for r0 is a shared device that r1 cannot match.

    The second uses the same slot.
    """
    first = counted("a", allowMultipleAllocations=True, attributes={TAG: "x"})
    slices = cards("gpu", first, counted("b", attributes={TAG: "y"}), device("c", attributes={TAG: "y", "last": True}))
    last = 'device.attributes["gpu.example.com"].?last.orValue(false)'
    requests = [request("r0", where=[f"!{last}"]), request("r1", where=[last])]
    return given(mode, slices, claim(*requests, constraints=[{"matchAttribute": TAG}]))


def two_configurations(mode: Mode) -> AllocationInput:
    """One configuration for two requests."""
    opaque = {"driver": "gpu.example.com", "parameters": {"a": 1}}
    return given(
        mode,
        [slice_of(gpus(2))],
        claim(request("a"), request("b"), config=[{"requests": ["a", "b"], "opaque": opaque}]),
    )


def no_longer_shared(mode: Mode) -> AllocationInput:
    """Shares are held of a device that is published as one for a single claim now."""
    allocation_input = given(mode, [slice_of(gpus(1))], claim(request()))
    return replace(
        allocation_input,
        usage=Usage(consumed={DeviceId("gpu.example.com", NODE, "dev-0"): {"memory": Quantity.parse("1Gi")}}),
    )


# Row of the page to a situation, and what its answers are: the devices, or the number
# of configurations, or nothing.
ROWS: dict[str, tuple[Callable[[Mode], AllocationInput], object, object]] = {
    "kubernetes #140300": (
        lambda mode: given(
            mode,
            [slice_of(tagged(["a", "b"], ["b"], ["a"], ["a"]))],
            claim(request(count=3), constraints=[{"matchAttribute": TAG}]),
        ),
        None,
        ["dev-0", "dev-2", "dev-3"],
    ),
    "#140438, #140600": (
        lambda mode: given(
            mode, [slice_of(tagged("x", "y", "x"))], claim(request(count=3), constraints=[{"distinctAttribute": TAG}])
        ),
        ["dev-0", "dev-1", "dev-2"],
        None,
    ),
    "#140434": (
        lambda mode: given(
            mode,
            [*cards("gpu", counted("g")), *cards("nic", counted("n"))],
            claim(request("g"), request("n", device_class="nic")),
        ),
        None,
        ["g", "n"],
    ),
    "#140436": (
        lambda mode: given(
            mode,
            cards("gpu", counted("a", taints=[{"key": "k", "effect": "NoSchedule"}]), counted("b")),
            claim(request()),
        ),
        None,
        ["b"],
    ),
    "#140729": (
        lambda mode: given(
            mode, cards("gpu", counted("a"), counted("b")), claim(request("look", adminAccess=True), request("use"))
        ),
        None,
        ["a", "b"],
    ),
    "#134100": (shared_then_two, None, ["b", "c"]),
    "a claim's configuration": (two_configurations, 2, 1),
    "a device with shares in use": (no_longer_shared, ["dev-0"], None),
    "with list attributes off": (
        lambda mode: put_together(
            [slice_of(tagged(["a"]))],
            claim(request(device_class="any"), constraints=[{"matchAttribute": TAG}]),
            mode=mode,
            gates=ALL_GATES - {Gate.LIST_ATTRIBUTES},
            classes={"any": DeviceClassSpec()},
        ),
        ["dev-0"],
        None,
    ),
}


def answer(outcome: Outcome, wanted: object) -> object:
    """Give what the situation looks at."""
    if not isinstance(outcome, Allocated):
        return None
    (result,) = outcome.results
    return (
        len(result.devices.config)
        if isinstance(wanted, int)
        else [granted_device.device for granted_device in result.devices.results]
    )


@pytest.mark.parametrize("row", ROWS)
def test_mode_corrected_differs_as_the_reference_says(row: str) -> None:
    """Upstream's answer in mode compatible, the right one in mode corrected."""
    make, compatible, corrected = ROWS[row]

    assert answer(solve(make(Mode.COMPATIBLE)), compatible) == compatible
    assert answer(solve(make(Mode.CORRECTED)), corrected) == corrected


@pytest.mark.parametrize("row", ["#140436", "#134100"])
def test_mode_compatible_gives_counters_back_as_a_newer_upstream_does(row: str) -> None:
    """Upstream has done it since 1.36.3."""
    make, _, corrected = ROWS[row]

    assert answer(solve(replace(make(Mode.COMPATIBLE), keeps_counters=False)), corrected) == corrected


def test_reference_lists_every_difference() -> None:
    """The table of modes has these rows and no other."""
    page = PAGE.read_text(encoding="utf-8")
    table = page[page.index("| upstream | compatible | corrected |") :].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \|$", table, re.MULTILINE)[1:]
    listed = [
        first if first != "-" else second for first, second in rows if not set(first) <= {"-", ":"} or first == "-"
    ]

    assert len(listed) == len(ROWS)
    assert all(any(text.startswith(row) for row in ROWS) for text in listed), listed
