"""What is read from a Kubernetes API server: kinds, pages of lists, lines of watches. Objects are in
Kubernetes' wire shape.

Source: Kubernetes API concepts (resource versions, bookmarks, 410).
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from topobus.kubernetes.answers import Plain

__all__ = ["CLAIMS", "DRA_GROUP", "DRA_VERSIONS", "PODS", "Kind", "Page", "WatchEvent", "WatchEventKind"]


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
