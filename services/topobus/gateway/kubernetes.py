"""The API server through lightkube: its configuration and authentication; requests are plain JSON.

Flows in: settings. Flows out: a Cluster. lightkube's own calls are not used: its delete has no preconditions, its watch no bookmarks, and its models would
drop fields that are newer than they. This module is imported only when a cluster is configured.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import msgspec
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError as KubeConfigError

from topobus.contracts.messages import ApiObject
from topobus.domain.errors import ConfigError, PeerUnavailable
from topobus.gateway.cluster import ClusterChange, ClusterChangeKind, Rejected, ResourceKind
from topobus.gateway.config import ClusterSettings
from topobus.runtime.logging import get_logger

__all__ = ["KubernetesCluster"]

_PAGE = 250
# The server ends a watch after this long in order, so that load spreads over servers again; client-go asks for five to ten minutes.
_WATCH_S = 300
# Bookmarks come about once a minute: this long without a line means that the connection is dead though nobody closed it.
_SILENCE_S = 90.0
_BACKOFF_LIMIT_S = 10.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class _HistoryLost(Exception):
    """Raised inside when the server has forgotten what came after our version."""


class KubernetesCluster:
    """One API server."""

    def __init__(self, client: httpx2.AsyncClient, server: str, retry_s: float) -> None:
        self.server = server
        self._client = client
        self._retry_s = retry_s

    @classmethod
    def open(cls, settings: ClusterSettings) -> KubernetesCluster:
        """Read the configuration; nothing is asked yet.

        Errors: raises ConfigError when there is no configuration where the settings say, or it cannot be used.
        """
        try:
            config = _load(settings)
            is_local = urlsplit(config.cluster.server).hostname in _LOOPBACK
            # As other Kubernetes clients do, take the environment's proxy, but never to reach this very machine.
            params = ConnectionParams(timeout=httpx2.Timeout(settings.call_s), trust_env=not is_local)
            return cls(AsyncClient(config, params), config.cluster.server, settings.retry_s)
        except (KubeConfigError, OSError, KeyError, TypeError, ValueError) as err:
            where = "the pod's service account" if settings.mode == "in-cluster" else settings.kubeconfig
            raise ConfigError(
                f"gateway: cluster: cannot use {where}: {err}",
                next_step="set TOPOBUS_GATEWAY__CLUSTER__MODE and TOPOBUS_GATEWAY__CLUSTER__KUBECONFIG",
            ) from err

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> ApiObject | None:
        """Read an object; None when there is none."""
        answer = await self._ask("GET", _path(kind, namespace, name))
        if isinstance(answer, Rejected):
            if answer.code == 404:
                return None
            raise PeerUnavailable(
                f"API server: {kind.kind} {name}: {answer.message}", next_step="check the gateway's rights in the cluster"
            )
        return _object(kind, answer)

    async def create(self, kind: ResourceKind, one: ApiObject) -> ApiObject | Rejected:
        """Make an object."""
        return await self._write("POST", kind, _path(kind, _namespace(one)), one)

    async def update(self, kind: ResourceKind, one: ApiObject) -> ApiObject | Rejected:
        """Replace an object."""
        return await self._write("PUT", kind, _path(kind, _namespace(one), str(one.metadata.get("name", ""))), one)

    async def delete(self, kind: ResourceKind, name: str, *, uid: str, resource_version: str) -> Rejected | None:
        """Delete exactly this object."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid, "resourceVersion": resource_version}}
        answer = await self._ask("DELETE", _path(kind, "", name), body=body)
        return answer if isinstance(answer, Rejected) and answer.code != 404 else None

    async def watch(self, kind: ResourceKind, *, fields: str) -> AsyncGenerator[ClusterChange, None]:
        """Follow objects for ever; the trouble of a lasting outage is logged once."""
        version = ""
        pause_s = self._retry_s
        is_troubled = False
        while True:
            try:
                if not version:
                    objects, version = await self._list(kind, fields)
                    yield ClusterChange(kind=ClusterChangeKind.SNAPSHOT, objects=objects)
                if is_troubled:
                    get_logger().info("cluster.watch-healed", kind=kind.kind)
                is_troubled, pause_s = False, self._retry_s
                async with aclosing(self._stream(kind, fields, version)) as stream:
                    async for change, newest in stream:
                        version = newest
                        if change is not None:
                            yield change
            except _HistoryLost:
                get_logger().info("cluster.history-lost", kind=kind.kind, resource_version=version)
                version = ""
            except PeerUnavailable as err:
                if not is_troubled:
                    get_logger().warning("cluster.watch-lost", kind=kind.kind, error=str(err))
                is_troubled = True
                await asyncio.sleep(max(pause_s, min(err.retry_after_s, _BACKOFF_LIMIT_S)))
                pause_s = min(pause_s * 2, _BACKOFF_LIMIT_S)

    async def _list(self, kind: ResourceKind, fields: str) -> tuple[tuple[ApiObject, ...], str]:
        found: list[ApiObject] = []
        params = {"fieldSelector": fields, "limit": str(_PAGE)}
        while True:
            answer = await self._ask("GET", _path(kind, ""), params=params)
            if isinstance(answer, Rejected):
                if answer.code == 410:
                    raise _HistoryLost
                raise PeerUnavailable(
                    f"API server: list of {kind.plural}: {answer.message}", next_step="check the gateway's rights in the cluster"
                )
            found += [_object(kind, one) for one in answer.get("items") or ()]
            metadata = answer.get("metadata") or {}
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
        timeout = httpx2.Timeout(self._client.timeout.connect, read=_SILENCE_S)
        try:
            async with self._client.stream("GET", _path(kind, ""), params=params, timeout=timeout) as answer:
                if answer.status_code == 410:
                    raise _HistoryLost
                if answer.status_code != 200:
                    await answer.aread()
                    raise _unavailable(answer)
                async for line in answer.aiter_lines():
                    event = json.loads(line)
                    body = event["object"]
                    if event["type"] == "ERROR":
                        if body.get("code") == 410:
                            raise _HistoryLost
                        raise PeerUnavailable(f"API server: watch of {kind.plural}: {body.get('message')}")
                    newest = str(body["metadata"]["resourceVersion"])
                    if event["type"] == "BOOKMARK":
                        yield None, newest
                        continue
                    change = ClusterChangeKind.DELETE if event["type"] == "DELETED" else ClusterChangeKind.PUT
                    yield ClusterChange(kind=change, objects=(_object(kind, body),)), newest
        except (httpx2.HTTPError, ValueError, KeyError) as err:
            raise PeerUnavailable(f"API server {self.server}: watch of {kind.plural}: {_said(err)}", retry_after_s=0.0) from err

    async def _write(self, method: str, kind: ResourceKind, path: str, one: ApiObject) -> ApiObject | Rejected:
        body = {key: value for key, value in msgspec.to_builtins(one).items() if key != "status"}
        answer = await self._ask(method, path, body=body)
        return answer if isinstance(answer, Rejected) else _object(kind, answer)

    async def _ask(self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: Any = None) -> dict[str, Any] | Rejected:
        try:
            answer = await self._client.request(method, path, params=params, json=body)
            plain = answer.json() if answer.content else {}
        except (httpx2.HTTPError, KubeConfigError, ValueError) as err:
            raise PeerUnavailable(f"API server {self.server}: {_said(err)}", retry_after_s=0.0) from err
        if answer.is_success:
            return dict(plain)
        if answer.status_code in (401, 408, 429) or answer.status_code >= 500:
            raise _unavailable(answer)
        return Rejected(code=answer.status_code, reason=str(plain.get("reason", "")), message=str(plain.get("message", "")))


def _load(settings: ClusterSettings) -> SingleConfig:
    config = KubeConfig.from_service_account() if settings.mode == "in-cluster" else KubeConfig.from_file(Path(settings.kubeconfig))
    chosen = config.get(settings.context or None)
    if chosen is None or chosen.user is None:
        raise KubeConfigError("it names no user")
    return chosen


def _path(kind: ResourceKind, namespace: str, name: str = "") -> str:
    root = "apis" if "/" in kind.api_version else "api"
    middle = f"/namespaces/{namespace}" if kind.is_namespaced else ""
    return f"/{root}/{kind.api_version}{middle}/{kind.plural}" + (f"/{name}" if name else "")


def _namespace(one: ApiObject) -> str:
    return str(one.metadata.get("namespace", ""))


def _object(kind: ResourceKind, plain: Mapping[str, Any]) -> ApiObject:
    # The items of a list carry neither kind nor version.
    return ApiObject(
        api_version=kind.api_version,
        kind=kind.kind,
        metadata=plain.get("metadata") or {},
        spec=plain.get("spec") or {},
        status=plain.get("status") or {},
    )


def _unavailable(answer: httpx2.Response) -> PeerUnavailable:
    try:
        text = str(answer.json().get("message", ""))
    except (ValueError, AttributeError):
        text = answer.text[:200]
    after = answer.headers.get("retry-after", "")
    return PeerUnavailable(
        f"API server answered {answer.status_code}: {text}",
        retry_after_s=float(after) if after.isdecimal() else 0.0,
        code=answer.status_code,
    )


def _said(err: Exception) -> str:
    # Some of the library's errors have no text at all.
    return str(err) or type(err).__name__
