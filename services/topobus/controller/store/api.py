"""The protocol of a Kubernetes API server as the controller uses it; no other module of the cluster home depends on a client library.

Flows in: kinds, names, merge patches. Flows out: objects in Kubernetes' wire shape; refusals of the server as values. A request without an answer
raises PeerUnavailable, and a write without an answer may or may not have taken effect.
Source: Kubernetes API concepts (resource versions, bookmarks, 410, preconditions of a patch).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from enum import StrEnum
from typing import Any, Protocol

from msgspec import Struct

from topobus.kubernetes.answers import HistoryLost, Plain, Rejected

__all__ = [
    "CLAIMS",
    "CLASSES",
    "EVENTS",
    "FIELD_MANAGER",
    "NAMESPACES",
    "NODES",
    "PODS",
    "SLICES",
    "TAINT_RULES",
    "TEMPLATES",
    "WATCHED",
    "Api",
    "HistoryLost",
    "Kind",
    "Page",
    "Plain",
    "Rejected",
    "WatchEvent",
    "WatchEventKind",
]

FIELD_MANAGER = "topobus-controller"
"""The name under which the API server records what we wrote (metadata.managedFields)."""


class Kind(Struct, frozen=True, kw_only=True):
    """A kind of object and the versions of it that we can read, the best first."""

    name: str
    plural: str
    group: str = ""
    versions: tuple[str, ...] = ("v1",)
    is_namespaced: bool = False
    is_optional: bool = False
    """Servers without it are fine: there are no objects of it then."""


_DRA = "resource.k8s.io"
_DRA_VERSIONS = ("v1", "v1beta2", "v1beta1")
CLASSES = Kind(name="DeviceClass", plural="deviceclasses", group=_DRA, versions=_DRA_VERSIONS)
CLAIMS = Kind(name="ResourceClaim", plural="resourceclaims", group=_DRA, versions=_DRA_VERSIONS, is_namespaced=True)
TEMPLATES = Kind(name="ResourceClaimTemplate", plural="resourceclaimtemplates", group=_DRA, versions=_DRA_VERSIONS, is_namespaced=True)
SLICES = Kind(name="ResourceSlice", plural="resourceslices", group=_DRA, versions=_DRA_VERSIONS)
TAINT_RULES = Kind(name="DeviceTaintRule", plural="devicetaintrules", group=_DRA, versions=("v1", "v1beta2", "v1alpha3"), is_optional=True)
PODS = Kind(name="Pod", plural="pods", is_namespaced=True)
NODES = Kind(name="Node", plural="nodes")
NAMESPACES = Kind(name="Namespace", plural="namespaces")
EVENTS = Kind(name="Event", plural="events", is_namespaced=True)

WATCHED = (CLASSES, CLAIMS, TEMPLATES, SLICES, TAINT_RULES, PODS, NODES)


class Page(Struct, frozen=True, kw_only=True):
    """A part of a list."""

    items: tuple[Plain, ...]
    version: str = ""
    """The list's version; only the last page's is one to watch from."""
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


class Api(Protocol):
    """An API server. All methods raise PeerUnavailable when it does not answer, or asks the client to retry later."""

    async def version_of(self, kind: Kind) -> str:
        """Name the version in which the server serves a kind, the best that we can read; empty when it serves none of them."""
        ...

    def drop_versions(self) -> None:
        """Ask anew what is served: the server may be another one now."""
        ...

    async def get(self, kind: Kind, namespace: str, name: str) -> Plain | None:
        """Read an object from the server; None when there is none."""
        ...

    def pages(self, kind: Kind) -> AsyncGenerator[Page, None]:
        """List all objects, page by page; raises HistoryLost when the list became too old between two pages."""
        ...

    def watch(self, kind: Kind, version: str) -> AsyncGenerator[WatchEvent, None]:
        """Follow changes after a version until the server ends the watch; raises HistoryLost."""
        ...

    async def create(self, kind: Kind, plain: Mapping[str, Any]) -> Plain | Rejected:
        """Make an object; the answer is what the server stored."""
        ...

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], *, part: str = "") -> Plain | Rejected:
        """Change an object by a merge patch; one that carries metadata.resourceVersion is refused when the object is another by now.

        Shapes: part — `status` changes the status and nothing else.
        """
        ...

    async def delete(self, kind: Kind, namespace: str, name: str, *, version: str) -> Rejected | None:
        """Delete an object that is still at this version; the server marks one that has finalizers."""
        ...
