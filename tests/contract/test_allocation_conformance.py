"""The allocator's mode `compatible` answers as Kubernetes' own allocator did."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from topobus.contracts.codec import encode
from topobus.contracts.kubernetes.resource import ClaimSpec, DeviceClassSpec, SliceSpec
from topobus.contracts.kubernetes.shape import read_as
from topobus.controller.cel import CelCompiler
from topobus.controller.core.search import allocate
from topobus.controller.core.values import (
    Allocated,
    AllocationInput,
    ClaimToAllocate,
    DeviceId,
    Fault,
    Gate,
    GaveUp,
    Node,
    NoFit,
    Outcome,
    Slice,
    Usage,
)
from topobus.domain.quantity import Quantity

DATA = Path(__file__).parent.parent / "data" / "allocation" / "structured-allocation.jsonl.gz"
CHUNKS = 10


def _read(case: dict[str, Any]) -> AllocationInput:
    allocated = case["allocated"]
    return AllocationInput(
        node=Node(case["node"]["metadata"]["name"], case["node"]["metadata"].get("labels", {})),
        claims=tuple(
            ClaimToAllocate(f"{one['metadata']['namespace']}/{one['metadata']['name']}", read_as(one["spec"], ClaimSpec, where="claim"))
            for one in case["claims"]
        ),
        classes={one["metadata"]["name"]: read_as(one["spec"], DeviceClassSpec, where="class") for one in case["classes"]},
        slices=tuple(Slice(one["metadata"]["name"], read_as(one["spec"], SliceSpec, where="slice")) for one in case["slices"]),
        usage=Usage(
            {DeviceId(*one.split("/")): "somebody" for one in allocated.get("devices") or ()},
            {
                DeviceId(*one.split("/")): {name: Quantity.parse(amount) for name, amount in used.items()}
                for one, used in (allocated.get("consumedCapacity") or {}).items()
            },
        ),
        gates=frozenset(Gate(one) for one in case["features"]),
    )


def _answer(outcome: Outcome) -> tuple[str, list[Any] | None]:
    match outcome:
        case Allocated():
            results = json.loads(encode(outcome.results))
            for result in results:
                for device in result["devices"].get("results", ()):
                    if "shareID" in device:
                        device["shareID"] = "SHARE"
            return "allocated", results
        case NoFit():
            return "no-fit", None
        case Fault():
            return ("node-error" if outcome.is_local else "error"), None
        case GaveUp():
            return "gave-up", None


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_allocate_equals_upstream_when_compatible(chunk: int) -> None:
    """Outcome and results equal what Kubernetes 1.36.2 answered, in every recorded case."""
    compiler = CelCompiler()
    different: list[tuple[str, object, object]] = []
    with gzip.open(DATA, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number % CHUNKS == chunk:
                case = json.loads(line)
                expected = (case["expect"]["outcome"], case["expect"].get("results"))
                got = _answer(allocate(_read(case), compiler))
                if got != expected:
                    different.append((case["id"], got, expected))

    assert different == []


def test_allocate_takes_the_very_steps_of_upstream_when_told_to() -> None:
    """Without its short cuts the search is upstream's, step by step; so the order of its checks is, too."""
    compiler = CelCompiler()
    different: list[tuple[str, object, object]] = []
    with gzip.open(DATA, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            case = json.loads(line)
            steps = case["expect"].get("steps")
            if number % CHUNKS == 0 and steps is not None and steps < 1000:
                outcome = allocate(_read(case), compiler, is_clever=False)
                if outcome.steps != steps:
                    different.append((case["id"], outcome.steps, steps))

    assert different == []
