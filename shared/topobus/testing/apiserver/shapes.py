"""The API server simulator's operations on objects as values: selectors, apply, dropped fields,
normal forms, and the rules of each kind.

Pure.
Source: apimachinery fields and labels selectors, RFC 7386 (merge patch), KEP-555 (server-side
apply; lists are atomic but for those that `lists` names).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from topobus.formats.kubernetes.limits import check_object, check_status
from topobus.formats.kubernetes.merge_patch import merged
from topobus.formats.kubernetes.resource import ClaimStatus
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.testing.apiserver.lists import from_keyed, to_keyed
from topobus.testing.apiserver.values import ApiError, Object, Resource, bad_request
from topobus.values.quantity import Quantity

__all__ = [
    "Applied",
    "Selector",
    "apply",
    "copied",
    "drop_deallocated",
    "drop_fields",
    "find",
    "normalise",
    "problems_of",
    "problems_of_change",
]

T = TypeVar("T")

Applied = dict[tuple[str, ...], Any]
"""What one field manager has applied: path of a leaf to its value."""

# Fields of a pod's spec that may change after its creation; what may change in them
# is not looked at, but for gates.
_POD_MAY_CHANGE = frozenset(
    {
        "activeDeadlineSeconds",
        "affinity",
        "containers",
        "initContainers",
        "nodeName",
        "nodeSelector",
        "schedulingGates",
        "terminationGracePeriodSeconds",
        "tolerations",
    }
)

# No manager owns the fields that identify an object.
_DEVICE_KEYS = ("driver", "pool", "device", "shareID")
_IDENTITY = (("metadata", "name"), ("metadata", "namespace"), ("metadata", "uid"))

_TERM = re.compile(
    r"\s*(?P<key>[^\s=!,()]+)\s*(?:(?P<op>==|=|!=)\s*(?P<value>[^,()]*)|(?P<set>in|notin)\s*\((?P<values>[^)]*)\))?\s*"
)


class Selector:
    """A field selector and a label selector as one question.

    >>> Selector("spec.nodeName=n1", "", ("spec.nodeName",)).matches({"spec": {"nodeName": "n1"}})
    True
    """

    def __init__(self, fields: str, labels: str, allowed: Sequence[str]) -> None:
        self._fields = _terms(fields)
        self._labels = _terms(labels)
        for key, operator, _ in self._fields:
            if key not in (*allowed, "metadata.name", "metadata.namespace"):
                raise bad_request(f"field label not supported: {key}")
            if operator not in ("=", "!="):
                raise bad_request(f"invalid field selector: {fields}")

    def matches(self, api_object: Object) -> bool:
        """Return whether an object matches."""
        labels = find(api_object, "metadata.labels") or {}
        return all(
            _holds(operator, values, _text(find(api_object, key))) for key, operator, values in self._fields
        ) and all(_holds(operator, values, labels.get(key)) for key, operator, values in self._labels)


def copied(value: T) -> T:
    """Copy a JSON value deeply.

    `copy.deepcopy` takes six times as long, because it supports values that JSON cannot hold.

    >>> before = {"a": [1, {"b": "c"}]}
    >>> after = copied(before)
    >>> after == before, after["a"][1] is before["a"][1]
    (True, False)
    """
    return cast("T", _copied(value))


def find(value: Any, path: str) -> Any:
    """Read the value at a path. None when there is none.

    >>> find({"spec": {"pool": {"name": "n1"}}}, "spec.pool.name")
    'n1'
    """
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def apply(
    present: Object, wanted: Object, own: Applied, others: Mapping[str, Applied], *, is_forced: bool
) -> tuple[Object, Applied]:
    """Apply server-side: set the wanted fields, remove those that this manager set before and no
    longer wants.

    Errors: raises ApiError 409 when another manager has applied another value there and `is_forced`
    is not set.
    """
    wanted, present = to_keyed(wanted), to_keyed(present)
    leaves = _leaves({key: value for key, value in wanted.items() if key not in ("apiVersion", "kind")})
    leaves = {path: value for path, value in leaves.items() if path not in _IDENTITY}
    contested = sorted(
        f'conflict with "{manager}": .{".".join(path)}'
        for manager, fields in others.items()
        for path, value in leaves.items()
        if path in fields and fields[path] != value
    )
    if contested and not is_forced:
        causes = [{"reason": "FieldManagerConflict", "message": message} for message in contested]
        raise ApiError(
            409,
            "Conflict",
            f"Apply failed with {len(contested)} conflict(s): {'; '.join(contested)}",
            details={"causes": causes},
        )
    result = copied(present)
    for path in own.keys() - leaves.keys():
        if not any(path in fields for fields in others.values()):
            _remove(result, path)
    return from_keyed(merged(result, copied(wanted))), leaves


def drop_deallocated(before: Object, after: Object) -> None:
    """Remove the drivers' status of devices that a claim no longer has, as a server does when a
    claim is deallocated (resourceclaim/strategy.go).
    """
    status = after.get("status") or {}
    granted = [
        {
            tuple(result.get(key) or "" for key in _DEVICE_KEYS)
            for result in find(version, "status.allocation.devices.results") or ()
            if isinstance(result, Mapping)
        }
        for version in (before, after)
    ]
    gone = granted[0] - granted[1]
    if gone and status.get("devices"):
        kept = [
            device for device in status["devices"] if tuple(device.get(key) or "" for key in _DEVICE_KEYS) not in gone
        ]
        status.pop("devices")
        after["status"] = {**status, "devices": kept} if kept else status


def drop_fields(api_object: Object, paths: Iterable[str]) -> None:
    """Remove fields as a server does that does not know them. `*` matches every element of a list
    or map.

    >>> resource_slice = {"spec": {"devices": [{"name": "a", "taints": [1]}]}}
    >>> drop_fields(resource_slice, ["spec.devices.*.taints"]); resource_slice
    {'spec': {'devices': [{'name': 'a'}]}}
    """
    for path in paths:
        _drop(api_object, path.split("."))


def normalise(resource: Resource, api_object: Object, now: datetime) -> Object:
    """Bring an object into the form that a server would return: no nulls, no empty lists in spec,
    times in seconds, quantities in short.
    """
    result: Object = _without_nulls(api_object)
    if resource.kind == "ResourceSlice" and isinstance(result.get("spec"), dict):
        result["spec"] = {key: value for key, value in result["spec"].items() if value not in ([], {})}
        for device in result["spec"].get("devices", ()):
            for taint in device.get("taints", ()):
                taint["timeAdded"] = _seconds(str(taint.get("timeAdded") or now.isoformat()))
            for capacity in device.get("capacity", {}).values():
                capacity["value"] = _short(capacity.get("value"))
    return result


def problems_of(resource: Resource, api_object: Object) -> list[tuple[str, str]]:
    """List what validation refuses, as field and message."""
    if resource.group != "resource.k8s.io":
        return []
    body = {key: api_object.get(key) or {} for key in ("metadata", "spec", "status")}
    problems = check_object(ApiObject(api_version=resource.api_version, kind=resource.kind, **body))
    return [(problem.path, problem.message) for problem in problems]


def problems_of_change(resource: Resource, before: Object, after: Object) -> list[tuple[str, str]]:
    """List what validation refuses in a change although both objects are valid: an allocation that
    moves, a gate that is added.

    Source: k8s.io/kubernetes pkg/apis/resource/validation (ValidateResourceClaimStatusUpdate), pkg/apis/core/validation (ValidatePodUpdate), 1.36.
    >>> problems_of_change(Resource(version="v1", plural="pods", kind="Pod"), {"spec": {}}, {"spec": {"schedulingGates": [{"name": "g"}]}})
    [('spec.schedulingGates', "Forbidden: only deletion is allowed, but found new scheduling gate 'g'")]
    """  # noqa: E501
    if resource.kind == "ResourceClaim":
        old, new = before.get("status") or {}, after.get("status") or {}
        if old.get("devices") != new.get("devices"):
            problems = [
                problem
                for problem in check_status(read_as(new, ClaimStatus, where="status"))
                if problem.path.startswith("status.devices")
            ]
            if problems:
                return [(problem.path, problem.message) for problem in problems]
        # Opaque parameters are bytes to the server: the same fields in
        # another order are another value.
        if (
            old.get("allocation")
            and new.get("allocation")
            and json.dumps(old["allocation"]) != json.dumps(new["allocation"])
        ):
            return [("status.allocation", "Invalid value: field is immutable")]
        users = {user.get("uid") for user in new.get("reservedFor") or ()}
        if users and not new.get("allocation"):
            return [("status.reservedFor", "Forbidden: may not be specified when `allocated` is not set")]
        if after.get("metadata", {}).get("deletionTimestamp") and users - {
            user.get("uid") for user in old.get("reservedFor") or ()
        }:
            return [("status.reservedFor", "Forbidden: new entries may not be added while `deletionTimestamp` is set")]
    if resource.kind == "Pod":
        gates = [
            {gate.get("name") for gate in (find(version, "spec.schedulingGates") or ())} for version in (before, after)
        ]
        if gates[1] - gates[0]:
            return [
                (
                    "spec.schedulingGates",
                    f"Forbidden: only deletion is allowed, but found new scheduling gate '{min(gates[1] - gates[0])}'",
                )
            ]
        specs = [
            {key: value for key, value in (version.get("spec") or {}).items() if key not in _POD_MAY_CHANGE}
            for version in (before, after)
        ]
        if specs[0] != specs[1]:
            return [
                ("spec", "Forbidden: pod updates may not change fields other than some; see the validation of pods")
            ]
    return []


def _terms(text: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Split a selector into key, operator (=, !=, in, notin, exists, absent) and values."""
    terms: list[tuple[str, str, tuple[str, ...]]] = []
    position = 0
    while position < len(text):
        is_absent = text[position] == "!"
        match = _TERM.match(text, position + is_absent)
        if match is None or (match.end() < len(text) and text[match.end()] != ","):
            raise bad_request(f"unable to parse requirement: {text!r}")
        if match["set"]:
            terms.append((match["key"], match["set"], tuple(part.strip() for part in match["values"].split(","))))
        elif match["op"]:
            terms.append((match["key"], "!=" if match["op"] == "!=" else "=", (match["value"].strip(),)))
        else:
            terms.append((match["key"], "absent" if is_absent else "exists", ()))
        position = match.end() + 1
    return terms


def _holds(operator: str, values: tuple[str, ...], label: str | None) -> bool:
    if operator == "exists":
        return label is not None
    if operator == "absent":
        return label is None
    return (label in values) == (operator in ("=", "in"))


def _text(value: Any) -> str:
    # An absent field reads as the empty text: `spec.nodeName=` finds unbound pods.
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Applied:
    if isinstance(value, dict) and value:
        return {
            leaf: found_leaf
            for key, inner in value.items()
            for leaf, found_leaf in _leaves(inner, (*path, key)).items()
        }
    return {path: value}


def _remove(value: Any, path: tuple[str, ...], *, depth: int = 0) -> None:
    """Remove a leaf, and each parent that held nothing else, except the object's own parts."""
    head, *rest = path
    if not isinstance(value, dict) or head not in value:
        return
    if rest:
        _remove(value[head], tuple(rest), depth=depth + 1)
    if not rest or (depth and value[head] == {}):
        del value[head]


def _drop(value: Any, path: list[str]) -> None:
    head, *rest = path
    if head == "*":
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            _drop(inner, rest)
    elif isinstance(value, dict) and head in value:
        if rest:
            _drop(value[head], rest)
        else:
            del value[head]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _seconds(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as err:
        raise bad_request(f'parsing time "{text}" as RFC 3339: {err}') from err
    return moment.astimezone(UTC).replace(microsecond=0, tzinfo=None).isoformat() + "Z"


def _short(value: Any) -> Any:
    try:
        return str(Quantity.parse(value))
    except (ValueError, TypeError):
        return value


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner) for inner in value]
    return value
