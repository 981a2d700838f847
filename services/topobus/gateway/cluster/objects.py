"""What the gateway reads and writes of a Kubernetes API server by `kubernetes_cluster`: the kinds, and
the changes of a watch.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from topobus.formats.messages.messages import ApiObject
from topobus.kubernetes.answers import Rejected
from topobus.kubernetes.reading import CLAIMS, DRA_GROUP, DRA_VERSIONS, PODS, Kind

__all__ = [
    "CLAIMS",
    "DEVICE_CLASSES",
    "NODES",
    "NOT_KEPT",
    "PODS",
    "SLICES",
    "ClusterChange",
    "ClusterChangeKind",
    "Kind",
    "Rejected",
]


NOT_KEPT = 501
"""Our own code for a server that accepted a write and dropped the field it was about."""


SLICES = Kind(name="ResourceSlice", plural="resourceslices", group=DRA_GROUP, versions=DRA_VERSIONS)
DEVICE_CLASSES = Kind(name="DeviceClass", plural="deviceclasses", group=DRA_GROUP, versions=DRA_VERSIONS)
NODES = Kind(name="Node", plural="nodes")


class ClusterChangeKind(StrEnum):
    """The kinds of changes in a watch."""

    SNAPSHOT = "snapshot"
    """All existing objects. They replace what was known before."""
    PUT = "put"
    DELETE = "delete"


class ClusterChange(Struct, frozen=True, kw_only=True):
    """One change, or all objects at once."""

    kind: ClusterChangeKind
    objects: tuple[ApiObject, ...] = ()

    @property
    def object(self) -> ApiObject:
        """The object of a change with exactly one."""
        return self.objects[0]
