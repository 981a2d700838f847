"""The API server through lightkube: its configuration, authentication and connections; requests are plain JSON.

Flows in: settings. Flows out: an Api. lightkube's own calls are not used: its watch has no bookmarks, its delete no preconditions, and its models would drop fields
that are newer than they. This module is imported only in the cluster's home.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import msgspec
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError as KubeConfigError
from yaml import YAMLError

from topobus.controller.cluster.api import FIELD_MANAGER, HistoryLost, Kind, Page, Plain, Rejected, WatchEvent, WatchEventKind
from topobus.controller.config import ClusterSettings
from topobus.domain.errors import ConfigError, PeerUnavailable

__all__ = ["KubernetesApi"]

# The server ends a watch after this long in order, so that load spreads over servers again; client-go asks for five to ten minutes.
_WATCH_S = 300
# Bookmarks come about once a minute: this long without a line means that the connection is dead though nobody closed it.
_SILENCE_S = 90.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_GONE = 410
_MERGE = {"content-type": "application/merge-patch+json"}


class KubernetesApi:
    """One API server."""

    def __init__(self, client: httpx2.AsyncClient, server: str, page: int) -> None:
        self.server = server
        self._client = client
        self._page = page
        self._served: dict[str, dict[str, frozenset[str]]] = {}

    @classmethod
    def open(cls, settings: ClusterSettings) -> KubernetesApi:
        """Read the configuration; nothing is asked yet.

        Errors: raises ConfigError when there is no configuration where the settings say, or it cannot be used.
        """
        try:
            config = _load(settings)
            is_local = urlsplit(config.cluster.server).hostname in _LOOPBACK
            # As other Kubernetes clients do, take the environment's proxy, but never to reach this very machine.
            params = ConnectionParams(timeout=httpx2.Timeout(settings.call_s), trust_env=not is_local)
            return cls(AsyncClient(config, params), config.cluster.server, settings.page)
        except (KubeConfigError, YAMLError, OSError, AttributeError, KeyError, TypeError, ValueError) as err:
            # The library looks into whatever the file holds without asking what it is.
            where = settings.kubeconfig or "the pod's service account"
            raise ConfigError(
                f"controller: cluster.kubeconfig: cannot use {where}: {err}",
                next_step="set TOPOBUS_CONTROLLER__CLUSTER__KUBECONFIG to a kubeconfig file, or run in a pod with a service account",
                key="cluster.kubeconfig",
            ) from err

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def version_of(self, kind: Kind) -> str:
        """Name the version in which the server serves a kind, the best that we can read; empty when it serves none of them."""
        for version in kind.versions:
            if kind.plural in await self._plurals(kind.group, version):
                return version
        return ""

    def forget_versions(self) -> None:
        """Ask anew what is served: the server may be another one now."""
        self._served.clear()

    async def get(self, kind: Kind, namespace: str, name: str) -> Plain | None:
        """Read an object as it is now; None when there is none."""
        answer = await self._ask("GET", await self._path(kind, namespace, name))
        if isinstance(answer, Rejected):
            if answer.code == 404 and answer.reason:
                return None
            if answer.code == 404:
                # The path is not served, which is no word about the object: the server is another one by now.
                self.forget_versions()
            raise _refused(kind, answer)
        return answer

    async def pages(self, kind: Kind) -> AsyncGenerator[Page, None]:
        """List all objects, page by page; raises HistoryLost when the list became too old between two pages."""
        path = await self._path(kind, "")
        params = {"limit": str(self._page)}
        while True:
            answer = await self._ask("GET", path, params=params)
            if isinstance(answer, Rejected):
                if answer.code == _GONE:
                    raise HistoryLost
                if answer.code == 404:
                    self.forget_versions()
                raise _refused(kind, answer)
            found = answer.get("metadata")
            metadata = found if isinstance(found, dict) else {}
            more = str(metadata.get("continue") or "")
            items = answer.get("items")
            plain = tuple(one for one in items if isinstance(one, dict)) if isinstance(items, list) else ()
            yield Page(items=plain, version=str(metadata.get("resourceVersion") or ""), is_last=not more)
            if not more:
                return
            params = {**params, "continue": more}

    async def watch(self, kind: Kind, version: str) -> AsyncGenerator[WatchEvent, None]:
        """Follow changes after a version until the server ends the watch; raises HistoryLost."""
        path = await self._path(kind, "")
        params = {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true", "timeoutSeconds": str(_WATCH_S)}
        timeout = httpx2.Timeout(self._client.timeout.connect, read=_SILENCE_S)
        try:
            async with self._client.stream("GET", path, params=params, timeout=timeout) as answer:
                if answer.status_code == _GONE:
                    raise HistoryLost
                if answer.status_code != 200:
                    await answer.aread()
                    raise _unavailable(answer)
                async for line in answer.aiter_lines():
                    yield _event(kind, line)
        except (httpx2.HTTPError, ValueError, KeyError, TypeError, RecursionError) as err:
            raise PeerUnavailable(f"API server {self.server}: watch of {kind.plural}: {_said(err)}", retry_after_s=0.0) from err

    async def create(self, kind: Kind, one: Mapping[str, Any]) -> Plain | Rejected:
        """Make an object; the answer is what the server stored."""
        path = await self._path(kind, str((one.get("metadata") or {}).get("namespace", "")))
        return await self._ask("POST", path, params={"fieldManager": FIELD_MANAGER}, body=one)

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], *, part: str = "") -> Plain | Rejected:
        """Change an object by a merge patch; one that carries metadata.resourceVersion is refused when the object is another by now."""
        path = await self._path(kind, namespace, name) + (f"/{part}" if part else "")
        return await self._ask("PATCH", path, params={"fieldManager": FIELD_MANAGER}, body=patch, headers=_MERGE)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> Rejected | None:
        """Delete an object if it is still this one; one that is gone already is done."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        answer = await self._ask("DELETE", await self._path(kind, namespace, name), body=body)
        return answer if isinstance(answer, Rejected) and answer.code != 404 else None

    async def _plurals(self, group: str, version: str) -> frozenset[str]:
        """List what one version of a group has, with list and watch; asked once."""
        known = self._served.setdefault(group, {})
        if version not in known:
            answer = await self._ask("GET", f"/apis/{group}/{version}" if group else f"/api/{version}")
            if isinstance(answer, Rejected) and answer.code != 404:
                raise PeerUnavailable(f"API server {self.server}: {group or 'core'}/{version}: {answer.message}")
            found = [] if isinstance(answer, Rejected) else answer.get("resources")
            entries = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
            known[version] = frozenset(str(one.get("name")) for one in entries if {"list", "watch"} <= set(one.get("verbs") or ()))
        return known[version]

    async def _path(self, kind: Kind, namespace: str, name: str = "") -> str:
        version = await self.version_of(kind)
        if not version:
            wanted = ", ".join(f"{kind.group}/{one}" if kind.group else one for one in kind.versions)
            raise PeerUnavailable(
                f"API server {self.server} does not serve {kind.plural}: wanted one of {wanted}",
                next_step="wants Kubernetes 1.32 or later with Dynamic Resource Allocation",
            )
        root = f"/apis/{kind.group}/{version}" if kind.group else f"/api/{version}"
        middle = f"/namespaces/{namespace}" if kind.is_namespaced and namespace else ""
        return f"{root}{middle}/{kind.plural}" + (f"/{name}" if name else "")

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Plain | Rejected:
        try:
            content = json.dumps(body).encode() if body is not None else None
            sent = {"content-type": "application/json", **(headers or {})}
            answer = await self._client.request(method, path, params=params, content=content, headers=sent)
            plain = _plain(answer)
        except (httpx2.HTTPError, KubeConfigError, ValueError, RecursionError) as err:
            raise PeerUnavailable(f"API server {self.server}: {_said(err)}", retry_after_s=0.0) from err
        if not isinstance(plain, dict):
            raise PeerUnavailable(f"API server {self.server}: {method} {path}: got {type(plain).__name__}, wanted an object")
        if answer.is_success:
            return plain
        if answer.status_code in (401, 408, 429) or answer.status_code >= 500:
            raise _unavailable(answer)
        return Rejected(code=answer.status_code, reason=str(plain.get("reason", "")), message=str(plain.get("message", "")))


def _load(settings: ClusterSettings) -> SingleConfig:
    config = KubeConfig.from_file(Path(settings.kubeconfig)) if settings.kubeconfig else KubeConfig.from_service_account()
    chosen = config.get(settings.context or None)
    if chosen is None or chosen.user is None:
        raise KubeConfigError("it names no user")
    return chosen


def _event(kind: Kind, line: str) -> WatchEvent:
    """Read a line of a watch; raises HistoryLost, or PeerUnavailable when the server ends the watch with an error."""
    event = msgspec.json.decode(line)
    body = event["object"]
    if event["type"] == "ERROR":
        if body.get("code") == _GONE:
            raise HistoryLost
        raise PeerUnavailable(f"API server: watch of {kind.plural}: {body.get('message')}")
    version = str(body["metadata"]["resourceVersion"])
    if event["type"] == "BOOKMARK":
        return WatchEvent(kind=WatchEventKind.BOOKMARK, version=version)
    change = WatchEventKind.DELETE if event["type"] == "DELETED" else WatchEventKind.PUT
    return WatchEvent(kind=change, version=version, object=body)


def _plain(answer: httpx2.Response) -> object:
    """Read a body; an error may be plain text: of a path that is not served, of a limit on requests, of a proxy. It is then without a reason.

    Errors: raises ValueError for a success that is no JSON.
    """
    try:
        return msgspec.json.decode(answer.content) if answer.content else {}
    except ValueError:
        if answer.is_success:
            raise
        return {"message": answer.text[:200].strip()}


def _refused(kind: Kind, answer: Rejected) -> PeerUnavailable:
    return PeerUnavailable(
        f"API server: {kind.plural}: {answer.code} {answer.message}",
        next_step="check the controller's rights in the cluster (deploy/kubernetes/controller.yaml)",
        code=answer.code,
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
