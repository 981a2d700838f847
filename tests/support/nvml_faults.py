"""One fault for each sign that NVML can show, with the library's answers for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from topobus.values.health import HealthState

__all__ = ["NVML_FAULTS", "NvmlFault"]


@dataclass(frozen=True, kw_only=True)
class NvmlFault:
    """A GPU's part of the profile before and after. The names are those of FakeGpu."""

    code: str
    state: HealthState
    after: dict[str, Any]
    before: dict[str, Any] = field(default_factory=dict)
    is_rise: bool = False
    """A counter rose by little: the sign is over with the next look."""


_LINKS = ("switch 5 0", "switch 5 0")
_FABRIC_OK, _ROUTE_UNHEALTHY, _DEGRADED_BW = 0x2A, 0x1A, 0x29
_IN_FABRIC = {"fabric": (3, 0, _FABRIC_OK)}
_BAD, _MILD = HealthState.UNHEALTHY, HealthState.DEGRADED

NVML_FAULTS = (
    NvmlFault(code="ecc-uncorrected", state=_BAD, after={"ecc": (0, 2)}, is_rise=True),
    NvmlFault(code="page-retirement-pending", state=_MILD, before={"retired": 0}, after={"retired": 1}),
    NvmlFault(code="row-remap-pending", state=_MILD, after={"rows": (0, 1, 1, 0)}),
    NvmlFault(code="row-remap-failed", state=_BAD, after={"rows": (0, 1, 0, 1)}),
    NvmlFault(code="recovery-advised", state=_BAD, after={"recovery": 1}),
    NvmlFault(code="thermal-slowdown", state=_MILD, after={"clocks": 0x40}),
    NvmlFault(code="nvlink-down", state=_MILD, before={"links": _LINKS}, after={"links": ("switch 5 0", "down")}),
    NvmlFault(
        code="nvlink-errors",
        state=_MILD,
        before={"links": _LINKS},
        after={"links": ("switch 5 0", "switch 5 1")},
        is_rise=True,
    ),
    NvmlFault(
        code="nvlink-errors",
        state=_MILD,
        before={"links": _LINKS},
        after={"links": ("switch 105 0", "switch 5 0")},
        is_rise=True,
    ),
    NvmlFault(code="fabric-not-ready", state=_BAD, before=_IN_FABRIC, after={"fabric": (2, 0, 0)}),
    NvmlFault(code="fabric-failed", state=_BAD, before=_IN_FABRIC, after={"fabric": (3, 999, _FABRIC_OK)}),
    NvmlFault(code="fabric-failed", state=_BAD, before=_IN_FABRIC, after={"fabric": (3, 0, _ROUTE_UNHEALTHY)}),
    NvmlFault(code="fabric-degraded", state=_MILD, before=_IN_FABRIC, after={"fabric": (3, 0, _DEGRADED_BW)}),
    NvmlFault(code="xid", state=_BAD, after={"events": ((1, 8, 79),)}),
    NvmlFault(code="gpu-lost", state=_BAD, after={"error": 15}),
    NvmlFault(code="unmonitored", state=HealthState.UNKNOWN, after={"error": 999}),
)
