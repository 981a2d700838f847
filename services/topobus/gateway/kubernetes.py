"""The API server through lightkube: its configuration and authentication; requests are plain JSON.

Flows in: settings. Flows out: a Cluster. lightkube's own calls are not used: its delete has no preconditions, its watch no bookmarks, and its models would
drop fields that are newer than they. Which version of resource.k8s.io the server has is asked and never assumed; the rest of the gateway sees v1 alone.
This module is imported only when a cluster is configured.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import httpx2
import msgspec

from topobus.contracts.messages import ApiObject
from topobus.domain.errors import ConfigError, PeerUnavailable
from topobus.gateway.cluster import ClusterChange, ClusterChangeKind, Rejected, ResourceKind
from topobus.gateway.config import ClusterSettings
from topobus.gateway.core.served import GROUP, VERSIONS, from_served, to_served
from topobus.gateway.kubernetes_access import Access, KubeConfigError
from topobus.runtime.logging import get_logger

__all__ = ["KubernetesCluster"]

_PAGE = 250
# The server ends a watch after this long in order, so that load spreads over servers again; client-go asks for five to ten minutes.
_WATCH_S = 300
# Bookmarks come about once a minute: this long without a line means that the connection is dead though nobody closed it.
_SILENCE_S = 90.0
_BACKOFF_LIMIT_S = 10.0
_MOST_DOUBLINGS = 16
_RIGHTS = "check the gateway's rights in the cluster"
_NOT_FOUND = 404
_GONE = 410
_UNAUTHORIZED = 401


class _HistoryLost(Exception):
    """Raised inside when the server has forgotten what came after our version."""


class _NotServed(PeerUnavailable):
    """Raised inside when the server has no such path, and therefore says so in plain text: an object that is not there is a Status."""


class KubernetesCluster:
    """One API server."""

    def __init__(self, settings: ClusterSettings, access: Access) -> None:
        self._settings = settings
        self._access = access
        self._retired: list[httpx2.AsyncClient] = []
        self._version = ""
        """Of resource.k8s.io; empty: not asked yet, or to be asked again."""
        self._not_before = 0.0
        """The event loop's time up to which the server wants to be left alone."""

    @classmethod
    def open(cls, settings: ClusterSettings) -> KubernetesCluster:
        """Read the configuration; nothing is asked yet.

        Errors: raises ConfigError when there is no configuration where the settings say, or it cannot be used.
        """
        return cls(settings, Access.read(settings))

    @property
    def server(self) -> str:
        """Where it is."""
        return self._access.server

    async def close(self) -> None:
        """Close all connections."""
        for client in (*self._retired, self._access.client):
            await client.aclose()

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> ApiObject | None:
        """Read an object; None when there is none."""
        version = await self._version_of(kind)
        answer = await self._ask("GET", _path(kind, version, namespace, name))
        if isinstance(answer, Rejected):
            if answer.code == _NOT_FOUND:
                return None
            raise PeerUnavailable(f"API server: {kind.kind} {name}: {answer.message}", next_step=_RIGHTS)
        return _object(kind, version, answer)

    async def create(self, kind: ResourceKind, one: ApiObject) -> ApiObject | Rejected:
        """Make an object."""
        return await self._write("POST", kind, "", one)

    async def update(self, kind: ResourceKind, one: ApiObject) -> ApiObject | Rejected:
        """Replace an object."""
        return await self._write("PUT", kind, str(one.metadata.get("name", "")), one)

    async def delete(self, kind: ResourceKind, name: str, *, uid: str, resource_version: str) -> Rejected | None:
        """Delete exactly this object."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid, "resourceVersion": resource_version}}
        answer = await self._ask("DELETE", _path(kind, await self._version_of(kind), "", name), body=body)
        return answer if isinstance(answer, Rejected) and answer.code != _NOT_FOUND else None

    async def watch(self, kind: ResourceKind, *, fields: str) -> AsyncGenerator[ClusterChange, None]:
        """Follow objects for ever; the trouble of a lasting outage is logged once."""
        version = ""
        pause_s = self._settings.retry_s
        is_troubled = False
        lost = 0
        while True:
            try:
                if not version:
                    objects, version = await self._list(kind, fields)
                    yield ClusterChange(kind=ClusterChangeKind.SNAPSHOT, objects=objects)
                if is_troubled:
                    get_logger().info("cluster.watch-healed", kind=kind.kind)
                is_troubled, pause_s = False, self._settings.retry_s
                async with aclosing(self._stream(kind, fields, version)) as stream:
                    async for change, newest in stream:
                        version, lost = newest, 0
                        if change is not None:
                            yield change
            except _HistoryLost:
                get_logger().info("cluster.history-lost", kind=kind.kind, resource_version=version)
                version = ""
                # Once is ordinary. A server that loses every version at once must not be asked as fast as it answers.
                if lost:
                    await asyncio.sleep(min(self._settings.retry_s * 2 ** (lost - 1), _BACKOFF_LIMIT_S))
                lost = min(lost + 1, _MOST_DOUBLINGS)
            except PeerUnavailable as err:
                if not is_troubled:
                    get_logger().warning("cluster.watch-lost", kind=kind.kind, error=str(err))
                is_troubled = True
                # It may come back as another version of itself.
                self._version = ""
                await asyncio.sleep(max(pause_s, min(err.retry_after_s, _BACKOFF_LIMIT_S)))
                pause_s = min(pause_s * 2, _BACKOFF_LIMIT_S)

    async def _list(self, kind: ResourceKind, fields: str) -> tuple[tuple[ApiObject, ...], str]:
        found: list[ApiObject] = []
        params = {"fieldSelector": fields, "limit": str(_PAGE)}
        served = await self._version_of(kind)
        while True:
            answer = await self._ask("GET", _path(kind, served), params=params)
            if isinstance(answer, Rejected):
                if answer.code == _GONE:
                    raise _HistoryLost
                raise PeerUnavailable(f"API server: list of {kind.plural}: {answer.message}", next_step=_RIGHTS)
            # No items are null on the wire.
            items, metadata = answer.get("items") or [], answer.get("metadata")
            if not isinstance(items, list) or not isinstance(metadata, dict) or not metadata.get("resourceVersion"):
                raise PeerUnavailable(f"API server {self.server}: list of {kind.plural}: the answer is no list")
            found += [_object(kind, served, one) for one in items]
            if not metadata.get("continue"):
                return tuple(found), str(metadata.get("resourceVersion", ""))
            params = {**params, "continue": str(metadata["continue"])}

    async def _stream(self, kind: ResourceKind, fields: str, version: str) -> AsyncGenerator[tuple[ClusterChange | None, str], None]:
        """Read one watch to its end: changes (None for a bookmark) with the version that they bring."""
        params = {
            "watch": "true",
            "fieldSelector": fields,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
        }
        timeout = httpx2.Timeout(self._settings.call_s, read=_SILENCE_S)
        served = await self._version_of(kind)
        await self._renew()
        try:
            async with self._access.client.stream("GET", _path(kind, served), params=params, timeout=timeout) as answer:
                if answer.status_code == _GONE:
                    raise _HistoryLost
                if answer.status_code != httpx2.codes.OK:
                    await answer.aread()
                    raise _unavailable(answer)
                async for line in answer.aiter_lines():
                    event = _event(line)
                    body = event["object"]
                    if event["type"] == "ERROR":
                        if body.get("code") == _GONE:
                            raise _HistoryLost
                        raise PeerUnavailable(f"API server: watch of {kind.plural}: {body.get('message')}")
                    newest = str(body["metadata"]["resourceVersion"])
                    if event["type"] == "BOOKMARK":
                        yield None, newest
                        continue
                    change = ClusterChangeKind.DELETE if event["type"] == "DELETED" else ClusterChangeKind.PUT
                    yield ClusterChange(kind=change, objects=(_object(kind, served, body),)), newest
        except (httpx2.HTTPError, KubeConfigError, OSError, ValueError, KeyError, TypeError) as err:
            raise PeerUnavailable(f"API server {self.server}: watch of {kind.plural}: {_said(err)}", retry_after_s=0.0) from err

    async def _write(self, method: str, kind: ResourceKind, name: str, one: ApiObject) -> ApiObject | Rejected:
        version = await self._version_of(kind)
        body = {key: value for key, value in msgspec.to_builtins(one).items() if key != "status"}
        path = _path(kind, version, str(one.metadata.get("namespace", "")), name)
        answer = await self._ask(method, path, body=to_served(kind.kind, body, version) if version else body)
        return answer if isinstance(answer, Rejected) else _object(kind, version, answer)

    async def _version_of(self, kind: ResourceKind) -> str:
        """Find the newest version of resource.k8s.io that the server has and we know; empty for kinds of other groups."""
        if not kind.api_version.startswith(f"{GROUP}/"):
            return ""
        if not self._version:
            for version in VERSIONS:
                try:
                    answer = await self._ask("GET", f"/apis/{GROUP}/{version}")
                except _NotServed:
                    continue
                if isinstance(answer, Rejected) and answer.code != _NOT_FOUND:
                    # Discovery is closed to us: the present version is the best guess, and a wrong one answers for itself.
                    self._version = VERSIONS[0]
                    break
                names = {one.get("name") for one in answer.get("resources") or ()} if isinstance(answer, dict) else set()
                if kind.plural in names:
                    self._version = version
                    get_logger().info("cluster.version-chosen", server=self.server, group=GROUP, version=version)
                    break
            else:
                raise PeerUnavailable(
                    f"API server {self.server} has {kind.plural} in none of {', '.join(f'{GROUP}/{one}' for one in VERSIONS)}",
                    next_step="Kubernetes 1.34 or newer has them; 1.32 and 1.33 with DynamicResourceAllocation and their beta version switched on",
                )
        return self._version

    async def _ask(self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: Any = None) -> dict[str, Any] | Rejected:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._not_before - loop.time()))
        try:
            answer = await self._send(method, path, params, body)
        except (httpx2.HTTPError, KubeConfigError, OSError, ValueError) as err:
            raise PeerUnavailable(f"API server {self.server}: {_said(err)}", retry_after_s=0.0) from err
        # Before the body is read: what stands in the way of requests (too many of them, a proxy) answers in plain text.
        if answer.status_code in (_UNAUTHORIZED, 408, 429) or answer.status_code >= httpx2.codes.INTERNAL_SERVER_ERROR:
            trouble = _unavailable(answer)
            self._not_before = loop.time() + min(trouble.retry_after_s, _BACKOFF_LIMIT_S)
            raise trouble
        try:
            plain = answer.json() if answer.content else {}
        except ValueError as err:
            if answer.status_code == _NOT_FOUND:
                # It may have been upgraded since we asked which versions it has.
                self._version = ""
                raise _NotServed(f"API server {self.server} has no {path}", retry_after_s=0.0) from err
            if not answer.is_success:
                return Rejected(code=answer.status_code, reason="", message=answer.text[:200].strip())
            raise PeerUnavailable(f"API server {self.server}: {method} {path}: {_said(err)}", retry_after_s=0.0) from err
        if not isinstance(plain, dict):
            raise PeerUnavailable(f"API server {self.server}: {method} {path}: the answer is no object but {str(plain)[:80]!r}")
        if answer.is_success:
            return plain
        return Rejected(code=answer.status_code, reason=str(plain.get("reason", "")), message=str(plain.get("message", "")))

    async def _send(self, method: str, path: str, params: Mapping[str, str] | None, body: Any) -> httpx2.Response:
        """Send, and once more when it failed because our token or certificates have been replaced."""
        try:
            answer = await self._access.client.request(method, path, params=params, json=body)
        except (httpx2.TransportError, KubeConfigError, OSError):
            if not await self._renew():
                raise
        else:
            if answer.status_code != _UNAUTHORIZED or not await self._renew():
                return answer
        return await self._access.client.request(method, path, params=params, json=body)

    async def _renew(self) -> bool:
        """Read the configuration again if its files are others by now; False when they are not, or cannot be used yet."""
        if not self._access.is_outdated:
            return False
        try:
            fresh = Access.read(self._settings)
        except ConfigError as err:
            # Half written, perhaps: the next trouble looks again.
            get_logger().warning("cluster.renew-failed", error=str(err))
            return False
        old, self._access = self._access, fresh
        get_logger().info("cluster.renewed", server=fresh.server)
        # Calls may be under way with the former one; the one before it has had its time.
        self._retired.append(old.client)
        while len(self._retired) > 1:
            await self._retired.pop(0).aclose()
        return True


def _event(line: str) -> dict[str, Any]:
    """Read a line of a watch.

    Errors: raises ValueError for what is no event.
    """
    event = json.loads(line)
    if not isinstance(event, dict) or not isinstance(event.get("object"), dict) or not isinstance(event.get("type"), str):
        raise ValueError(f"a line that is no event: {line[:80]!r}")
    return event


def _path(kind: ResourceKind, version: str, namespace: str = "", name: str = "") -> str:
    """Path of a kind or an object; `version` of resource.k8s.io, empty for kinds of other groups."""
    api_version = f"{GROUP}/{version}" if version else kind.api_version
    root = "apis" if "/" in api_version else "api"
    middle = f"/namespaces/{namespace}" if kind.is_namespaced else ""
    return f"/{root}/{api_version}{middle}/{kind.plural}" + (f"/{name}" if name else "")


def _object(kind: ResourceKind, version: str, plain: object) -> ApiObject:
    """Read an object in the shape of v1.

    Errors: raises PeerUnavailable for what is no object.
    """
    if not isinstance(plain, dict) or not all(isinstance(plain.get(part) or {}, dict) for part in ("metadata", "spec", "status")):
        raise PeerUnavailable(f"API server: something that is no {kind.kind}: {str(plain)[:80]!r}")
    seen = from_served(kind.kind, plain, version)
    # The items of a list carry neither kind nor version.
    return ApiObject(
        api_version=kind.api_version,
        kind=kind.kind,
        metadata=seen.get("metadata") or {},
        spec=seen.get("spec") or {},
        status=seen.get("status") or {},
    )


def _unavailable(answer: httpx2.Response) -> PeerUnavailable:
    try:
        text = str(answer.json().get("message", ""))
    except (ValueError, AttributeError):
        text = answer.text[:200].strip()
    after = answer.headers.get("retry-after", "")
    return PeerUnavailable(
        f"API server answered {answer.status_code}: {text}",
        retry_after_s=float(after) if after.isdecimal() else 0.0,
        code=answer.status_code,
    )


def _said(err: Exception) -> str:
    # Some of the library's errors have no text at all.
    return str(err) or type(err).__name__
