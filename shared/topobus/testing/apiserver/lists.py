"""Lists that Kubernetes treats as maps or sets, for the API server simulator's patches: the key
that identifies an element.

Pure.
Source: the patchMergeKey and listMapKey markers of k8s.io/api (core/v1, apps/v1, resource/v1) and
k8s.io/apimachinery/meta/v1, 1.36; strategic merge's directives from
apimachinery/pkg/util/strategicpatch.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from topobus.testing.apiserver.values import bad_request

__all__ = ["from_keyed", "strategic_merge", "to_keyed"]

# By the field's name alone: within what is served here, no name means two
# different things, but for `devices`.
_MERGE_KEYS = {
    "addresses": "type",
    "conditions": "type",
    "containers": "name",
    "env": "name",
    "ephemeralContainers": "name",
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ownerReferences": "uid",
    "podIPs": "ip",
    "ports": "containerPort",
    "reservedFor": "uid",
    "resourceClaimStatuses": "name",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
    "volumeDevices": "devicePath",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
_SETS = ("finalizers",)
# ResourceClaim.status.devices, for server-side apply alone: strategic merge replaces this list.
_DEVICES = ("status", "devices")
_STATUS_DEVICES = ("driver", "device", "pool", "shareID")
_ITEM = "k:"
_MEMBER = "v:"


def to_keyed(value: Any, path: tuple[str, ...] = ()) -> Any:
    """Turn map-like lists into dicts, so that one element is one path.

    >>> to_keyed({"finalizers": ["a"], "x": [1]})
    {'finalizers': {'v:"a"': 'a'}, 'x': [1]}
    """
    if isinstance(value, dict):
        # An empty set of a list's elements is nothing to merge, and must not replace the whole
        # list.
        return {
            key: to_keyed(inner, (*path, key))
            for key, inner in value.items()
            if inner != [] or (*path, key) != _DEVICES
        }
    if not isinstance(value, list) or not value or not path:
        return value
    if path[-1] in _SETS:
        return {_MEMBER + json.dumps(item): item for item in value}
    keys = _STATUS_DEVICES if path == _DEVICES else (_MERGE_KEYS.get(path[-1], ""),)
    if keys == ("",) or not all(isinstance(item, dict) and keys[0] in item for item in value):
        return value
    return {_ITEM + json.dumps({key: item[key] for key in keys if key in item}): to_keyed(item, path) for item in value}


def from_keyed(value: Any) -> Any:
    """Turn the dicts of `to_keyed` into lists again, in their order.

    >>> from_keyed({'finalizers': {'v:"a"': 'a'}})
    {'finalizers': ['a']}
    """
    if not isinstance(value, dict):
        return value
    if value and all(_is_element(key) for key in value):
        return [from_keyed(inner) for inner in value.values()]
    return {key: from_keyed(inner) for key, inner in value.items()}


def _is_element(key: str) -> bool:
    """Return whether a key of `to_keyed` is an element of a list."""
    return key.startswith((_ITEM + "{", _MEMBER + '"'))


def strategic_merge(present: Any, patch: Any) -> Any:
    """Apply a strategic merge patch: maps are merged, map-like lists by their key, everything else
    is replaced.

    Shapes: directives `$patch`, `$retainKeys`, `$deleteFromPrimitiveList/…` and `$setElementOrder/…` as kubectl sends them.
    Errors: raises ApiError 400 for an element without its key.
    >>> strategic_merge({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "B"}, {"name": "A", "$patch": "delete"}]})
    {'env': [{'name': 'B'}]}
    """  # noqa: E501
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    wanted = {key: value for key, value in patch.items() if not key.startswith("$")}
    if patch.get("$patch") == "replace":
        return copy.deepcopy(wanted)
    if patch.get("$patch") == "delete":
        return {}
    result = dict(present) if isinstance(present, dict) else {}
    if "$retainKeys" in patch:
        result = {key: value for key, value in result.items() if key in patch["$retainKeys"]}
    for directive, members in patch.items():
        head, _, name = directive.partition("/")
        if head == "$deleteFromPrimitiveList":
            result[name] = [item for item in result.get(name) or () if item not in members]
    for name, value in wanted.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, list):
            result[name] = _merge_list(name, result.get(name) or [], value)
        else:
            result[name] = strategic_merge(result.get(name), value)
    for directive, order in patch.items():
        head, _, name = directive.partition("/")
        if head == "$setElementOrder" and isinstance(result.get(name), list):
            result[name] = _ordered(name, result[name], order)
    return result


def _merge_list(name: str, present: list[Any], patch: list[Any]) -> list[Any]:
    if name in _SETS:
        return [*present, *(item for item in patch if item not in present)]
    key = _MERGE_KEYS.get(name)
    items = [item for item in patch if isinstance(item, dict)]
    if key == "containerPort" and any("port" in item for item in [*present, *items]):
        # A Service's ports have another key than a container's.
        key = "port"
    if any(item == {"$patch": "replace"} for item in items):
        return copy.deepcopy([item for item in patch if item != {"$patch": "replace"}])
    if key is None or len(items) != len(patch):
        return copy.deepcopy(patch)
    result = list(present)
    for item in items:
        if key not in item:
            raise bad_request(f"map: {item} does not contain declared merge key: {key}")
        at = next((index for index, member in enumerate(result) if member.get(key) == item[key]), None)
        if item.get("$patch") == "delete":
            result = [member for member in result if member.get(key) != item[key]]
        elif at is None:
            result.append(strategic_merge({}, item))
        else:
            result[at] = strategic_merge(result[at], item)
    return result


def _ordered(name: str, present: list[Any], order: list[Any]) -> list[Any]:
    """Sort elements into the order of the directive. Those that it does not name come after them,
    in their own order.
    """
    key = _MERGE_KEYS.get(name)

    def mark(item: Any) -> Any:
        return item.get(key) if key is not None and isinstance(item, dict) else item

    places = {json.dumps(mark(item)): index for index, item in enumerate(order)}
    return sorted(present, key=lambda item: places.get(json.dumps(mark(item)), len(places)))
