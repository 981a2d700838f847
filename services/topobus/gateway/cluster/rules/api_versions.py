"""Converts objects between the version of resource.k8s.io that a server offers and v1.

v1beta2 differs from v1 only in its name. v1beta1 wraps everything of a device except its name.
Claims are only read, and the part that is read (status.allocation) is equal in all versions.
Source: k8s.io/api/resource/v1beta1 and v1beta2 types.go, 1.32 to 1.37.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["from_served", "to_served"]

_GROUP = "resource.k8s.io"
_WRAPPED = "v1beta1"


def to_served(kind: str, body: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Convert an object of v1 to a version's shape.

    >>> to_served("ResourceSlice", {"apiVersion": "resource.k8s.io/v1", "spec": {"devices": [{"name": "a", "taints": []}]}}, "v1beta1")
    {'apiVersion': 'resource.k8s.io/v1beta1', 'spec': {'devices': [{'name': 'a', 'basic': {'taints': []}}]}}
    """  # noqa: E501
    shown = {**body, "apiVersion": f"{_GROUP}/{version}"}
    if version == _WRAPPED and kind == "ResourceSlice":
        shown["spec"] = _with_devices(body.get("spec"), _wrap)
    return shown


def from_served(kind: str, body: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Convert an object from a version's shape to v1.

    >>> from_served("ResourceSlice", {"spec": {"devices": [{"name": "a", "basic": {"taints": []}}]}}, "v1beta1")["spec"]
    {'devices': [{'name': 'a', 'taints': []}]}
    """
    if version != _WRAPPED or kind != "ResourceSlice":
        return dict(body)
    return {**body, "spec": _with_devices(body.get("spec"), _unwrap)}


def _with_devices(spec: Any, change: Any) -> Any:
    if not isinstance(spec, Mapping) or not isinstance(spec.get("devices"), list | tuple):
        return spec
    return {
        **spec,
        "devices": [change(device) if isinstance(device, Mapping) else device for device in spec["devices"]],
    }


def _wrap(device: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": device.get("name"), "basic": {key: value for key, value in device.items() if key != "name"}}


def _unwrap(device: Mapping[str, Any]) -> dict[str, Any]:
    basic = device.get("basic")
    return {
        **{key: value for key, value in device.items() if key != "basic"},
        **(basic if isinstance(basic, Mapping) else {}),
    }
