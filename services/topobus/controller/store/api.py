"""The protocol of a Kubernetes API server as the controller uses it.

No other module of the cluster home depends on a client library. Objects have Kubernetes' wire
shape, and the server's refusals are values. A request without an answer raises PeerUnavailable, and
a write without an answer may or may not have taken effect.

Source: Kubernetes API concepts (resource versions, bookmarks, 410, preconditions of a patch).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from topobus.kubernetes.answers import HistoryLost, Plain, Rejected
from topobus.kubernetes.reading import (
    CLAIMS,
    DRA_GROUP,
    DRA_VERSIONS,
    PODS,
    Kind,
    Page,
    ReadApi,
    WatchEvent,
    WatchEventKind,
)

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


CLASSES = Kind(name="DeviceClass", plural="deviceclasses", group=DRA_GROUP, versions=DRA_VERSIONS)
TEMPLATES = Kind(
    name="ResourceClaimTemplate",
    plural="resourceclaimtemplates",
    group=DRA_GROUP,
    versions=DRA_VERSIONS,
    is_namespaced=True,
)
SLICES = Kind(name="ResourceSlice", plural="resourceslices", group=DRA_GROUP, versions=DRA_VERSIONS)
TAINT_RULES = Kind(
    name="DeviceTaintRule",
    plural="devicetaintrules",
    group=DRA_GROUP,
    versions=("v1", "v1beta2", "v1alpha3"),
    is_optional=True,
)
NODES = Kind(name="Node", plural="nodes")
NAMESPACES = Kind(name="Namespace", plural="namespaces")
EVENTS = Kind(name="Event", plural="events", is_namespaced=True)

WATCHED = (
    CLASSES,
    CLAIMS,
    TEMPLATES,
    SLICES,
    TAINT_RULES,
    PODS,
    NODES,
)


class Api(ReadApi, Protocol):
    """An API server.

    All methods raise PeerUnavailable when it does not answer, or asks the client to retry later.
    """

    async def create(self, kind: Kind, plain: Mapping[str, Any]) -> Plain | Rejected:
        """Create an object. Returns what the server stored."""
        ...

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], *, part: str = ""
    ) -> Plain | Rejected:
        """Change an object by a merge patch.

        A patch that carries metadata.resourceVersion is refused when the object has changed since.

        Shapes: part — `status` changes the status and nothing else.
        """
        ...

    async def delete(self, kind: Kind, namespace: str, name: str, *, version: str) -> Rejected | None:
        """Delete an object that is still at this version.

        The server only marks an object that has finalizers.
        """
        ...
