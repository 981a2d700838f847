"""Writes objects of the stand-alone API: checks all before it writes the first, then writes one
after the other and reports where it stopped.

Specs are written by compare-and-set. A status that the controller wrote stays.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from topobus.bus.bus import Bus, Conflict, Entry, Unreadable
from topobus.cli.exits import NotFoundError
from topobus.formats.kubernetes.built_in_classes import built_in_class_object
from topobus.formats.kubernetes.classic.classic import is_classic, unfold_class
from topobus.formats.kubernetes.objects import (
    admit,
    ask_deletion,
    is_of_cluster,
    metadata_of,
    name_of,
    object_parts,
    placed_uid,
)
from topobus.formats.messages.catalogue import INVENTORY, LEDGER, OBJECT
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import ApiObject, entries_of
from topobus.formats.messages.nouns import CLUSTER
from topobus.process.clock import SystemClock
from topobus.values.errors import ContractError, PeerUnavailable, TopobusError
from topobus.values.request import OwnerKind
from topobus.values.resource_names import SHAPE_LEVELS
from topobus.values.timestamps import rfc3339

__all__ = [
    "CONDITIONS",
    "WRONG",
    "Applied",
    "apply_object",
    "apply_objects",
    "built_in_classes",
    "condition_of",
    "delete_object",
    "find_object",
    "is_allocated",
    "is_scheduled",
    "parts_of",
    "plain_object",
    "wait_for_condition",
]

# The controller writes the status at the same time. Each try reads the object again, and more lost
# writes than this in a row mean that a writer loops.
_TRIES = 8
_WRITTEN_OVER = "written over what could not be read"
# Objects precede those that name them: the first condition of a claim must not be that its class is
# missing.
_ORDER = (
    "DeviceClass",
    "ResourceClass",
    "DeviceClassParameters",
    "ResourceClaimParameters",
    "ResourceSlice",
    "DeviceTaintRule",
    "ResourceClaimTemplate",
    "ResourceClaim",
    "Pod",
)

CONDITIONS = {"DeviceClass": "Valid", "ResourceClaim": "Allocated", "Pod": "PodScheduled"}
"""Kind to the condition in which the controller reports the object's state."""
WRONG = ("Malformed", "Invalid")
"""Reasons that only another manifest repairs. Other reasons may end by themselves."""

# What is stored at an object's key, and the revision there.
_Present = tuple[Entry[ApiObject] | None, int]
_CHANGE_CLASS = "a class of that name that is applied takes its place"


@dataclass(frozen=True, kw_only=True)
class Applied:
    """An object that was written, and what that changed."""

    stored: ApiObject
    verb: str
    """`created`, `changed`, `unchanged`, or that the previous value could not be read."""
    previous: ApiObject | None = None
    """What was stored before. None: nothing was."""


async def apply_objects(bus: Bus, wanted: Sequence[ApiObject], *, is_dry_run: bool = False) -> list[Applied]:
    """Write all objects of a manifest, or none when one of them cannot replace what is stored.

    A dry run returns what would be done.

    Errors: raises ContractError before anything is written; PeerUnavailable names what was written
    by then.
    """
    ordered = sorted(
        wanted, key=lambda api_object: _ORDER.index(api_object.kind) if api_object.kind in _ORDER else len(_ORDER)
    )
    present: dict[tuple[str, ...], _Present] = {}
    problems: list[str] = []
    placed = await _placed_pods(bus) if any(api_object.kind == "Pod" for api_object in ordered) else {}
    for api_object in ordered:
        parts = object_parts(api_object)
        place = tuple(parts.values())
        if place in present:
            raise ContractError(
                f"{name_of(api_object)} is twice in the manifest", next_step="give each object a name of its own"
            )
        entry, _ = present[place] = await _read(bus, parts)
        metadata = metadata_of(api_object)
        name = f"{metadata.namespace or 'default'}/{metadata.name}"
        if api_object.kind == "Pod" and name in placed:
            problems.append(
                f"{name_of(api_object)}: `topobus place` placed a pod of that name on {placed[name]}: "
                f"`topobus release pod {name}` first, or choose another name"
            )
            continue
        try:
            size = len(encode(_admitted(api_object, entry)))
        except ContractError as err:
            problems.append(err.message)
            continue
        if size > OBJECT.max_value_bytes:
            problems.append(f"{name_of(api_object)}: it has {size} bytes, wanted at most {OBJECT.max_value_bytes}")
    if problems:
        raise ContractError(
            "\n".join(problems),
            next_step="nothing was applied; mend or delete what is named and apply the manifest again",
        )
    if is_dry_run:
        return [_would_apply(api_object, *read) for api_object, read in zip(ordered, present.values(), strict=True)]
    applied: list[Applied] = []
    for index, (api_object, read) in enumerate(zip(ordered, present.values(), strict=True)):
        try:
            applied.append(await apply_object(bus, api_object, read))
        except TopobusError as err:
            done = ", ".join(name_of(other.stored) for other in applied) or "nothing"
            left = ", ".join(name_of(other) for other in ordered[index + 1 :]) or "nothing"
            err.message = f"{err.message}; applied before it: {done}; not applied: {left}"
            raise
    return applied


def _would_apply(wanted: ApiObject, entry: Entry[ApiObject] | None, revision: int) -> Applied:
    stored = _admitted(wanted, entry)
    is_unread = revision != (entry.revision if entry is not None else 0)
    verb = (
        _WRITTEN_OVER
        if is_unread
        else "created"
        if entry is None
        else "unchanged"
        if stored == entry.value
        else "changed"
    )
    return Applied(stored=stored, verb=verb, previous=entry.value if entry is not None else None)


async def _placed_pods(bus: Bus) -> dict[str, str]:
    """List the pods that hold something by `topobus place`, with their nodes. If such a pod were
    stored under the same name, two owners would have that name.
    """
    return {
        f"{holder.owner.namespace}/{holder.owner.name}": entry.parts["node"]
        for entry in await bus.list(LEDGER)
        for holder in entry.value.allocations.values()
        if holder.owner.kind is OwnerKind.POD
        and holder.owner.uid == placed_uid(holder.owner.namespace, holder.owner.name)
    }


async def apply_object(bus: Bus, wanted: ApiObject, present: _Present | None = None) -> Applied:
    """Write an object's spec, over `present` if that was read already.

    The controller's status stays.

    Errors: raises PeerUnavailable when the object changes again at each try.
    """
    parts = object_parts(wanted)
    for _ in range(_TRIES):
        entry, revision = present or await _read(bus, parts)
        present = None
        applied = _would_apply(wanted, entry, revision)
        if applied.verb == "unchanged" or not isinstance(
            await bus.compare_and_set(OBJECT, applied.stored, revision, **parts), Conflict
        ):
            return applied
    raise PeerUnavailable(f"{name_of(wanted)}: somebody else keeps changing it", next_step="try again")


async def delete_object(bus: Bus, parts: dict[str, str], *, is_forced: bool = False) -> ApiObject:
    """Mark an object for deletion, or delete it when nothing holds it, or, by force, in any case.

    For an object that cannot be read, the newest version that can be read decides.

    Errors: raises NotFoundError when there is none, PeerUnavailable when the object changes again
    at each try.
    """
    for _ in range(_TRIES):
        entry, revision = await _read(bus, parts)
        if entry is None and revision:
            if not isinstance(await bus.compare_and_delete(OBJECT, revision, **parts), Conflict):
                return _unread(parts)
            continue
        if entry is None:
            if any(metadata_of(each).name == parts["name"] for each in await built_in_classes(bus, parts["kind"])):
                raise NotFoundError(
                    f"deviceclass {parts['name']} is built in, and not stored: there is nothing to delete",
                    next_step=_CHANGE_CLASS,
                )
            raise not_found(parts)
        marked = ask_deletion(entry.value, now=rfc3339(SystemClock().now()))
        if is_forced:
            await bus.delete(OBJECT, **parts)
            return entry.value
        if marked is None:
            # Only at the revision that was read: a controller may be adding its finalizer at this
            # moment.
            if not isinstance(await bus.compare_and_delete(OBJECT, revision, **parts), Conflict):
                return entry.value
            continue
        if not isinstance(await bus.compare_and_set(OBJECT, marked, revision, **parts), Conflict):
            return marked
    raise PeerUnavailable(f"{parts['kind']} {parts['name']}: somebody else keeps changing it", next_step="try again")


def plain_object(api_object: ApiObject, *, is_brief: bool = False) -> dict[str, Any]:
    """Write an object as Kubernetes does. A classic class has no spec.

    Shapes: is_brief — leave out what is empty; otherwise programs can rely on `spec` and `status`.
    """
    if is_classic(api_object) and api_object.kind == "ResourceClass":
        return unfold_class(api_object)
    parts = {"spec": api_object.spec, "status": api_object.status}
    if not is_brief:
        return {"apiVersion": api_object.api_version, "kind": api_object.kind, "metadata": api_object.metadata, **parts}
    return {
        "apiVersion": api_object.api_version,
        "kind": api_object.kind,
        "metadata": api_object.metadata,
        **{key: value for key, value in parts.items() if value},
    }


async def built_in_classes(bus: Bus, kind: str) -> list[ApiObject]:
    """List the classes that claims can name although they are not stored, if `kind` is that of
    classes: one for each class that a node has, and, where there is a node, one for each
    level of shapes.
    """
    if kind.lower() != "deviceclass":
        return []
    classes = {parts["device_class"] for parts in await bus.keys(INVENTORY)}
    levels = SHAPE_LEVELS if classes else ()
    return [
        *(built_in_class_object(device_class) for device_class in sorted(classes)),
        *(built_in_class_object(level, is_level=True) for level in levels),
    ]


async def find_object(bus: Bus, parts: dict[str, str]) -> ApiObject:
    """Read one object, or return the built-in class of that name.

    Errors: raises NotFoundError with the namespace where it is instead, or with what there is.
    """
    try:
        found_entry = await bus.get(OBJECT, **parts)
    except ContractError as err:
        kind, where = parts["kind"], "" if parts["namespace"] == CLUSTER else f" -n {parts['namespace']}"
        err.next_step = (
            f"`topobus apply -f` its manifest, which replaces it, or `topobus delete {kind} {parts['name']}{where}`"
        )
        raise
    if found_entry is not None:
        return found_entry.value
    built_in = next(
        (each for each in await built_in_classes(bus, parts["kind"]) if metadata_of(each).name == parts["name"]), None
    )
    if built_in is not None:
        return built_in
    elsewhere = [
        entry.parts["namespace"]
        for entry in await bus.list(OBJECT, kind=parts["kind"])
        if entry.parts["name"] == parts["name"]
    ]
    raise not_found(parts, elsewhere)


def not_found(parts: dict[str, str], elsewhere: Sequence[str] = ()) -> NotFoundError:
    """Make the error for an object that does not exist."""
    what = "claim" if parts["kind"] == "resourceclaim" else parts["kind"]
    name = parts["name"] if parts["namespace"] == CLUSTER else f"{parts['namespace']}/{parts['name']}"
    if elsewhere:
        return NotFoundError(
            f"there is no {what} {name}", next_step=f"there is one in namespace {elsewhere[0]}: add -n {elsewhere[0]}"
        )
    if what == "node":
        return NotFoundError(
            f"there is no stored node {name}",
            next_step=f"`topobus forget node {name} --dry-run` shows what is stored about a node that is gone",
        )
    return NotFoundError(f"there is no {what} {name}", next_step=f"`topobus get {what} -A` lists what there is")


def parts_of(kind: str, namespace: str, name: str) -> dict[str, str]:
    """Return the key of an object named on the command line, which may be `NAMESPACE/NAME`."""
    if "/" in name:
        namespace, _, name = name.partition("/")
    return {"kind": kind.lower(), "namespace": CLUSTER if is_of_cluster(kind) else namespace, "name": name}


async def wait_for_condition(bus: Bus, stored: ApiObject, limit_s: float) -> ApiObject:
    """Wait until the controller has set the condition for this very spec.

    Returns the object with it, or as it was when the time is over.
    """
    newest = stored
    if stored.kind not in CONDITIONS or is_classic(stored) or condition_of(stored) is not None:
        return stored
    try:
        async with asyncio.timeout(limit_s), aclosing(bus.watch(OBJECT, **object_parts(stored))) as changes:
            async for change in changes:
                newest = change.value or newest
                if condition_of(newest) is not None:
                    break
    except TimeoutError:
        pass
    return newest


def condition_of(api_object: ApiObject) -> dict[str, Any] | None:
    """Find the controller's condition of an object. A condition for an older spec does not
    count.
    """
    generation = metadata_of(api_object).generation or None
    wanted = (CONDITIONS.get(api_object.kind), generation)
    conditions = entries_of(api_object.status.get("conditions"))
    return next((each for each in conditions if (each.get("type"), each.get("observedGeneration")) == wanted), None)


def is_allocated(api_object: ApiObject) -> bool:
    """Say whether a claim has its devices."""
    return bool(api_object.status.get("allocation"))


def is_scheduled(api_object: ApiObject) -> bool:
    """Say whether a pod has its node from the controller."""
    condition = condition_of(api_object)
    return api_object.kind == "Pod" and condition is not None and condition.get("status") == "True"


def _admitted(wanted: ApiObject, entry: Entry[ApiObject] | None) -> ApiObject:
    return admit(
        wanted, uid=str(uuid.uuid4()), now=rfc3339(SystemClock().now()), previous=entry.value if entry else None
    )


def _unread(parts: dict[str, str]) -> ApiObject:
    """Make an object that has only its key, for one that cannot be read."""
    metadata = {"name": parts["name"]} | ({} if parts["namespace"] == CLUSTER else {"namespace": parts["namespace"]})
    return ApiObject(api_version="", kind=parts["kind"], metadata=metadata)


async def _read(bus: Bus, parts: dict[str, str]) -> _Present:
    """Read an object, and the key's revision.

    If the stored value cannot be read, returns the newest version before it that can, which has
    another revision.
    """
    stored = await bus.get_or_last(OBJECT, **parts)
    if isinstance(stored, Unreadable):
        return stored.last, stored.revision
    return stored, stored.revision if stored is not None else 0
