"""The object store on an API server: the revision is the resource version.

The difference between an object's next version and the copy is sent as a merge patch that names the
version of the copy. The stored object is put into the state at once. After a conflict, or a write
without an answer, the object is read again, so that the next decision starts from the stored state.
"""

from __future__ import annotations

from typing import Any, NoReturn

from topobus.controller.cluster_metrics import ClusterMetrics
from topobus.controller.state.cluster.api_server_state import ApiServerState
from topobus.controller.state.cluster_objects import downgraded_claim
from topobus.controller.store.api import WATCHED
from topobus.controller.store.kubernetes_api import KubernetesApi
from topobus.engine.claims.gate import version_of
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.merge_patch import merge_patch
from topobus.formats.kubernetes.objects import name_of
from topobus.formats.messages.messages import ApiObject
from topobus.kubernetes.answers import NOT_FOUND, Rejected
from topobus.kubernetes.reading import CLAIMS, Kind
from topobus.process.logging import get_logger
from topobus.values.errors import InvariantError, PeerUnavailable

__all__ = ["ApiServerStore", "bound_patch"]

_KINDS = {kind.name.lower(): kind for kind in WATCHED}
# Fields that the server sets itself when an object is created (apimachinery, ObjectMeta).
_SET_BY_SERVER = ("uid", "resourceVersion", "creationTimestamp", "generation")


class ApiServerStore:
    """Claims and pods on an API server, and the copy that each write updates."""

    def __init__(self, api: KubernetesApi, state: ApiServerState, metrics: ClusterMetrics) -> None:
        self._api = api
        self._state = state
        self._metrics = metrics

    async def read(self, key: ObjectKey) -> Stored | None:
        """Read an object from the server. None when it is gone."""
        kind = _KINDS[key.kind]
        plain = await self._api.get(kind, key.namespace, key.name)
        if plain is None:
            self._state.drop(kind.name, (key.namespace, key.name))
            return None
        return await self._update_copy(kind, key, plain)

    async def create(self, key: ObjectKey, value: ApiObject) -> Stored | None:
        """Create an object, in the version that the server serves.

        Errors: raises PeerUnavailable when the server refuses it for another reason than a
        conflict.
        """
        kind = _KINDS[key.kind]
        version = await self._api.version_of(kind)
        metadata = {field: content for field, content in value.metadata.items() if field not in _SET_BY_SERVER}
        plain = {
            "apiVersion": f"{kind.group}/{version}" if kind.group else version,
            "kind": kind.name,
            "metadata": metadata,
            "spec": downgraded_claim(value.spec, version) if kind is CLAIMS else value.spec,
        }
        try:
            made = await self._api.create(kind, plain)
        except PeerUnavailable as err:
            await self._raise_unknown(kind, key, err)
        if isinstance(made, Rejected) and made.code == NOT_FOUND:
            # The namespace is gone, not the object: no writer has created an object of this name.
            self._count(kind, "refused")
            raise _refusal(kind, key, made)
        return await self._outcome(kind, key, made)

    async def write(self, key: ObjectKey, revision: int, value: ApiObject) -> Stored | None:
        """Write the difference to the copy as a patch. A copy at another revision is a conflict.

        Errors: raises InvariantError when the status and something else differ: no one write
        changes both.
        """
        stored = self._known(key)
        if stored is None or stored.revision != revision:
            self._count(_KINDS[key.kind], "lost")
            return None  # the copy shows another version
        patch = bound_patch(stored.value, value)
        kind = _KINDS[key.kind]
        try:
            written = await self._api.patch(
                kind, key.namespace, key.name, patch, part="status" if "status" in patch else ""
            )
        except PeerUnavailable as err:
            await self._raise_unknown(kind, key, err)
        if self._known(key) is None and not isinstance(written, Rejected):
            # The watch brought its deletion before the answer: the copy has what came after this write.
            self._count(kind, "done")
            return _stored(kind, written)
        return await self._outcome(kind, key, written)

    async def delete(self, key: ObjectKey, revision: int) -> bool:
        """Delete an object at a revision. The watch updates the state."""
        kind = _KINDS[key.kind]
        try:
            rejected = await self._api.delete(kind, key.namespace, key.name, version=str(revision))
        except PeerUnavailable as err:
            await self._raise_unknown(kind, key, err)
        if rejected is not None:
            await self._lose(kind, key, rejected)
            return False
        self._count(kind, "done")
        return True

    async def _outcome(self, kind: Kind, key: ObjectKey, written: dict[str, Any] | Rejected) -> Stored | None:
        if isinstance(written, Rejected):
            await self._lose(kind, key, written)
            return None
        self._count(kind, "done")
        return await self._update_copy(kind, key, written)

    async def _lose(self, kind: Kind, key: ObjectKey, rejected: Rejected) -> None:
        """Put the object that was there before our write into the copy.

        Errors: raises PeerUnavailable when the server refuses the write for another reason.
        """
        self._count(kind, "lost" if rejected.is_conflict else "refused")
        if not rejected.is_conflict:
            raise _refusal(kind, key, rejected)
        get_logger().debug("write.lost", kind=kind.name, namespace=key.namespace, name=key.name, why=rejected.message)
        await self.read(key)

    async def _raise_unknown(self, kind: Kind, key: ObjectKey, error: PeerUnavailable) -> NoReturn:
        """Read the object after a write without an answer, and raise that no answer came."""
        self._count(kind, "unknown")
        get_logger().warning(
            "write.ambiguous", kind=kind.name, namespace=key.namespace, name=key.name, error=str(error)
        )
        await self.read(key)
        raise error

    def _count(self, kind: Kind, outcome: str) -> None:
        self._metrics.writes.labels(kind.name, outcome).inc()

    def _known(self, key: ObjectKey) -> Stored | None:
        return self._state.objects.get(key)

    async def _update_copy(self, kind: Kind, key: ObjectKey, plain: dict[str, Any]) -> Stored:
        """Put the server's object into the copy.

        An object that cannot be read is not "gone": the caller sets its work on it aside.

        Errors: raises ContractError.
        """
        version = await self._api.version_of(kind)
        self._state.put(kind.name, version, plain)
        kept = self._known(key)
        if kept is not None:
            return kept
        # The copy does not keep this object, but the caller asked for it.
        return _stored(kind, plain)


def _stored(kind: Kind, plain: dict[str, Any]) -> Stored:
    parts = {part: plain.get(part) or {} for part in ("metadata", "spec", "status")}
    api_object = ApiObject(api_version=str(plain.get("apiVersion")), kind=kind.name, **parts)
    return Stored(version_of(api_object), api_object)


def _refusal(kind: Kind, key: ObjectKey, rejected: Rejected) -> PeerUnavailable:
    """Make the error of a write that the server refuses regardless of other writers."""
    return PeerUnavailable(
        f"API server: {kind.name} {key.namespace}/{key.name}: {rejected.code} {rejected.message}",
        next_step="check the controller's rights in the cluster (deploy/kubernetes/controller.yaml), and that the "
        "namespace is there",
        code=rejected.code,
    )


def bound_patch(before: ApiObject, after: ApiObject) -> dict[str, Any]:
    """Return the merge patch of an object's next version, bound to the version on which that was
    decided.

    Fields that the server keeps and the copy does not are in neither, so they stay as they are.
    Errors: raises InvariantError when the status and something else differ: no one write changes
    both.
    """
    parts = ("metadata", "spec", "status")
    patch = {part: changes for part in parts if (changes := merge_patch(getattr(before, part), getattr(after, part)))}
    if "status" in patch and len(patch) > 1:
        raise InvariantError(
            f"{name_of(before)}: one write changes the status or the rest, not both: got {sorted(patch)}"
        )
    identity = {key: before.metadata.get(key) for key in ("uid", "resourceVersion")}
    return {**patch, "metadata": {**patch.get("metadata", {}), **identity}}
