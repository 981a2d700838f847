"""Objects of resource.k8s.io/v1beta1 and v1beta2 converted to v1, as an API server does when it
stores them.

Pure. v1beta2 differs only in its name. v1beta1 has the fields of `exactly` in the request itself,
and those of a device below `basic`. Source: k8s.io/api/resource/v1beta1 and v1beta2 types.go, 1.32
to 1.36; k8s.io/kubernetes/pkg/apis/resource/v1beta1/conversion.go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["CONVERTED_VERSIONS", "as_v1", "spec_as_v1"]

CONVERTED_VERSIONS = ("resource.k8s.io/v1beta2", "resource.k8s.io/v1beta1")
"""Versions that are read as v1, newest first."""

_KINDS = ("DeviceClass", "ResourceClaim", "ResourceClaimTemplate", "ResourceSlice")


def as_v1(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert an object to v1. Objects of other kinds or versions are returned unchanged.

    Errors: raises nothing. A part with a wrong shape keeps it, and the reader of v1 refuses it.

    >>> as_v1({"apiVersion": "resource.k8s.io/v1beta1", "kind": "ResourceClaim", "spec": {"devices": {"requests": [{"name": "a", "count": 2}]}}})["spec"]
    {'devices': {'requests': [{'name': 'a', 'exactly': {'count': 2}}]}}
    """  # noqa: E501
    kind, version = value.get("kind"), value.get("apiVersion")
    if kind not in _KINDS or version not in CONVERTED_VERSIONS:
        return value
    upgraded = {"spec": spec_as_v1(kind, version.rpartition("/")[2], value["spec"])} if "spec" in value else {}
    return {**value, "apiVersion": "resource.k8s.io/v1", **upgraded}


def spec_as_v1(kind: str, version: str, spec: Any) -> Any:
    """Convert an object's spec to v1.

    Shapes: version — without the group: `v1beta1`.
    Errors: as `as_v1`.
    """
    match kind if version == "v1beta1" else "":
        case "ResourceClaim":
            return _claim_spec(spec)
        case "ResourceClaimTemplate":
            return _within(spec, "spec", _claim_spec)
        case "ResourceSlice":
            return _within(spec, "devices", lambda devices: _each(devices, _device))
        case _:
            return spec


def _claim_spec(spec: Any) -> Any:
    return _within(
        spec, "devices", lambda devices: _within(devices, "requests", lambda requests: _each(requests, _request))
    )


def _request(request: Any) -> Any:
    """Put a request's own fields below `exactly`, unless it has alternatives."""
    if not isinstance(request, Mapping) or "exactly" in request or request.get("firstAvailable"):
        return request
    return {
        **{key: value for key, value in request.items() if key == "name"},
        "exactly": {key: value for key, value in request.items() if key not in ("name", "firstAvailable")},
    }


def _device(device: Any) -> Any:
    """Move a device's fields out of `basic`."""
    basic = device.get("basic") if isinstance(device, Mapping) else None
    return (
        {**{key: value for key, value in device.items() if key != "basic"}, **basic}
        if isinstance(basic, Mapping)
        else device
    )


def _within(value: Any, key: str, change: Callable[[Any], Any]) -> Any:
    return {**value, key: change(value[key])} if isinstance(value, Mapping) and key in value else value


def _each(values: Any, change: Callable[[Any], Any]) -> Any:
    return [change(value) for value in values] if isinstance(values, list) else values
