"""The API server as the gateway uses it: objects in the shape of resource.k8s.io/v1, whatever version
the server has, and watches that reconnect.

Connection, versions and reads are in `topobus.kubernetes`, which the controller uses as well. The
rest of the gateway sees only v1. This module is imported only when a cluster is configured, because
it loads the client library.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from topobus.formats.kubernetes.claim_wire import PROTOBUF, claim_uid, with_device_statuses
from topobus.formats.messages.messages import ApiObject
from topobus.gateway.claims.rules.device_status import replaced_statuses
from topobus.gateway.cluster.objects import (
    CLAIMS,
    NODES,
    NOT_KEPT,
    PODS,
    ClusterChange,
    ClusterChangeKind,
    Rejected,
)
from topobus.gateway.cluster.rules.api_versions import from_served, to_served
from topobus.gateway.config import ClusterSettings
from topobus.kubernetes.access import AccessSettings
from topobus.kubernetes.answers import CONFLICT, INVALID, NOT_FOUND, HistoryLost
from topobus.kubernetes.api_reader import ApiReader
from topobus.kubernetes.client import BACKOFF_LIMIT_S, KubernetesClient, object_path
from topobus.kubernetes.reading import Kind, WatchEventKind
from topobus.process.backoff import full_jitter
from topobus.process.logging import get_logger
from topobus.values.dra_names import group_of_class
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.request import Owner

__all__ = ["KubernetesCluster"]

_PAGE = 250
# Also the answer of a disruption budget that refuses an eviction.
_TOO_MANY_REQUESTS = 429
_NODE_MANAGER = "topobus-gateway"
_ENDED = ("Succeeded", "Failed")


class KubernetesCluster:
    """A client of one API server.

    The server's refusals are values (`Rejected`). All methods that ask raise PeerUnavailable when it
    does not answer, or asks the client to retry later.
    """

    def __init__(self, settings: ClusterSettings, client: KubernetesClient) -> None:
        self._settings = settings
        self._client = client
        self._api = ApiReader(client, _PAGE, "deploy/kubernetes/gateway.yaml")

    @classmethod
    def open(cls, settings: ClusterSettings) -> KubernetesCluster:
        """Read the configuration without sending a request.

        Errors: raises ConfigError when the settings name no configuration or one that cannot be
        used.
        """
        access = AccessSettings(
            kubeconfig="" if settings.mode == "in-cluster" else settings.kubeconfig,
            context=settings.context,
            call_s=settings.call_s,
            setting="gateway: cluster",
            next_step="set TOPOBUS_GATEWAY__CLUSTER__MODE and TOPOBUS_GATEWAY__CLUSTER__KUBECONFIG",
        )
        return cls(settings, KubernetesClient.open(access))

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def get(self, kind: Kind, name: str, namespace: str = "") -> ApiObject | None:
        """Read an object. None: it does not exist."""
        plain = await self._api.get(kind, namespace, name)
        return _object(kind, await self._api.version_of(kind), plain) if plain is not None else None

    async def read_claim(self, namespace: str, name: str) -> ApiObject | None:
        """Read a claim. None: it does not exist."""
        return await self.get(CLAIMS, name, namespace)

    async def may_run(self, pod: Owner, node: str) -> bool:
        """Return whether there is a pod of this name on a node that has not ended."""
        api_object = await self.get(PODS, pod.name, pod.namespace)
        return (
            api_object is not None
            and api_object.spec.get("nodeName") == node
            and api_object.status.get("phase") not in _ENDED
        )

    async def create(self, kind: Kind, api_object: ApiObject, *, is_dry_run: bool = False) -> ApiObject | Rejected:
        """Create an object. Returns what the server stored, or would store (`is_dry_run`)."""
        return await self._write("POST", kind, "", api_object, {"dryRun": "All"} if is_dry_run else None)

    async def update(self, kind: Kind, api_object: ApiObject) -> ApiObject | Rejected:
        """Replace an object with the resource version that it carries."""
        return await self._write("PUT", kind, str(api_object.metadata.get("name", "")), api_object)

    async def delete(self, kind: Kind, name: str, *, uid: str, resource_version: str) -> Rejected | None:
        """Delete an object if it is still this one. None: it is deleted, or was gone already."""
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"uid": uid, "resourceVersion": resource_version},
        }
        answer = await self._api.ask("DELETE", await self._api.path_of(kind, "", name), body=body)
        return answer if isinstance(answer, Rejected) and answer.code != NOT_FOUND else None

    async def annotate(
        self, kind: Kind, name: str, namespace: str, *, uid: str, annotations: Mapping[str, str]
    ) -> Rejected | None:
        """Set annotations of an object if it is still this one, even when its other fields have changed.

        None: it is done.
        """
        # A uid in a patch is a precondition: another object with the same name is refused as a
        # conflict.
        body = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        answer = await self._api.ask("PATCH", await self._api.path_of(kind, namespace, name), body=body)
        return answer if isinstance(answer, Rejected) else None

    async def apply_device_status(
        self, name: str, namespace: str, *, uid: str, device_class: str, devices: Sequence[Mapping[str, Any]]
    ) -> Rejected | None:
        """Apply the entries of a claim's devices of a class, under the class's name. Its earlier
        entries that are not in the list are removed. Entries of other classes and drivers stay.
        """
        # No list instead of an empty one: what this manager applied before is removed either way.
        status = {"devices": list(devices)} if devices else {}
        # A uid in the applied object is a precondition: another claim with the same name is refused
        # as a conflict.
        body = {
            "apiVersion": f"{CLAIMS.group}/{await self._api.version_of(CLAIMS)}",
            "kind": CLAIMS.name,
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "status": status,
        }
        # Only the driver writes entries of its devices, so it may take over a contested field.
        params = {"fieldManager": group_of_class(device_class), "force": "true"}
        path = await self._api.path_of(CLAIMS, namespace, name, "status")
        answer = await self._api.ask("PATCH", path, params=params, body=body, is_applied=True)
        if isinstance(answer, Rejected):
            return (
                await self._replace_device_status(name, namespace, uid, device_class, devices)
                if _is_about_bytes(answer)
                else answer
            )
        shown = (answer.get("status") or {}).get("devices") or []
        if devices and not shown:
            message = "the server stores no status.devices: its feature DRAResourceClaimDeviceStatus is off"
            return Rejected(code=NOT_KEPT, reason="NotKept", message=message)
        if _keys(replaced_statuses(shown, device_class, devices)) != _keys(shown):
            # The entries were written by another method before, so this apply does not remove them.
            return await self._replace_device_status(name, namespace, uid, device_class, devices)
        return None

    async def _replace_device_status(
        self, name: str, namespace: str, uid: str, device_class: str, devices: Sequence[Mapping[str, Any]]
    ) -> Rejected | None:
        """Write the list as a whole, for claims to which nothing can be applied.

        Server-side apply sorts the keys of opaque parameters, and every patch writes them without
        spaces. The server compares the allocation byte by byte and takes either for a change (seen
        on 1.36; kubectl sorts keys and leaves out spaces, Python's and JavaScript's clients do
        not).
        """
        path = await self._api.path_of(CLAIMS, namespace, name)
        claim = await self._api.ask("GET", path)
        if isinstance(claim, Rejected):
            return claim
        present = (claim.get("status") or {}).get("devices") or []
        wanted = replaced_statuses(present, device_class, devices)
        if wanted == present:
            return None
        change = (
            {"op": "add", "path": "/status/devices", "value": wanted}
            if wanted
            else {"op": "remove", "path": "/status/devices"}
        )
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": uid},
            # Entries that another writer has written since are not overwritten.
            {
                "op": "test",
                "path": "/metadata/resourceVersion",
                "value": (claim.get("metadata") or {}).get("resourceVersion"),
            },
            change,
        ]
        answer = await self._api.ask(
            "PATCH", f"{path}/status", params={"fieldManager": group_of_class(device_class)}, body=patch
        )
        if not isinstance(answer, Rejected):
            return None
        if _is_about_bytes(answer):
            return await self._put_device_status(name, namespace, uid, device_class, devices, answer)
        if answer.code == INVALID and answer.message.startswith("the server rejected our request"):
            # This is how a server reports that one of the tests failed.
            return Rejected(code=CONFLICT, reason="Conflict", message=answer.message)
        return answer

    async def _put_device_status(
        self,
        name: str,
        namespace: str,
        uid: str,
        device_class: str,
        devices: Sequence[Mapping[str, Any]],
        refused: Rejected,
    ) -> Rejected | None:
        """Write the same in protobuf, in which opaque parameters keep their spaces.

        A server that does not support protobuf has refused it already.
        """
        path = await self._api.path_of(CLAIMS, namespace, name)
        body = await self._client.fetch_bytes(path, PROTOBUF)
        if isinstance(body, Rejected):
            return body
        try:
            if claim_uid(body) != uid:
                return Rejected(
                    code=CONFLICT, reason="Conflict", message=f"claim {namespace}/{name} is another one by now"
                )
            content = with_device_statuses(body, device_class, devices)
        except ContractError:
            return refused
        # It contains the resource version that was read, so a write by another client in between is
        # a conflict.
        return await self._client.put_bytes(
            f"{path}/status", PROTOBUF, content, params={"fieldManager": group_of_class(device_class)}
        )

    async def apply_node_conditions(
        self, name: str, *, uid: str, conditions: Sequence[Mapping[str, Any]]
    ) -> ApiObject | Rejected:
        """Apply the conditions under our name: those applied before that are not in the list are
        removed, and those of others stay.
        """
        status = {"conditions": list(conditions)} if conditions else {}
        # A uid in the applied object is a precondition.
        body = {"apiVersion": "v1", "kind": NODES.name, "metadata": {"name": name, "uid": uid}, "status": status}
        params = {"fieldManager": _NODE_MANAGER, "force": "true"}
        path = object_path("v1", NODES.plural, name=name, part="status")
        answer = await self._api.ask("PATCH", path, params=params, body=body, is_applied=True)
        return answer if isinstance(answer, Rejected) else _object(NODES, "v1", answer)

    async def patch_node(self, name: str, operations: Sequence[Mapping[str, Any]]) -> ApiObject | Rejected:
        """Change a Node by a JSON patch. A failed test is a refusal."""
        answer = await self._api.ask("PATCH", object_path("v1", NODES.plural, name=name), body=list(operations))
        return answer if isinstance(answer, Rejected) else _object(NODES, "v1", answer)

    async def create_event(self, namespace: str, event: Mapping[str, Any]) -> Rejected | None:
        """Create a v1 Event."""
        answer = await self._api.ask("POST", object_path("v1", "events", namespace=namespace), body=dict(event))
        return answer if isinstance(answer, Rejected) else None

    async def patch_event(self, namespace: str, name: str, changes: Mapping[str, Any]) -> Rejected | None:
        """Change a v1 Event."""
        answer = await self._api.ask(
            "PATCH", object_path("v1", "events", namespace=namespace, name=name), body=dict(changes)
        )
        return answer if isinstance(answer, Rejected) else None

    async def evict(self, name: str, namespace: str, *, uid: str) -> Rejected | None:
        """Request a pod's eviction. A refusal by a disruption budget is a value as well."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        try:
            answer = await self._api.ask(
                "POST", object_path("v1", "pods", namespace=namespace, name=name, part="eviction"), body=body
            )
        except PeerUnavailable as err:
            if err.facts.get("code") != _TOO_MANY_REQUESTS:
                raise
            return Rejected(code=_TOO_MANY_REQUESTS, reason="TooManyRequests", message=err.message)
        return answer if isinstance(answer, Rejected) and answer.code != NOT_FOUND else None

    async def watch(
        self, kind: Kind, *, fields: str, lists_after_loss: bool = False
    ) -> AsyncGenerator[ClusterChange, None]:
        """Follow objects until cancelled. A lasting outage is logged once.

        `lists_after_loss`: give a snapshot after each lost connection, for whoever has to know that
        it may be another server. A server that starts again accepts a version as old as the newest
        change of the kind, and says by nothing that it has other features.
        """
        kind = msgspec.structs.replace(kind, fields=fields)
        version = ""
        is_troubled = False
        failures = lost = 0
        while True:
            try:
                if not version:
                    objects, version = await self._list(kind)
                    yield ClusterChange(kind=ClusterChangeKind.SNAPSHOT, objects=objects)
                if is_troubled:
                    get_logger().info("cluster.watch-healed", kind=kind.name)
                is_troubled, failures = False, 0
                is_alive = False
                async with aclosing(self._stream(kind, version)) as stream:
                    async for change, newest in stream:
                        version, lost, is_alive = newest, 0, True
                        if change is not None:
                            yield change
                if not is_alive:
                    # Usually nothing has changed. A server that ends every watch at once must not
                    # be requested in a hot loop.
                    await asyncio.sleep(full_jitter(0, least_s=self._settings.retry_s))
            except HistoryLost:
                get_logger().info("cluster.history-lost", kind=kind.name, resource_version=version)
                version = ""
                # Once is ordinary. A server that loses every version at once must not be requested
                # in a hot loop.
                if lost:
                    await asyncio.sleep(full_jitter(lost - 1, least_s=self._settings.retry_s, most_s=BACKOFF_LIMIT_S))
                lost += 1
            except PeerUnavailable as err:
                if not is_troubled:
                    get_logger().warning("cluster.watch-lost", kind=kind.name, error=str(err))
                is_troubled = True
                # It may come back with another version.
                self._api.drop_versions()
                if lists_after_loss:
                    version = ""
                pause_s = full_jitter(failures, least_s=self._settings.retry_s, most_s=BACKOFF_LIMIT_S)
                await asyncio.sleep(max(pause_s, min(err.retry_after_s, BACKOFF_LIMIT_S)))
                failures += 1

    async def _list(self, kind: Kind) -> tuple[tuple[ApiObject, ...], str]:
        objects: list[ApiObject] = []
        version = ""
        served = await self._api.version_of(kind)
        async with aclosing(self._api.pages(kind)) as pages:
            async for page in pages:
                objects += [_object(kind, served, item) for item in page.items]
                version = page.version
        return tuple(objects), version

    async def _stream(self, kind: Kind, version: str) -> AsyncGenerator[tuple[ClusterChange | None, str], None]:
        """Read one watch to its end: changes (None for a bookmark) with their version."""
        served = await self._api.version_of(kind)
        async with aclosing(self._api.watch(kind, version)) as events:
            async for event in events:
                if event.kind is WatchEventKind.BOOKMARK:
                    yield None, event.version
                    continue
                kind_of_change = (
                    ClusterChangeKind.DELETE if event.kind is WatchEventKind.DELETE else ClusterChangeKind.PUT
                )
                yield ClusterChange(kind=kind_of_change, objects=(_object(kind, served, event.object),)), event.version

    async def _write(
        self, method: str, kind: Kind, name: str, api_object: ApiObject, params: Mapping[str, str] | None = None
    ) -> ApiObject | Rejected:
        body = {key: value for key, value in msgspec.to_builtins(api_object).items() if key != "status"}
        path = await self._api.path_of(kind, str(api_object.metadata.get("namespace", "")), name)
        version = await self._api.version_of(kind)
        answer = await self._api.ask(
            method, path, params=params, body=to_served(kind.name, body, version) if kind.group else body
        )
        return answer if isinstance(answer, Rejected) else _object(kind, version, answer)


def _keys(devices: Iterable[Mapping[str, Any]]) -> set[tuple[str, str, str, str]]:
    """Return the keys of entries: driver, pool, device and share."""
    return {
        (
            str(device.get("driver")),
            str(device.get("pool")),
            str(device.get("device")),
            str(device.get("shareID") or ""),
        )
        for device in devices
    }


def _is_about_bytes(rejected: Rejected) -> bool:
    """Return whether a write of `status.devices` was refused because of the allocation, which it
    does not change: see `claim_wire`.
    """
    return rejected.code == INVALID and "status.allocation" in rejected.message


def _object(kind: Kind, version: str, plain: object) -> ApiObject:
    """Read an object in the shape of v1.

    Errors: raises PeerUnavailable for a value that is not an object.
    """
    if not isinstance(plain, dict) or not all(
        isinstance(plain.get(part) or {}, dict) for part in ("metadata", "spec", "status")
    ):
        raise PeerUnavailable(f"API server: something that is no {kind.name}: {str(plain)[:80]!r}")
    seen = from_served(kind.name, plain, version)
    # The items of a list have neither kind nor version.
    return ApiObject(
        api_version=f"{kind.group}/v1" if kind.group else "v1",
        kind=kind.name,
        metadata=seen.get("metadata") or {},
        spec=seen.get("spec") or {},
        status=seen.get("status") or {},
    )
