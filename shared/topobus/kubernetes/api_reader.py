"""Reads an API server for informers: kinds in the best version served, paged lists, watches.

Connections and requests are in `topobus.kubernetes.client`. This reader writes nothing. Writers use
the same client through `ask`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from topobus.kubernetes.answers import GONE, NOT_FOUND, HistoryLost, NotServed, Plain, Rejected
from topobus.kubernetes.client import KubernetesClient, object_path
from topobus.kubernetes.reading import Kind, Page, WatchEvent, WatchEventKind
from topobus.values.errors import PeerUnavailable

__all__ = ["ApiReader"]


class ApiReader:
    """Reads one API server.

    Shapes: page — objects in one page of a list; rights — where an operator finds our read
    permissions, for error messages.
    """

    def __init__(self, client: KubernetesClient, page: int, rights: str) -> None:
        self._client = client
        self._page = page
        self._rights = rights
        self._served: dict[str, dict[str, frozenset[str]]] = {}

    @property
    def server(self) -> str:
        """The server's address."""
        return self._client.server

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def version_of(self, kind: Kind) -> str:
        """Name the best version of a kind that the server serves and we can read.

        Empty when there is none.
        """
        for version in kind.versions:
            if kind.plural in await self._plurals(kind.group, version):
                return version
        return ""

    def drop_versions(self) -> None:
        """Discard the known versions, because the server may have been replaced or upgraded."""
        self._served.clear()

    async def get(self, kind: Kind, namespace: str, name: str) -> Plain | None:
        """Read an object from the server. None: it does not exist.

        Errors: raises PeerUnavailable.
        """
        answer = await self.ask("GET", await self.path_of(kind, namespace, name))
        if isinstance(answer, Rejected):
            if answer.code == NOT_FOUND and answer.reason:
                return None
            if answer.code == NOT_FOUND:
                # The path is not served, which proves nothing about the object: the server has been
                # replaced or upgraded.
                self.drop_versions()
            raise self._refused(kind, answer)
        return answer

    async def pages(self, kind: Kind) -> AsyncGenerator[Page, None]:
        """List all objects, page by page.

        Errors: raises HistoryLost when the list became too old between two pages, and
        PeerUnavailable.
        """
        path = await self.path_of(kind, "")
        params = {"limit": str(self._page), **_selected(kind)}
        while True:
            answer = await self.ask("GET", path, params=params)
            if isinstance(answer, Rejected):
                if answer.code == GONE:
                    raise HistoryLost
                if answer.code == NOT_FOUND:
                    self.drop_versions()
                raise self._refused(kind, answer)
            # An empty list of items is null on the wire.
            items, metadata = answer.get("items") or [], answer.get("metadata")
            if not isinstance(items, list) or not isinstance(metadata, dict) or not metadata.get("resourceVersion"):
                raise PeerUnavailable(f"API server {self.server}: list of {kind.plural}: the answer is no list")
            more = str(metadata.get("continue") or "")
            plain = tuple(item for item in items if isinstance(item, dict))
            yield Page(items=plain, version=str(metadata["resourceVersion"]), is_last=not more)
            if not more:
                return
            params = {**params, "continue": more}

    async def watch(self, kind: Kind, version: str) -> AsyncGenerator[WatchEvent, None]:
        """Follow changes after a version until the server ends the watch.

        Errors: raises HistoryLost, PeerUnavailable.
        """
        async with aclosing(
            self._client.watch(await self.path_of(kind, ""), version, params=_selected(kind))
        ) as events:
            async for change, plain in events:
                newest = str(plain["metadata"]["resourceVersion"])
                if change == "BOOKMARK":
                    yield WatchEvent(kind=WatchEventKind.BOOKMARK, version=newest)
                else:
                    kind_of_change = WatchEventKind.DELETE if change == "DELETED" else WatchEventKind.PUT
                    yield WatchEvent(kind=kind_of_change, version=newest, object=plain)

    async def _plurals(self, group: str, version: str) -> frozenset[str]:
        """List the plurals of a version that can be listed and watched. Requested once."""
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
            versions[version] = frozenset(
                str(entry.get("name")) for entry in entries if {"list", "watch"} <= set(entry.get("verbs") or ())
            )
        return versions[version]

    async def path_of(self, kind: Kind, namespace: str, name: str = "", part: str = "") -> str:
        """Return the path of an object, or of all objects of a kind, in the version that is served.

        Errors: raises PeerUnavailable when none is.
        """
        version = await self.version_of(kind)
        if not version:
            wanted = ", ".join(
                f"{kind.group}/{known_version}" if kind.group else known_version for known_version in kind.versions
            )
            raise PeerUnavailable(
                f"API server {self.server} does not serve {kind.plural}: wanted one of {wanted}",
                next_step="wants Kubernetes 1.32 or later with Dynamic Resource Allocation",
            )
        api_version = f"{kind.group}/{version}" if kind.group else version
        return object_path(
            api_version, kind.plural, namespace=namespace if kind.is_namespaced else "", name=name, part=part
        )

    async def ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: object = None,
        is_applied: bool = False,
    ) -> Plain | Rejected:
        """Send one request, see `KubernetesClient.ask`. A refusal by the server is returned as a
        value.

        Errors: raises PeerUnavailable.
        """
        try:
            return await self._client.ask(method, path, params=params, body=body, is_applied=is_applied)
        except NotServed:
            # The server may have been upgraded since its versions were read.
            self.drop_versions()
            raise

    def _refused(self, kind: Kind, answer: Rejected) -> PeerUnavailable:
        return PeerUnavailable(
            f"API server: {kind.plural}: {answer.code} {answer.message}",
            next_step=f"check the rights in the cluster ({self._rights})",
            code=answer.code,
        )


def _selected(kind: Kind) -> dict[str, str]:
    return {"fieldSelector": kind.fields} if kind.fields else {}
