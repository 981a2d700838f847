"""Objects of resource.k8s.io/v1 with one part of interest, and what the checks of the limits say of
them.
"""

from __future__ import annotations

from typing import Any

from topobus.formats.kubernetes import resource as r
from topobus.formats.kubernetes.limits import (
    check_allocation,
    check_claim,
    check_class,
    check_slice,
    check_status,
)
from topobus.formats.kubernetes.shape import Problem, read_as

UUID = "123e4567-e89b-12d3-a456-42661417400"


def claim(devices: dict[str, Any]) -> list[Problem]:
    """Check a claim."""
    return check_claim(read_as({"devices": {"requests": [request("r0")], **devices}}, r.ClaimSpec, where="claim"))


def request(name: str = "r", **fields: Any) -> dict[str, Any]:
    """Ask for one device."""
    return {"name": name, "exactly": {"deviceClassName": "gpu", **fields}}


def asking(**fields: Any) -> list[Problem]:
    """Check a claim with one request."""
    return claim({"requests": [request(**fields)]})


def a_class(**fields: Any) -> list[Problem]:
    """Check a class."""
    return check_class(read_as(fields, r.DeviceClassSpec, where="class"))


def a_slice(**fields: Any) -> list[Problem]:
    """Check a slice of no devices."""
    base = {"driver": "d.io", "pool": {"name": "p", "resourceSliceCount": 1}}
    place = (
        {} if {"nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection"} & fields.keys() else {"nodeName": "n"}
    )
    return check_slice(read_as({**base, **place, **fields}, r.SliceSpec, where="slice"))


def device(name: str = "d", **fields: Any) -> list[Problem]:
    """Check a slice of one device."""
    return a_slice(devices=[{"name": name, **fields}])


def many(count: int, **fields: Any) -> list[Problem]:
    """Check a slice of so many devices."""
    return a_slice(devices=[{"name": f"d{index}", **fields} for index in range(count)])


def opaque(size: int = 0, driver: str = "d.io", **fields: Any) -> dict[str, Any]:
    """Configure a driver with parameters of so many bytes."""
    return {"opaque": {"driver": driver, "parameters": {"a": "x" * (size - len('{"a":""}'))}}, **fields}


def selectors(count: int) -> list[dict[str, Any]]:
    """Select by so many expressions."""
    return [{"cel": {"expression": "true"}}] * count


def tolerations(count: int) -> list[dict[str, Any]]:
    """Tolerate everything so often."""
    return [{"operator": "Exists"}] * count


def names(count: int) -> list[str]:
    """Make so many names."""
    return [f"c{index}" for index in range(count)]


def counters(count: int) -> dict[str, Any]:
    """Make so many counters."""
    return {name: {"value": 1} for name in names(count)}


def granted(**fields: Any) -> dict[str, Any]:
    """Grant a device."""
    return {"request": "r", "driver": "d.io", "pool": "p", "device": "d", **fields}


def allocation(spec: r.ClaimSpec | None = None, **devices: Any) -> list[Problem]:
    """Check an allocation."""
    return check_allocation(read_as({"devices": devices}, r.AllocationResult, where="allocation"), spec)


def status(**fields: Any) -> list[Problem]:
    """Check the status of an allocated claim."""
    base = {"allocation": {"devices": {"results": [granted()]}}}
    return check_status(read_as({**base, **fields}, r.ClaimStatus, where="status"))


def said(**fields: Any) -> list[Problem]:
    """Check what a driver says about a device."""
    return status(devices=[{"driver": "d.io", "pool": "p", "device": "d", **fields}])


def users(count: int) -> list[dict[str, Any]]:
    """Name so many pods."""
    return [{"resource": "pods", "name": f"p{index}", "uid": f"u{index}"} for index in range(count)]


def policy(**fields: Any) -> list[Problem]:
    """Check a policy of a capacity of 1000."""
    return device(allowMultipleAllocations=True, capacity={"m": {"value": 1000, "requestPolicy": fields}})
