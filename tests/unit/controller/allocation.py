"""Builders for allocation tests: a node, classes, slices and claims in a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from topobus.engine.allocation.pools import Slice
from topobus.engine.allocation.search import DEFAULT_STEP_BUDGET, allocate
from topobus.engine.allocation.values import (
    Allocated,
    AllocationInput,
    ClaimToAllocate,
    DeviceId,
    Gate,
    Mode,
    Node,
    Outcome,
    Usage,
)
from topobus.engine.cel.selector import CelCompiler
from topobus.formats.kubernetes.resource import (
    CelSelector,
    ClaimSpec,
    DeviceClassSpec,
    Selector,
    SliceSpec,
)
from topobus.formats.kubernetes.shape import read_as

COMPILER = CelCompiler()
NODE = "node-1"


def device(name: str, memory: str = "", **fields: Any) -> dict[str, Any]:
    """Describe a device; `attributes` may be plain values."""
    attributes = {key: _attribute(value) for key, value in (fields.pop("attributes", None) or {}).items()}
    fields_of_device = {"name": name, "attributes": attributes, **fields}
    return fields_of_device | ({"capacity": {"memory": {"value": memory}}} if memory else {})


def slice_of(
    devices: Sequence[Mapping[str, Any]], *, driver: str = "gpu", pool: str = NODE, name: str = "", **spec: Any
) -> Slice:
    """Publish devices of one pool; node-local and complete unless said otherwise."""
    generation, count = spec.pop("generation", 1), spec.pop("count", 1)
    place = (
        {} if {"allNodes", "nodeSelector", "nodeName", "perDeviceNodeSelection"} & spec.keys() else {"nodeName": NODE}
    )
    raw = {
        "driver": f"{driver}.example.com",
        "pool": {"name": pool, "generation": generation, "resourceSliceCount": count},
        "devices": list(devices),
        **place,
        **spec,
    }
    return Slice(name or f"{pool}-{driver}", read_as(raw, SliceSpec, where="slice"))


def request(
    name: str = "r", *, device_class: str = "gpu", count: int = 1, where: Sequence[str] = (), **fields: Any
) -> dict[str, Any]:
    """Ask for devices of one class."""
    selectors = [{"cel": {"expression": expression}} for expression in where]
    exactly = {"deviceClassName": device_class, "count": count, "selectors": selectors, **fields}
    if fields.get("allocationMode") == "All":
        del exactly["count"]
    return {"name": name, "exactly": exactly}


def claim(
    *requests: Mapping[str, Any],
    name: str = "default/c",
    constraints: Sequence[Mapping[str, Any]] = (),
    config: Sequence[Any] = (),
) -> ClaimToAllocate:
    """Make a claim of requests."""
    raw = {"devices": {"requests": list(requests), "constraints": list(constraints), "config": list(config)}}
    return ClaimToAllocate(name, read_as(raw, ClaimSpec, where="claim"))


def given(
    slices: Sequence[Slice],
    *claims: ClaimToAllocate,
    held: Sequence[str] = (),
    gates: frozenset[Gate] = frozenset(Gate),
    mode: Mode = Mode.CORRECTED,
    classes: Mapping[str, DeviceClassSpec] | None = None,
    labels: Mapping[str, str] | None = None,
) -> AllocationInput:
    """Put an input together; `held` are names like `gpu/dev-0`.

    Classes `gpu` and `nic` select by driver.
    """
    drivers = ("gpu", "nic")
    plain = {
        driver: DeviceClassSpec(
            selectors=(Selector(cel=CelSelector(expression=f'device.driver == "{driver}.example.com"')),)
        )
        for driver in drivers
    }
    holders = {
        DeviceId(f"{device_path.split('/')[0]}.example.com", NODE, device_path.split("/")[1]): "claim a/b"
        for device_path in held
    }
    return AllocationInput(
        node=Node(NODE, labels or {}),
        claims=tuple(replace(claim_to_allocate, is_one_of_several=len(claims) > 1) for claim_to_allocate in claims),
        classes=plain | dict(classes or {}),
        slices=tuple(slices),
        usage=Usage(holders),
        gates=gates,
        mode=mode,
    )


def solve(allocation_input: AllocationInput, *, step_budget: int = DEFAULT_STEP_BUDGET) -> Outcome:
    """Allocate with the real CEL engine."""
    return allocate(allocation_input, COMPILER, step_budget=step_budget)


def devices_of(outcome: Outcome) -> list[list[str]]:
    """Name the devices of each claim; fails when there is no allocation."""
    assert isinstance(outcome, Allocated), outcome
    return [[granted_device.device for granted_device in result.devices.results] for result in outcome.results]


def gpus(count: int, **attributes: Sequence[Any]) -> list[dict[str, Any]]:
    """Describe `count` devices dev-0, dev-1 and so on; each attribute gives one value a device."""
    return [
        device(f"dev-{index}", attributes={key: values[index] for key, values in attributes.items()})
        for index in range(count)
    ]


def _attribute(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"bool": value}
    if isinstance(value, int):
        return {"int": value}
    if isinstance(value, list | tuple):
        return {"ints" if isinstance(value[0], int) else "strings": list(value)}
    return {"string": value}
