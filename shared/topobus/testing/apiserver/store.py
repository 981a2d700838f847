"""The API server simulator's objects: created, changed, deleted, listed and watched by etcd's
rules, without HTTP.

Objects are dicts. Every change takes the next resource version of one counter for all kinds. An
update that changes nothing takes no version and sends no event, as in a real server.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from topobus.process.broadcast import Broadcast
from topobus.testing.apiserver.patches import reordered
from topobus.testing.apiserver.routes import place_of
from topobus.testing.apiserver.shapes import (
    Applied,
    Selector,
    apply,
    copied,
    drop_deallocated,
    drop_fields,
    find,
    normalise,
    problems_of,
    problems_of_change,
)
from topobus.testing.apiserver.values import (
    RESOURCES,
    Object,
    Resource,
    already_exists,
    bad_request,
    conflict,
    expired,
    invalid,
    not_found,
)

__all__ = ["Change", "Event", "History", "Store"]

# names.SimpleNameGenerator: five random characters after at most 58 of ours, without vowels so that
# no words come out.
_NAME_LIMIT = 58
_NAME_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


class Event(Struct, frozen=True, kw_only=True):
    """One line of a watch."""

    type: str
    """`ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`."""
    object: Object


class Store:
    """All objects of one cluster."""

    def __init__(self, *, is_collecting: bool = False) -> None:
        self.drops: Mapping[str, tuple[str, ...]] = {}
        """Kind to paths of fields that this server does not know."""
        self._is_collecting = is_collecting
        self._objects: dict[_Key, Object] = {}
        self._applied: dict[_Key, dict[str, Applied]] = {}
        self._history = History()
        self._version = 1
        self._compacted = 0
        self._looked = Broadcast()

    @property
    def version(self) -> int:
        """The newest resource version."""
        return self._version

    def wake(self) -> None:
        """Make all waiters for a state check again."""
        self._looked.announce()

    async def until(self, holds: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until a condition is true.

        Errors: raises TimeoutError that names what was awaited.
        """
        if not await self._looked.until(holds, asyncio.timeout(timeout_s)):
            raise TimeoutError(f"API server simulator: waited {timeout_s} s for {what}")

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Run a block and revert all its changes: a dry run that no watcher sees."""
        kept = (dict(self._objects), dict(self._applied), len(self._history), self._version)
        try:
            yield
        finally:
            self._objects, self._applied, count, self._version = kept
            self._history.forget_from(count)

    def compact(self) -> None:
        """Forget the history, as etcd does every five minutes: a watch or a list that begins before
        now is answered with 410.
        """
        # The changes themselves stay, because an open watch still reads them.
        self._compacted = self._version

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Read one object.

        Errors: raises ApiError 404 when there is none.
        """
        return self._show(resource, self._existing(resource, namespace, name))

    def _existing(self, resource: Resource, namespace: str, name: str) -> Object:
        stored = self._objects.get(_key(resource, namespace, name))
        if stored is None:
            raise not_found(resource, name)
        return stored

    def select(self, resource: Resource, namespace: str = "", selector: Selector | None = None) -> list[Object]:
        """Read all objects of a kind, by namespace and name. An empty namespace is all of them."""
        return self.page(resource, namespace, selector)[0]

    def page(
        self,
        resource: Resource,
        namespace: str = "",
        selector: Selector | None = None,
        *,
        after: str = "",
        limit: int = 0,
    ) -> tuple[list[Object], int]:
        """Read the objects of a kind that come after a place, `limit` of them at most (0: all).

        Return them and how many more there are.
        """
        keys = sorted(key for key in self._objects if _is_of(key, resource, namespace))
        stored = [self._objects[key] for key in keys]
        meant = [each for each in stored if place_of(each) > after and (selector is None or selector.matches(each))]
        shown = meant[: limit or len(meant)]
        return [self._show(resource, api_object) for api_object in shown], len(meant) - len(shown)

    def create(self, resource: Resource, namespace: str, wanted: Object) -> Object:
        """Make an object: name, uid, times and version are the server's.

        Errors: raises ApiError 400, 409 or 422, as a server answers.
        """
        admitted = self._admit(resource, wanted)
        metadata = admitted["metadata"]
        name = str(metadata.get("name") or "")
        if not name:
            if not metadata.get("generateName"):
                raise invalid(resource, "", [("metadata.name", "Required value: name or generateName is required")])
            tail = "".join(secrets.choice(_NAME_LETTERS) for _ in range(5))
            name = str(metadata["generateName"])[:_NAME_LIMIT] + tail
        if resource.is_namespaced and metadata.get("namespace", namespace) != namespace:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        if metadata.get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        key = _key(resource, namespace, name)
        if key in self._objects:
            raise already_exists(resource, name)
        metadata |= {"name": name, "uid": str(uuid.uuid4()), "creationTimestamp": self._now(), "generation": 1}
        if resource.is_namespaced:
            metadata["namespace"] = namespace
        if resource.has_status and resource.group:
            # A status in the request is dropped at creation. Pods and nodes keep theirs, which
            # kubelet's mirror and tests write.
            admitted.pop("status", None)
        self._validate(resource, name, admitted)
        return self._store(resource, key, admitted)

    def update(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        wanted: Object,
        *,
        subresource: str = "",
        is_trusted: bool = False,
    ) -> Object:
        """Replace an object, or its status alone.

        An update that carries an older resource version is refused.

        Shapes: is_trusted — leave out what a server allows only in small steps
        (`problems_of_change`), for tests that prepare a state.
        Errors: raises ApiError 400, 404, 409 or 422, as a server answers.
        """
        key, before = _key(resource, namespace, name), self._existing(resource, namespace, name)
        admitted = self._admit(resource, wanted)
        metadata, present = admitted["metadata"], before["metadata"]
        if metadata.get("name", name) != name:
            raise bad_request(
                f"the name of the object ({metadata['name']}) does not match the name on the URL ({name})"
            )
        _check_uid(resource, name, metadata, present)
        if metadata.get("resourceVersion", present["resourceVersion"]) != present["resourceVersion"]:
            raise conflict(
                resource,
                name,
                "the object has been modified; please apply your changes to the latest version and try again",
            )
        after = self._merge_update(resource, before, admitted, subresource)
        if resource.kind == "ResourceClaim":
            drop_deallocated(before, after)
        self._validate(resource, name, after)
        problems = [] if is_trusted else problems_of_change(resource, before, after)
        if problems:
            raise invalid(resource, name, problems)
        if not subresource:
            changed = [path for path in resource.immutable if find(after, path) != find(before, path)]
            if changed:
                raise invalid(resource, name, [(path, "Invalid value: field is immutable") for path in changed])
        is_ending = after["metadata"].get("deletionTimestamp") and not after["metadata"].get("finalizers")
        # Kubelet ends a pod in its grace period: no update, for example of an annotation, removes
        # it.
        if is_ending and not after["metadata"].get("deletionGracePeriodSeconds") and not subresource:
            return self._remove(resource, key)
        return self._store(resource, key, after)

    def apply(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        wanted: Object,
        *,
        manager: str,
        is_forced: bool,
        subresource: str = "",
    ) -> tuple[Object, bool]:
        """Apply server-side. True when this made the object.

        Field managers are kept beside the object, not in managedFields.

        Errors: raises ApiError 404, 409 or 422, as a server answers.
        """
        key = _key(resource, namespace, name)
        before = self._objects.get(key)
        managers = self._applied.get(key, {}) if before else {}
        owner = f"{manager}/{subresource}" if subresource else manager
        others = {other: leaves for other, leaves in managers.items() if other != owner}
        merged, own = apply(before or {}, wanted, managers.get(owner, {}), others, is_forced=is_forced)
        merged = reordered(merged)
        if is_forced:
            # A manager that has applied the same value still owns it.
            others = {
                other: {path: value for path, value in leaves.items() if own.get(path, value) == value}
                for other, leaves in others.items()
            }
        merged.setdefault("metadata", {})["name"] = name
        if before is None and subresource:
            raise not_found(resource, name)
        if before is None and find(wanted, "metadata.uid"):
            why = (
                f"uid mismatch: the provided object specified uid {wanted['metadata']['uid']}, and no existing "
                "object was found"
            )
            raise conflict(resource, name, why)
        if before is not None and find(wanted, "metadata.uid") not in (None, before["metadata"]["uid"]):
            # Not a conflict as in another patch: seen on 1.36.
            uid = wanted["metadata"]["uid"]
            raise invalid(resource, name, [("metadata.uid", f'Invalid value: "{uid}": field is immutable')])
        if before is None:
            result = self.create(resource, namespace, merged)
        else:
            result = self.update(resource, namespace, name, merged, subresource=subresource)
        self._applied[key] = {**others, owner: own}
        return result, before is None

    def delete(
        self, resource: Resource, namespace: str, name: str, options: Object | None = None
    ) -> tuple[Object, bool]:
        """Delete an object.

        False when it only begins to end: finalizers hold it, or it is a bound pod that kubelet ends
        first.

        Errors: raises ApiError 404, or 409 when a precondition fails.
        """
        options = options or {}
        key, before = _key(resource, namespace, name), self._existing(resource, namespace, name)
        metadata = before["metadata"]
        wanted = options.get("preconditions") or {}
        _check_uid(resource, name, wanted, metadata)
        if wanted.get("resourceVersion", metadata["resourceVersion"]) != metadata["resourceVersion"]:
            text = (
                f"the ResourceVersion in the precondition ({wanted['resourceVersion']}) does not match the "
                "ResourceVersion in record"
            )
            raise conflict(
                resource, name, f"{text} ({metadata['resourceVersion']}). The object might have been modified"
            )
        grace_s = 0
        if resource.kind == "Pod" and find(before, "spec.nodeName"):
            grace_s = int(options.get("gracePeriodSeconds", find(before, "spec.terminationGracePeriodSeconds") or 30))
        if metadata.get("finalizers") or grace_s > 0:
            after = copied(before)
            after["metadata"].setdefault("deletionTimestamp", self._now())
            after["metadata"]["deletionGracePeriodSeconds"] = grace_s
            return self._store(resource, key, after), False
        return self._remove(resource, key), True

    def bind(self, resource: Resource, namespace: str, name: str, node: str) -> None:
        """Bind a pod to a node, once.

        Errors: raises ApiError 404, or 409 when it is bound already.
        """
        key, before = _key(resource, namespace, name), self._existing(resource, namespace, name)
        bound_to = find(before, "spec.nodeName")
        if bound_to:
            raise conflict(resource, name, f"pod {name} is already assigned to node {bound_to!r}")
        self._store(resource, key, {**before, "spec": {**before.get("spec", {}), "nodeName": node}})

    def collect_garbage(self, resources: Iterable[Resource]) -> list[str]:
        """Delete objects all of whose owners are gone, as the garbage collector would some time
        later.

        Return their names.
        """
        living = {api_object["metadata"]["uid"] for api_object in self._objects.values()}
        removed: list[str] = []
        for resource in resources:
            for api_object in self.select(resource):
                owners = [owner.get("uid") for owner in api_object["metadata"].get("ownerReferences", ())]
                if owners and not living & set(owners) and not api_object["metadata"].get("deletionTimestamp"):
                    self.delete(resource, api_object["metadata"].get("namespace", ""), api_object["metadata"]["name"])
                    removed.append(api_object["metadata"]["name"])
        return removed

    async def watch(
        self, resource: Resource, namespace: str, selector: Selector, since: int | None
    ) -> AsyncIterator[Event | None]:
        """Follow changes after a version. Without one, begin with everything there is.

        An event None: nothing more for now.

        Errors: raises ApiError 410 when the history after `since` is gone.
        """
        if since is None:
            # The present objects, and the version of that very moment: changes that come while they
            # are read follow as changes.
            since = self._version
            for api_object in self.select(resource, namespace, selector):
                yield Event(type="ADDED", object=api_object)
        elif since < self._compacted:
            raise expired(since, self._compacted)
        while True:
            grown, newest = self._history.grown(resource.group, resource.plural), self._version
            for change in self._history.since(since):
                event = self._event(change, resource, namespace, selector)
                if event is not None:
                    yield event
            # Not the present version: more may have come while the reader processed these.
            since = newest
            yield None
            await grown.wait()

    def bookmark(self, resource: Resource) -> Event:
        """Make an event with the newest version and no object."""
        metadata: Object = {"resourceVersion": str(self._version)}
        return Event(
            type="BOOKMARK", object={"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
        )

    def check_version(self, since: int) -> None:
        """Refuse a version whose history is gone.

        Errors: raises ApiError 410.
        """
        if since < self._compacted:
            raise expired(since, self._compacted)

    def _event(self, change: Change, resource: Resource, namespace: str, selector: Selector) -> Event | None:
        """Show a change through a selector: an object that stops matching is deleted for this
        watcher, one that starts is added.
        """
        if not _is_of(change.key, resource, namespace):
            return None
        was = change.before is not None and selector.matches(change.before)
        is_now = change.after is not None and selector.matches(change.after)
        kind = {(False, True): "ADDED", (True, True): "MODIFIED", (True, False): "DELETED"}.get((was, is_now))
        return Event(type=kind, object=self._show(resource, change.last)) if kind else None

    def _admit(self, resource: Resource, wanted: Any) -> Object:
        if not isinstance(wanted, dict) or not isinstance(wanted.get("metadata", {}), dict):
            raise bad_request("the object provided is unrecognized: wanted a JSON object with metadata")
        for field, expected in (("kind", resource.kind), ("apiVersion", resource.api_version)):
            if wanted.get(field, expected) != expected:
                raise bad_request(f"{field} in the object ({wanted[field]}) does not match the expected {expected}")
        api_object = copied(wanted)
        api_object.setdefault("metadata", {})
        drop_fields(api_object, self.drops.get(resource.kind, ()))
        return normalise(resource, api_object, datetime.now(UTC))

    def _merge_update(self, resource: Resource, before: Object, wanted: Object, subresource: str) -> Object:
        # The status subresource changes status only, the main resource everything but status.
        after = copied(before if subresource else wanted)
        if subresource:
            after["status"] = wanted.get("status", {})
        elif resource.has_status:
            after.pop("status", None)
            if "status" in before:
                after["status"] = copied(before["status"])
        kept = (
            "name",
            "namespace",
            "uid",
            "creationTimestamp",
            "generation",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "generateName",
        )
        metadata = {key: value for key, value in after["metadata"].items() if key not in kept}
        metadata |= {key: before["metadata"][key] for key in kept if key in before["metadata"]}
        if after.get("spec") != before.get("spec"):
            metadata["generation"] = before["metadata"].get("generation", 0) + 1
        after["metadata"] = metadata
        return after

    def _validate(self, resource: Resource, name: str, api_object: Object) -> None:
        problems = problems_of(resource, api_object)
        if problems:
            raise invalid(resource, name, problems)

    def _store(self, resource: Resource, key: _Key, after: Object) -> Object:
        after = {name: value for name, value in after.items() if name not in ("kind", "apiVersion")}
        before = self._objects.get(key)
        if before is not None and _without_version(before) == _without_version(after):
            return self._show(resource, before)
        self._version += 1
        after["metadata"] = {**after["metadata"], "resourceVersion": str(self._version)}
        self._objects[key] = after
        self._record(Change(version=self._version, key=key, before=before, after=after, last=after))
        return self._show(resource, after)

    def _remove(self, resource: Resource, key: _Key) -> Object:
        before = self._objects.pop(key)
        self._applied.pop(key, None)
        self._version += 1
        last = {**before, "metadata": {**before["metadata"], "resourceVersion": str(self._version)}}
        self._record(Change(version=self._version, key=key, before=before, after=None, last=last))
        if self._is_collecting:
            self.collect_garbage(RESOURCES)
        return self._show(resource, last)

    def _record(self, change: Change) -> None:
        self._history.add(change)
        self.wake()

    def _show(self, resource: Resource, api_object: Object) -> Object:
        return {"kind": resource.kind, "apiVersion": resource.api_version, **copied(api_object)}

    def _now(self) -> str:
        return datetime.now(UTC).replace(microsecond=0, tzinfo=None).isoformat() + "Z"


def _key(resource: Resource, namespace: str, name: str) -> _Key:
    return (resource.group, resource.plural, namespace if resource.is_namespaced else "", name)


def _check_uid(resource: Resource, name: str, wanted: Object, present: Object) -> None:
    if wanted.get("uid", present["uid"]) != present["uid"]:
        text = f"UID in precondition: {wanted['uid']}, UID in object meta: {present['uid']}"
        raise conflict(resource, name, f"Precondition failed: {text}")


def _is_of(key: _Key, resource: Resource, namespace: str) -> bool:
    return key[:2] == (resource.group, resource.plural) and namespace in ("", key[2])


def _without_version(api_object: Object) -> Object:
    metadata = {key: value for key, value in api_object["metadata"].items() if key != "resourceVersion"}
    return {**api_object, "metadata": metadata}


_Key = tuple[str, str, str, str]
"""Group, plural, namespace, name."""


class Change(Struct, frozen=True, kw_only=True):
    """One change of one object."""

    version: int
    key: _Key
    before: Object | None
    after: Object | None
    """None: deleted."""
    last: Object
    """The object as the event shows it."""


class History:
    """All changes of one store."""

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._grown: dict[tuple[str, str], asyncio.Event] = {}
        """Group and plural to the event that wakes its watchers at a change."""

    def __len__(self) -> int:
        return len(self._changes)

    def add(self, change: Change) -> None:
        """Add a change, and wake only the watchers of its kind."""
        self._changes.append(change)
        grown = self._grown.pop(change.key[:2], None)
        if grown is not None:
            grown.set()

    def since(self, version: int) -> Sequence[Change]:
        """List the changes after a version. Cost: O(log changes) and the result."""
        return self._changes[bisect_right(self._changes, version, key=lambda change: change.version) :]

    def grown(self, group: str, plural: str) -> asyncio.Event:
        """Return the event that the next change of a kind sets."""
        return self._grown.setdefault((group, plural), asyncio.Event())

    def forget_from(self, count: int) -> None:
        """Remove all changes but the first ones."""
        del self._changes[count:]
