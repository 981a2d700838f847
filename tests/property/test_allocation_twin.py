"""The allocator against a twin that tries everything: taints, counters, shared capacity,
constraints, alternatives and "all".

The twin knows the rules and nothing of the search: it lists every way to give devices to a
claim, in the order that the API promises, and takes the first that keeps all rules.
Machines are small enough for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import msgspec
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from support.laws import examples
from topobus.engine.allocation.values import Allocated, GaveUp, NoFit
from topobus.formats.kubernetes.resource import (
    ClaimRequest,
    ClaimSpec,
    ExactRequest,
    SliceDevice,
    SubRequest,
)
from topobus.formats.kubernetes.tolerations import tolerates
from topobus.values.quantity import Quantity
from unit.controller.allocation import claim, device, given, slice_of, solve

TAG = "example.com/tag"
Way = list[tuple[str, str]]
"""Request name and device, in order."""


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[Any], list[str], int]:
    """Draw the devices of one card with slots, and who holds some of them."""
    count = draw(st.integers(1, 5))
    slots = draw(st.integers(0, 4))
    devices: list[dict[str, Any]] = []
    for index in range(count):
        fields: dict[str, Any] = (
            {"attributes": {TAG: draw(st.sampled_from(["x", "y", ["x", "y"]]))}} if draw(st.booleans()) else {}
        )
        if draw(st.booleans()):
            fields["consumesCounters"] = [
                {"counterSet": "card", "counters": {"slots": {"value": draw(st.integers(1, 2))}}}
            ]
        taint = draw(st.sampled_from([None, None, "NoSchedule", "NoExecute", "None"]))
        if taint is not None:
            fields["taints"] = [{"key": draw(st.sampled_from(["k", "l"])), "value": "v", "effect": taint}]
        if draw(st.booleans()):
            fields["allowMultipleAllocations"] = True
        devices.append(device(f"dev-{index}", memory=str(draw(st.integers(1, 4))), **fields))
    slices = [
        slice_of([], name="0", count=2, sharedCounters=[{"name": "card", "counters": {"slots": {"value": slots}}}]),
        slice_of(devices, name="1", count=2),
    ]
    exclusive = [each_device["name"] for each_device in devices if not each_device.get("allowMultipleAllocations")]
    held = draw(st.lists(st.sampled_from(exclusive), unique=True, max_size=2)) if exclusive else []
    return slices, held, slots


@st.composite
def wanted(draw: st.DrawFn, *, most: int = 2) -> Any:
    """Draw a claim of one or two requests, each for `most` devices at most."""
    requests: list[dict[str, Any]] = []
    for index in range(draw(st.integers(1, 2))):
        if draw(st.integers(0, 3)) == 0:
            subs = [
                {"name": name, "deviceClassName": "gpu", **_fields(draw, most, may_be_all=False)}
                for name in ("first", "second")
            ]
            requests.append({"name": f"r{index}", "firstAvailable": subs})
        else:
            requests.append(
                {
                    "name": f"r{index}",
                    "exactly": {"deviceClassName": "gpu", **_fields(draw, most, may_be_all=index == 0)},
                }
            )
    has_all = any(request.get("exactly", {}).get("allocationMode") == "All" for request in requests)
    kinds = [[], [{"matchAttribute": TAG}], [{"distinctAttribute": TAG}], [{"requests": ["r0"], "matchAttribute": TAG}]]
    # Upstream makes a constraint that "all" breaks an error, which is another matter.
    return claim(*requests, constraints=draw(st.sampled_from(kinds[:1] if has_all else kinds)))


def _fields(draw: st.DrawFn, most: int, *, may_be_all: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"count": draw(st.integers(1, most))}
    if may_be_all and draw(st.integers(0, 4)) == 0:
        fields = {"allocationMode": "All"}
    if draw(st.booleans()):
        fields["tolerations"] = [{"key": draw(st.sampled_from(["k", "l"])), "operator": "Exists"}]
    if draw(st.booleans()):
        fields["capacity"] = {"requests": {"memory": str(draw(st.integers(1, 3)))}}
    if draw(st.integers(0, 2)) == 0:
        fields["selectors"] = [{"cel": {"expression": 'has(device.attributes["example.com"].tag)'}}]
    return fields


class Twin:
    """The rules."""

    def __init__(self, slices: list[Any], held: list[str], slots: int) -> None:
        self.devices: dict[str, SliceDevice] = {
            each_device.name: each_device for part in slices for each_device in part.spec.devices
        }
        self.held = set(held)
        self.slots = slots

    def first(self, spec: ClaimSpec) -> Way | None:
        """Give the first way that keeps all rules."""
        return next((way for way in self._ways(spec) if self._is_legal(spec, way)), None)

    def miss(self, spec: ClaimSpec) -> tuple[str, int, int]:
        """Name the first request that cannot be served beside those before it, how many devices it
        wants, and the most that it can have.

        Of alternatives the one that lacks least.
        """
        last = next(
            index
            for index in range(len(spec.devices.requests))
            if self.first(_with(spec, spec.devices.requests[: index + 1])) is None
        )
        request, before = spec.devices.requests[last], spec.devices.requests[:last]
        misses: list[tuple[int, str, int, int]] = []
        for option in (*request.first_available, *((request.exactly,) if request.exactly is not None else ())):
            name = f"{request.name}/{option.name}" if isinstance(option, SubRequest) else request.name
            is_all = option.allocation_mode == "All"
            count = sum(self._is_selected(option, device) for device in self.devices) if is_all else option.count or 1
            most = next(fewer for fewer in range(count, -1, -1) if self._can_have(spec, before, request, option, fewer))
            misses.append((count - most, name, count, most))
        return min(misses, key=lambda miss: miss[0])[1:]

    def _can_have(
        self,
        spec: ClaimSpec,
        before: tuple[ClaimRequest, ...],
        request: ClaimRequest,
        option: ExactRequest | SubRequest,
        count: int,
    ) -> bool:
        asked = msgspec.structs.replace(option, count=count, allocation_mode="ExactCount")
        one_way = (
            msgspec.structs.replace(request, first_available=(asked,))
            if isinstance(asked, SubRequest)
            else msgspec.structs.replace(request, exactly=asked)
        )
        return count == 0 or self.first(_with(spec, (*before, one_way))) is not None

    def _ways(self, spec: ClaimSpec, index: int = 0) -> Iterator[Way]:
        """List every way to serve the requests from `index` on: the first request's choices change
        last.
        """
        if index == len(spec.devices.requests):
            yield []
            return
        request = spec.devices.requests[index]
        options: list[tuple[str, ExactRequest | SubRequest]] = [
            (f"{request.name}/{sub_request.name}", sub_request) for sub_request in request.first_available
        ]
        if request.exactly is not None:
            options = [(request.name, request.exactly)]
        for name, each_request in options:
            names = [device for device in self.devices if self._is_selected(each_request, device)]
            chosen = (
                [tuple(names)]
                if each_request.allocation_mode == "All"
                else list(combinations(names, each_request.count or 1))
            )
            for devices in chosen:
                if not devices:
                    continue
                for rest in self._ways(spec, index + 1):
                    yield [*((name, device) for device in devices), *rest]

    def _is_selected(self, request: ExactRequest | SubRequest, name: str) -> bool:
        slice_device = self.devices[name]
        if request.selectors and TAG not in slice_device.attributes:
            return False
        # A request for more than the device has is never served by it, whoever holds what.
        return self._amount(request, slice_device) <= Quantity.parse(slice_device.capacity["memory"].value)

    def _amount(self, request: ExactRequest | SubRequest, slice_device: SliceDevice) -> Quantity:
        asked = request.capacity.requests.get("memory") if request.capacity is not None else None
        return Quantity.parse(asked if asked is not None else slice_device.capacity["memory"].value)

    def _is_legal(self, spec: ClaimSpec, way: Way) -> bool:
        by_name: Mapping[str, ExactRequest | SubRequest] = {
            **{request.name: request.exactly for request in spec.devices.requests if request.exactly is not None},
            **{
                f"{request.name}/{sub.name}": sub
                for request in spec.devices.requests
                for sub in request.first_available
            },
        }
        used: dict[str, Quantity] = {}
        seen: set[str] = set()
        for request, name in way:
            slice_device = self.devices[name]
            if name in self.held or (name in seen and not slice_device.allow_multiple_allocations):
                return False
            bad = [taint for taint in slice_device.taints if taint.effect in ("NoSchedule", "NoExecute")]
            if not all(any(tolerates(bears, taint) for bears in by_name[request].tolerations) for taint in bad):
                return False
            used[name] = used.get(name, Quantity(0)) + self._amount(by_name[request], slice_device)
            if used[name] > Quantity.parse(slice_device.capacity["memory"].value):
                return False
            seen.add(name)
        return self._has_slots(seen) and self._keeps_constraints(spec, way)

    def _has_slots(self, seen: set[str]) -> bool:
        paying = [
            counter_consumption
            for name in {*seen, *self.held}
            for counter_consumption in self.devices[name].consumes_counters
        ]
        total = sum(Quantity.parse(counter_consumption.counters["slots"].value).units for counter_consumption in paying)
        counter_consumptions = [
            counter_consumption for name in seen for counter_consumption in self.devices[name].consumes_counters
        ]
        return not counter_consumptions or total <= self.slots

    def _keeps_constraints(self, spec: ClaimSpec, way: Way) -> bool:
        for constraint in spec.devices.constraints:
            devices = [
                name
                for request, name in way
                if not constraint.requests or request.partition("/")[0] in constraint.requests
            ]
            values = [self._values(name) for name in devices]
            if not all(values):
                return False
            if constraint.match_attribute and values and not frozenset.intersection(*values):
                return False
            if constraint.distinct_attribute and any(first & second for first, second in combinations(values, 2)):
                return False
        return True

    def _values(self, name: str) -> frozenset[str]:
        attribute = self.devices[name].attributes.get(TAG)
        if attribute is None:
            return frozenset()
        return frozenset(attribute.strings) if attribute.strings is not None else frozenset({str(attribute.string)})


def _with(spec: ClaimSpec, requests: tuple[ClaimRequest, ...]) -> ClaimSpec:
    return msgspec.structs.replace(spec, devices=msgspec.structs.replace(spec.devices, requests=requests))


@settings(deadline=None, max_examples=examples(400))
@for_all(machines(), wanted())
def test_allocate_finds_the_first_way_that_keeps_all_rules(
    machine: tuple[list[Any], list[str], int], claim_object: Any
) -> None:
    """What the twin finds first is what the search finds.

    Where the twin finds nothing, the search finds nothing.
    """
    slices, held, slots = machine
    way = Twin(slices, held, slots).first(claim_object.spec)

    outcome = solve(given(slices, claim_object, held=[f"gpu/{name}" for name in held]))

    assert not isinstance(outcome, GaveUp)
    granted = (
        [(grant.request, grant.device) for grant in outcome.results[0].devices.results]
        if isinstance(outcome, Allocated)
        else None
    )
    assert granted == way


@settings(deadline=None, max_examples=examples(400))
@for_all(machines(), wanted(most=4))
def test_allocate_tells_the_most_that_a_request_can_have_when_nothing_fits(
    machine: tuple[list[Any], list[str], int], claim_object: Any
) -> None:
    """A refusal's numbers are those that trying everything gives, and each device is either found
    or has a reason.
    """
    slices, held, slots = machine

    outcome = solve(given(slices, claim_object, held=[f"gpu/{name}" for name in held]))

    if not isinstance(outcome, NoFit):
        return
    summary, *groups = outcome.reasons
    assert (summary.facts["request"], summary.facts["wanted"], summary.facts["found"]) == Twin(
        slices, held, slots
    ).miss(claim_object.spec)
    assert "found_at_least" not in summary.facts
    counts = [reason.facts["count"] for reason in groups]
    assert summary.facts["devices"] == summary.facts["found"] + sum(count for count in counts if isinstance(count, int))
    assert (
        not any("another request" in reason.message for reason in groups) or len(claim_object.spec.devices.requests) > 1
    )
