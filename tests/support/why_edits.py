"""The edits of a change made on plain objects."""

from __future__ import annotations

from collections.abc import Iterable

from support.why_objects import Plain
from topobus.formats.kubernetes.merge_patch import merged
from topobus.values.cluster_answers import Edit

__all__ = ["applied", "without_server_fields"]

_CLAIM, _TEMPLATE = "ResourceClaim", "ResourceClaimTemplate"
_OF_SERVERS = (
    "creationTimestamp",
    "deletionTimestamp",
    "generation",
    "managedFields",
    "resourceVersion",
    "selfLink",
    "uid",
)


def applied(objects: Iterable[Plain], edits: Iterable[Edit]) -> tuple[Plain, ...]:
    """Apply edits, with what the controllers of a cluster do then: a claim follows its template, and
    one whose last pod is deleted loses its devices, or goes with the pod that it was made for.
    """
    there = {(plain["kind"], plain["metadata"]["name"]): plain for plain in objects}
    for edit in edits:
        if edit.patch is None:
            del there[edit.kind, edit.name]
            continue
        there[edit.kind, edit.name] = merged(there[edit.kind, edit.name], edit.patch, named=["containers"])
        if edit.kind == _TEMPLATE:
            made = there[edit.kind, edit.name]["spec"]["spec"]
            there |= {
                place: {**plain, "spec": made}
                for place, plain in there.items()
                if place[0] == _CLAIM and plain["metadata"].get("ownerReferences")
            }
    users = {name for kind, name in there if kind == "Pod"}
    return tuple(_released(plain, users) for plain in there.values())


def _released(plain: Plain, users: set[str]) -> Plain:
    reserved = (plain.get("status") or {}).get("reservedFor") if plain["kind"] == _CLAIM else None
    if not reserved:
        return plain
    left = [user for user in reserved if user["name"] in users]
    return {**plain, "status": {**plain["status"], "reservedFor": left} if left else {}}


def without_server_fields(plain: Plain) -> Plain:
    """Take an object as somebody would write it who makes it again."""
    metadata = {key: value for key, value in plain["metadata"].items() if key not in _OF_SERVERS}
    return {key: value for key, value in {**plain, "metadata": metadata}.items() if key != "status"}
