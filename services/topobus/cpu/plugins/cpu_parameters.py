"""Reads how a claim wants to use its CPUs: opaque parameters of kind CpuParameters, in the claim's
own configuration or in its class's.

When several entries set a field, the last one counts: claims come after classes. Sharing
configurations are read elsewhere. Any other kind is refused, because a misspelt kind must not be
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from topobus.formats.kubernetes.classic.classic_parameters import SHARING_KIND
from topobus.formats.kubernetes.shape import did_you_mean
from topobus.values.outcome import Refusal, refuse

__all__ = ["CpuParameters", "read_cpu_parameters"]

_KIND = "CpuParameters"
_VERSION = "topobus.dev/v1"
# The group of the class: beside devices of other classes, as in a shape, these parameters are for its CPUs alone.
_OF_CLASS = "cpu.topobus.dev/v1"
_FIELDS = ("withShared",)


class CpuParameters(Struct, frozen=True, kw_only=True):
    """How containers of a claim use its CPUs."""

    with_shared: bool = False
    """Besides their own CPUs they run on those of everybody: for threads that need no CPU of their
    own."""


def read_cpu_parameters(config: Sequence[Mapping[str, Any]]) -> CpuParameters | Refusal:
    """Read the parameters of one device.

    Errors: raises nothing; returns Refusal code cpu-parameters-invalid with the field, the value
    there and the value wanted.

    >>> read_cpu_parameters([{"apiVersion": "topobus.dev/v1", "kind": "CpuParameters", "withShared": True}])
    CpuParameters(with_shared=True)
    """
    parameters = CpuParameters()
    for entry in config:
        kind = entry.get("kind")
        if kind == SHARING_KIND:
            continue
        if kind != _KIND:
            return _refuse("kind", kind, f"{_KIND} or {SHARING_KIND}{did_you_mean(str(kind), (_KIND, SHARING_KIND))}")
        if entry.get("apiVersion") not in (_VERSION, _OF_CLASS):
            return _refuse("apiVersion", entry.get("apiVersion"), f"{_VERSION} or {_OF_CLASS}")
        for name, value in entry.items():
            if name in ("apiVersion", "kind"):
                continue
            if name not in _FIELDS:
                return _refuse(str(name), value, f"one of {', '.join(_FIELDS)}{did_you_mean(str(name), _FIELDS)}")
            if not isinstance(value, bool):
                return _refuse(name, value, "true or false")
            parameters = CpuParameters(with_shared=value)
    return parameters


def _refuse(field: str, got: object, wanted: str) -> Refusal:
    message = f"{_KIND}.{field} is {got!r}, wanted {wanted}"
    return refuse("cpu-parameters-invalid", message, field=f"{_KIND}.{field}", got=repr(got)[:64], wanted=wanted)
