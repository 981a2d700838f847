"""Converts objects of an API server to the controller's form: the shape of resource.k8s.io/v1,
reduced to the fields in use.

A cluster has many pods and nodes, so most fields are dropped. A pod that has no claims and is not
behind the scheduling gate is not kept at all.

Source: k8s.io/api/resource/v1beta1 (requests without `exactly`) and v1, 1.36.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from topobus.formats.first_read import ready
from topobus.formats.kubernetes.objects import Metadata
from topobus.formats.kubernetes.older_versions import spec_as_v1
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError

__all__ = ["downgraded_claim", "is_path_segment", "read_object", "salvaged_claim"]

_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "generation",
    "labels",
    "annotations",
    "finalizers",
    "ownerReferences",
)
_POD_SPEC = (
    "schedulingGates",
    "resourceClaims",
    "nodeName",
    "nodeSelector",
    "tolerations",
    "affinity",
    "priority",
    "overhead",
)
_WAITING_POD_SPEC = ("preemptionPolicy", "resources")
_POD_STATUS = ("phase", "resourceClaimStatuses", "conditions", "nominatedNodeName")
_NODE_SPEC = ("taints", "unschedulable")
# Characters of the longest name of any object (apimachinery, NameMaximumLength is 253).
_LONGEST_NAME = 253


def read_object(kind: str, version: str, plain: Mapping[str, Any]) -> ApiObject | None:
    """Read a server's object, and keep the fields in use. None for an object that is not needed.

    Errors: raises ContractError for what is no object of this kind.
    """
    metadata = {
        key: value for key, value in _part(plain, "metadata", kind).items() if key in _METADATA and value is not None
    }
    if not isinstance(metadata.get("name"), str) or not metadata["name"]:
        raise ContractError(f"{kind}: metadata.name: got {metadata.get('name')!r}, wanted a name")
    _check_metadata(kind, metadata)
    for part in ("name", "namespace"):
        if not is_path_segment(metadata.get(part) or "x"):
            raise ContractError(
                f"{kind}: metadata.{part}: got {metadata[part][:100]!r}, wanted a name that can be part of a path"
            )
    spec, status = spec_as_v1(kind, version, _part(plain, "spec", kind)), _part(plain, "status", kind)
    match kind:
        case "Pod":
            if not spec.get("resourceClaims") and not spec.get("schedulingGates"):
                return None
            waits = not spec.get("nodeName")
            containers = {
                key: [_sized(container) for container in _list(spec.get(key))]
                for key in ("containers", "initContainers")
                if waits and key in spec
            }
            fields = _POD_SPEC + (_WAITING_POD_SPEC if waits else ())
            spec = {key: spec[key] for key in fields if key in spec} | containers
            if "affinity" in spec:
                affinity = spec["affinity"] if isinstance(spec["affinity"], Mapping) else {}
                spec["affinity"] = {key: affinity[key] for key in ("nodeAffinity",) if affinity.get(key)}
            status = {key: status[key] for key in _POD_STATUS if key in status}
            metadata.pop("labels", None)
        case "Node":
            spec, status = {key: spec[key] for key in _NODE_SPEC if key in spec}, {}
            metadata.pop("annotations", None)
        case "ResourceSlice":
            metadata = {
                key: value
                for key, value in metadata.items()
                if key in ("name", "uid", "resourceVersion", "ownerReferences")
            }
    group = "v1" if kind in ("Pod", "Node") else "resource.k8s.io/v1"
    return ApiObject(api_version=group, kind=kind, metadata=metadata, spec=dict(spec), status=dict(status))


def is_path_segment(name: str) -> bool:
    r"""Say whether a name can be a part of an API server's path, as every object's name must be
    (ValidatePathSegmentName).

    >>> is_path_segment("a.b"), is_path_segment(".."), is_path_segment("a/b"), is_path_segment("a\0")
    (True, False, False, False)
    """
    return (
        name not in (".", "..")
        and name.isprintable()
        and not any(mark in name for mark in "/%?# ")
        and 0 < len(name) <= _LONGEST_NAME
    )


def salvaged_claim(key: tuple[str, str], plain: Mapping[str, Any]) -> ApiObject:
    """Make a claim of the readable parts of one that cannot be read: its name, and the devices that
    its status names.
    """
    metadata, status = plain.get("metadata"), plain.get("status")
    uid = metadata.get("uid") if isinstance(metadata, Mapping) else ""
    allocation = status.get("allocation") if isinstance(status, Mapping) else None
    devices = allocation.get("devices") if isinstance(allocation, Mapping) else None
    results = devices.get("results") if isinstance(devices, Mapping) else None
    named = [
        {"request": "unknown", **{field: result[field] for field in ("driver", "pool", "device")}}
        for result in (results if isinstance(results, list) else ())
        if isinstance(result, Mapping)
        and all(isinstance(result.get(field), str) for field in ("driver", "pool", "device"))
    ]
    kept = {"allocation": {"devices": {"results": named}}} if named else {}
    identity = {"namespace": key[0], "name": key[1], "uid": uid if isinstance(uid, str) else ""}
    return ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata=identity, spec={}, status=kept)


def downgraded_claim(spec: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Write a v1 claim's spec in the form of the version that the server serves."""
    if version != "v1beta1":
        return dict(spec)
    devices = dict(spec.get("devices") or {})
    requests = [
        {"name": request.get("name"), **request["exactly"]}
        if isinstance(request, Mapping) and isinstance(request.get("exactly"), Mapping)
        else request
        for request in _list(devices.get("requests"))
    ]
    return {**spec, "devices": {**devices, **({"requests": requests} if requests else {})}}


def _sized(container: object) -> dict[str, Any]:
    """Keep a container's resource requests."""
    fields = container if isinstance(container, Mapping) else {}
    return {key: fields[key] for key in ("name", "resources", "restartPolicy") if key in fields}


def _check_metadata(kind: str, metadata: Mapping[str, Any]) -> None:
    """Refuse metadata with a malformed part: read as absent, a malformed annotation of ours would
    look as if there were none.
    """
    try:
        msgspec.convert(metadata, ready(Metadata))
    except (msgspec.ValidationError, RecursionError) as err:
        raise ContractError(f"{kind} {metadata['name']}: metadata: {err}") from err


def _part(plain: Mapping[str, Any], name: str, kind: str) -> dict[str, Any]:
    part = plain.get(name)
    if part is not None and not isinstance(part, Mapping):
        raise ContractError(f"{kind}: {name}: got {type(part).__name__}, wanted an object")
    return dict(part or {})


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
