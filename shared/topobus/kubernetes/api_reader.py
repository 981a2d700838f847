"""An API server as informers read it: kinds in the best version served, paged lists, watches.

Flows in: settings. Flows out: a `ReadApi`. Connections and requests are in
`topobus.kubernetes.client`. It writes nothing; who writes asks through it.
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
    """One API server, read.

    Shapes: page — objects in one page of a list; rights — where an operator finds what
    we may read, which errors name.
    """

    def __init__(self, client: KubernetesClient, page: int, rights: str) -> None:
        self._client = client
        self._page = page
        self._rights = rights
        self._served: dict[str, dict[str, frozenset[str]]] = {}

    @property
    def server(self) -> str:
        """Where it is."""
        return self._client.server

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def version_of(self, kind: Kind) -> str:
        """Name the version in which the server serves a kind, the best that we can read.

        Empty when it serves none of them.
        """
        for version in kind.versions:
            if kind.plural in await self._plurals(kind.group, version):
                return version
        return ""

    def drop_versions(self) -> None:
        """Ask anew what is served: the server may be another one now."""
        self._served.clear()

    async def get(self, kind: Kind, namespace: str, name: str) -> Plain | None:
        """Read an object from the server; None when there is none."""
        answer = await self.ask("GET", await self.path_of(kind, namespace, name))
        if isinstance(answer, Rejected):
            if answer.code == NOT_FOUND and answer.reason:
                return None
            if answer.code == NOT_FOUND:
                # The path is not served, which is no word about the object:
                # the server is another one by now.
                self.drop_versions()
            raise self._refused(kind, answer)
        return answer

    async def pages(self, kind: Kind) -> AsyncGenerator[Page, None]:
        """List all objects, page by page.

        Raises HistoryLost when the list became too old between two pages.
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
            listed = answer.get("metadata")
            metadata = listed if isinstance(listed, dict) else {}
            more = str(metadata.get("continue") or "")
            items = answer.get("items")
            plain = tuple(item for item in items if isinstance(item, dict)) if isinstance(items, list) else ()
            yield Page(items=plain, version=str(metadata.get("resourceVersion") or ""), is_last=not more)
            if not more:
                return
            params = {**params, "continue": more}

    async def watch(self, kind: Kind, version: str) -> AsyncGenerator[WatchEvent, None]:
        """Follow changes after a version until the server ends the watch; raises HistoryLost."""
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
            versions[version] = frozenset(
                str(entry.get("name")) for entry in entries if {"list", "watch"} <= set(entry.get("verbs") or ())
            )
        return versions[version]

    async def path_of(self, kind: Kind, namespace: str, name: str = "", part: str = "") -> str:
        """Give the path of an object, or of all of a kind, in the version that is served.

        Raises PeerUnavailable when none is.
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
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: object = None
    ) -> Plain | Rejected:
        """Ask once; what the server refuses is a value."""
        try:
            return await self._client.ask(method, path, params=params, body=body)
        except NotServed:
            # It may have been upgraded since we asked which versions it has.
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
