"""The reading half of a Kubernetes API server's protocol: kinds, pages of lists, lines of watches.

Informers depend on this and on no client library. Objects are in Kubernetes' wire shape. A request
without an answer raises PeerUnavailable.
Source: Kubernetes API concepts (resource versions, bookmarks, 410).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from topobus.kubernetes.answers import Plain

__all__ = ["CLAIMS", "DRA_GROUP", "DRA_VERSIONS", "PODS", "Kind", "Page", "ReadApi", "WatchEvent", "WatchEventKind"]


class Kind(Struct, frozen=True, kw_only=True):
    """A kind of object and the versions of it that we can read, the best first."""

    name: str
    plural: str
    group: str = ""
    versions: tuple[str, ...] = ("v1",)
    is_namespaced: bool = False
    is_optional: bool = False
    """Whether a server may lack the kind. It then has no objects of it."""
    fields: str = ""
    """A field selector: only objects that match it are listed and watched. An object that stops
    matching is reported as deleted."""


DRA_GROUP = "resource.k8s.io"
DRA_VERSIONS = ("v1", "v1beta2", "v1beta1")
CLAIMS = Kind(name="ResourceClaim", plural="resourceclaims", group=DRA_GROUP, versions=DRA_VERSIONS, is_namespaced=True)
PODS = Kind(name="Pod", plural="pods", is_namespaced=True)


class Page(Struct, frozen=True, kw_only=True):
    """A part of a list."""

    items: tuple[Plain, ...]
    version: str = ""
    """The list's version. Only the version of the last page can be watched from."""
    is_last: bool = False


class WatchEventKind(StrEnum):
    """The kind of a watch line."""

    PUT = "put"
    DELETE = "delete"
    BOOKMARK = "bookmark"


class WatchEvent(Struct, frozen=True, kw_only=True):
    """One line of a watch."""

    kind: WatchEventKind
    version: str
    object: Plain = {}


class ReadApi(Protocol):
    """The reads that an API server offers.

    All methods raise PeerUnavailable when it does not answer, or asks the client to retry later.
    """

    async def version_of(self, kind: Kind) -> str:
        """Name the best version of a kind that the server serves and we can read.

        Empty when there is none.
        """
        ...

    def drop_versions(self) -> None:
        """Discard the known versions, because the server may have been replaced or upgraded."""
        ...

    async def get(self, kind: Kind, namespace: str, name: str) -> Plain | None:
        """Read an object from the server. None: it does not exist."""
        ...

    def pages(self, kind: Kind) -> AsyncGenerator[Page, None]:
        """List all objects, page by page.

        Raises HistoryLost when the list became too old between two pages.
        """
        ...

    def watch(self, kind: Kind, version: str) -> AsyncGenerator[WatchEvent, None]:
        """Follow changes after a version until the server ends the watch.

        Errors: raises HistoryLost.
        """
        ...
