"""The API server client of the controller: kinds in the best version served, paged lists, watches, merge patches.

Flows in: settings. Flows out: an Api. Connections and requests are in `topobus.kubernetes`, which the gateway uses as well. Only the cluster home
imports this module.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from topobus.controller.config import ClusterSettings
from topobus.controller.store.api import (
    FIELD_MANAGER,
    HistoryLost,
    Kind,
    Page,
    Plain,
    Rejected,
    WatchEvent,
    WatchEventKind,
)
from topobus.domain.errors import PeerUnavailable
from topobus.kubernetes.access import AccessSettings
from topobus.kubernetes.answers import GONE, NOT_FOUND, NotServed
from topobus.kubernetes.client import KubernetesClient, object_path

__all__ = ["KubernetesApi"]

_WRITER = {"fieldManager": FIELD_MANAGER}


class KubernetesApi:
    """One API server."""

    def __init__(self, client: KubernetesClient, page: int) -> None:
        self._client = client
        self._page = page
        self._served: dict[str, dict[str, frozenset[str]]] = {}

    @classmethod
    def open(cls, settings: ClusterSettings) -> KubernetesApi:
        """Read the configuration; no request is sent yet.

        Errors: raises ConfigError when there is no configuration where the settings say, or it cannot be used.
        """
        access = AccessSettings(
            kubeconfig=settings.kubeconfig,
            context=settings.context,
            call_s=settings.call_s,
            setting="controller: cluster.kubeconfig",
            next_step="set TOPOBUS_CONTROLLER__CLUSTER__KUBECONFIG to a kubeconfig file, or run in a pod with a service account",
            # A person's dry run reads that person's kubeconfig, which names a program on most clouds.
            runs_programs=True,
        )
        return cls(KubernetesClient.open(access), settings.page)

    @property
    def server(self) -> str:
        """Where it is."""
        return self._client.server

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def version_of(self, kind: Kind) -> str:
        """Name the version in which the server serves a kind, the best that we can read; empty when it serves none of them."""
        for version in kind.versions:
            if kind.plural in await self._plurals(kind.group, version):
                return version
        return ""

    def drop_versions(self) -> None:
        """Ask anew what is served: the server may be another one now."""
        self._served.clear()

    async def get(self, kind: Kind, namespace: str, name: str) -> Plain | None:
        """Read an object from the server; None when there is none."""
        answer = await self._ask("GET", await self._path(kind, namespace, name))
        if isinstance(answer, Rejected):
            if answer.code == NOT_FOUND and answer.reason:
                return None
            if answer.code == NOT_FOUND:
                # The path is not served, which is no word about the object: the server is another one by now.
                self.drop_versions()
            raise _refused(kind, answer)
        return answer

    async def pages(self, kind: Kind) -> AsyncGenerator[Page, None]:
        """List all objects, page by page; raises HistoryLost when the list became too old between two pages."""
        path = await self._path(kind, "")
        params = {"limit": str(self._page)}
        while True:
            answer = await self._ask("GET", path, params=params)
            if isinstance(answer, Rejected):
                if answer.code == GONE:
                    raise HistoryLost
                if answer.code == NOT_FOUND:
                    self.drop_versions()
                raise _refused(kind, answer)
            found_metadata = answer.get("metadata")
            metadata = found_metadata if isinstance(found_metadata, dict) else {}
            more = str(metadata.get("continue") or "")
            items = answer.get("items")
            plain = tuple(item for item in items if isinstance(item, dict)) if isinstance(items, list) else ()
            yield Page(items=plain, version=str(metadata.get("resourceVersion") or ""), is_last=not more)
            if not more:
                return
            params = {**params, "continue": more}

    async def watch(self, kind: Kind, version: str) -> AsyncGenerator[WatchEvent, None]:
        """Follow changes after a version until the server ends the watch; raises HistoryLost."""
        async with aclosing(self._client.watch(await self._path(kind, ""), version)) as events:
            async for change, plain in events:
                newest = str(plain["metadata"]["resourceVersion"])
                if change == "BOOKMARK":
                    yield WatchEvent(kind=WatchEventKind.BOOKMARK, version=newest)
                else:
                    kind_of_change = WatchEventKind.DELETE if change == "DELETED" else WatchEventKind.PUT
                    yield WatchEvent(kind=kind_of_change, version=newest, object=plain)

    async def create(self, kind: Kind, plain: Mapping[str, Any]) -> Plain | Rejected:
        """Make an object; the answer is what the server stored."""
        path = await self._path(kind, str((plain.get("metadata") or {}).get("namespace", "")))
        return await self._ask("POST", path, params=_WRITER, body=plain)

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], *, part: str = "") -> Plain | Rejected:
        """Change an object by a merge patch; one that carries metadata.resourceVersion is refused when the object is another by now."""
        return await self._ask("PATCH", await self._path(kind, namespace, name, part), params=_WRITER, body=patch)

    async def delete(self, kind: Kind, namespace: str, name: str, *, version: str) -> Rejected | None:
        """Delete an object that is still at this version; the server marks one that has finalizers."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"resourceVersion": version}}
        answer = await self._ask("DELETE", await self._path(kind, namespace, name), body=body)
        return answer if isinstance(answer, Rejected) else None

    async def _plurals(self, group: str, version: str) -> frozenset[str]:
        """List what one version of a group has, with list and watch; asked once."""
        versions = self._served.setdefault(group, {})
        if version not in versions:
            try:
                answer = await self._client.ask("GET", f"/apis/{group}/{version}" if group else f"/api/{version}")
            except NotServed:
                answer = {}
            if isinstance(answer, Rejected) and answer.code != NOT_FOUND:
                raise PeerUnavailable(f"API server {self.server}: {group or 'core'}/{version}: {answer.message}")
            resources = [] if isinstance(answer, Rejected) else answer.get("resources")
            entries = [entry for entry in resources if isinstance(entry, dict)] if isinstance(resources, list) else []
            versions[version] = frozenset(str(entry.get("name")) for entry in entries if {"list", "watch"} <= set(entry.get("verbs") or ()))
        return versions[version]

    async def _path(self, kind: Kind, namespace: str, name: str = "", part: str = "") -> str:
        version = await self.version_of(kind)
        if not version:
            wanted = ", ".join(f"{kind.group}/{known_version}" if kind.group else known_version for known_version in kind.versions)
            raise PeerUnavailable(
                f"API server {self.server} does not serve {kind.plural}: wanted one of {wanted}",
                next_step="wants Kubernetes 1.32 or later with Dynamic Resource Allocation",
            )
        api_version = f"{kind.group}/{version}" if kind.group else version
        return object_path(api_version, kind.plural, namespace=namespace if kind.is_namespaced else "", name=name, part=part)

    async def _ask(self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: object = None) -> Plain | Rejected:
        try:
            return await self._client.ask(method, path, params=params, body=body)
        except NotServed:
            # It may have been upgraded since we asked which versions it has.
            self.drop_versions()
            raise


def _refused(kind: Kind, answer: Rejected) -> PeerUnavailable:
    return PeerUnavailable(
        f"API server: {kind.plural}: {answer.code} {answer.message}",
        next_step="check the controller's rights in the cluster (deploy/kubernetes/controller.yaml)",
        code=answer.code,
    )
