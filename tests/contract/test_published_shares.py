"""What we publish of shares and partitions means to Kubernetes' allocator what it means to us:
recorded cases, with their devices said in our words and published.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lab.conformance.allocator_checks import answer_case
from topobus.engine.cel.selector import CelCompiler
from topobus.formats.kubernetes.slices import fault_of_shares, shared_counters, slice_device
from topobus.values.counters import CapacityPolicy, CounterSet, CounterUse
from topobus.values.device import Device
from topobus.values.partitions import partitioned
from topobus.values.quantity import Quantity

DATA = Path(__file__).parent.parent / "data" / "allocation" / "structured-allocation.jsonl.gz"
CHUNKS = 4
# So many of the 2,500 recorded cases have shares or counters.
FEWEST = 50


def _cases(chunk: int) -> Iterator[dict[str, Any]]:
    with gzip.open(DATA, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number % CHUNKS == chunk:
                yield json.loads(line)


def _amount(value: Any) -> int:
    quantity = Quantity.parse(value)
    assert quantity.nano % 10**9 == 0
    return quantity.nano // 10**9


def _policy(raw: Mapping[str, Any]) -> CapacityPolicy:
    span = raw.get("validRange") or {}
    amounts = {
        name: _amount(span[field])
        for name, field in (("minimum", "min"), ("maximum", "max"), ("step", "step"))
        if field in span
    }
    default = {"default": _amount(raw["default"])} if "default" in raw else {}
    return CapacityPolicy(valid_values=tuple(map(_amount, raw.get("validValues", ()))), **amounts, **default)


def _device(raw: Mapping[str, Any]) -> Device:
    """Say a recorded device in our words."""
    capacity = raw.get("capacity", {})
    return Device(
        name=raw["name"],
        device_class="gpu",
        allows_multiple=bool(raw.get("allowMultipleAllocations")),
        capacity={name: _amount(value["value"]) for name, value in capacity.items()},
        capacity_policies={
            name: _policy(value["requestPolicy"]) for name, value in capacity.items() if "requestPolicy" in value
        },
        consumes=tuple(
            CounterUse(counter_set=use["counterSet"], counter=name, amount=_amount(counter["value"]))
            for use in raw.get("consumesCounters", ())
            for name, counter in use["counters"].items()
        ),
    )


def _published(device: Device, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Give the recorded device with all that is shares and counters as we publish it.

    The rest stays recorded.
    """
    shown = json.loads(msgspec.json.encode(slice_device(device)))
    kept = {
        key: value
        for key, value in raw.items()
        if key not in ("allowMultipleAllocations", "capacity", "consumesCounters")
    }
    return kept | {
        key: value
        for key, value in shown.items()
        if key in ("allowMultipleAllocations", "capacity", "consumesCounters")
    }


def _republish(case: dict[str, Any]) -> bool:
    """Replace shares and counters of a case by what we publish.

    False for a case that has none, or says what no slice of ours would.
    """
    has_any = False
    for resource_slice in case["slices"]:
        spec = resource_slice.get("spec", resource_slice)
        sets = [
            CounterSet(
                name=it["name"], counters={name: _amount(counter["value"]) for name, counter in it["counters"].items()}
            )
            for it in spec.get("sharedCounters", ())
        ]
        if sets:
            has_any = True
            spec["sharedCounters"] = json.loads(msgspec.json.encode(shared_counters(sets)))
        for place, raw in enumerate(spec.get("devices", ())):
            if not raw.keys() & {"allowMultipleAllocations", "consumesCounters"}:
                continue
            device = _device(raw)
            if fault_of_shares(device):
                continue
            has_any = True
            spec["devices"][place] = _published(device, raw)
    return has_any


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_allocator_answers_as_recorded_when_we_publish_the_devices(chunk: int) -> None:
    """Outcome and results equal what Kubernetes 1.36.2 answered to the recorded slices."""
    compiler = CelCompiler()
    different: list[str] = []
    republished = 0
    for case in _cases(chunk):
        if not _republish(case):
            continue
        republished += 1
        expect, got = case["expect"], answer_case(case, compiler)
        if (got["outcome"], got.get("results")) != (expect["outcome"], expect.get("results")):
            different.append(case["id"])

    assert different == []
    assert republished >= FEWEST


def test_recorded_counters_are_taken_by_the_host_as_they_are() -> None:
    """What a driver could have said of recorded partitions passes the host's checks unchanged."""
    seen = 0
    for case in _cases(0):
        specs = [resource_slice.get("spec", resource_slice) for resource_slice in case["slices"]]
        sets = [
            CounterSet(
                name=it["name"], counters={name: _amount(counter["value"]) for name, counter in it["counters"].items()}
            )
            for spec in specs
            for it in spec.get("sharedCounters", ())
        ]
        if len({counter_set.name for counter_set in sets}) != len(sets):
            continue
        totals = {(it.name, name): total for it in sets for name, total in it.counters.items()}
        devices = [_device(raw) for spec in specs for raw in spec.get("devices", ()) if raw.get("consumesCounters")]
        fitting = [
            device
            for device in devices
            if all(use.amount <= totals.get((use.counter_set, use.counter), -1) for use in device.consumes)
        ]
        seen += bool(fitting)
        good, _, faults = partitioned(fitting, sets)
        assert (list(good), faults) == (fitting, {})

    assert seen > 0
