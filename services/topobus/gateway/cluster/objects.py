"""The protocol through which the gateway uses a Kubernetes API server.

No other module of the gateway imports the client library. Objects are in Kubernetes' wire shape,
and the server's refusals are values (`Rejected`). A server that does not answer raises
PeerUnavailable.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

from msgspec import Struct

from topobus.formats.messages.messages import ApiObject
from topobus.gateway.claims.claim_reading import ReadClaim
from topobus.kubernetes.answers import Rejected
from topobus.kubernetes.reading import CLAIMS, DRA_GROUP, DRA_VERSIONS, PODS, Kind
from topobus.values.errors import PeerUnavailable
from topobus.values.request import Owner

__all__ = [
    "CLAIMS",
    "DEVICE_CLASSES",
    "NODES",
    "NOT_KEPT",
    "PODS",
    "SLICES",
    "Cluster",
    "ClusterChange",
    "ClusterChangeKind",
    "Kind",
    "Rejected",
    "claims_of",
    "may_run",
    "read_node",
]


_ENDED = ("Succeeded", "Failed")
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


class Cluster(Protocol):
    """An API server.

    All methods raise PeerUnavailable when it does not answer, or asks the client to retry later.
    """

    async def get(self, kind: Kind, name: str, namespace: str = "") -> ApiObject | None:
        """Read an object. None: it does not exist."""
        ...

    async def create(self, kind: Kind, api_object: ApiObject, *, is_dry_run: bool = False) -> ApiObject | Rejected:
        """Create an object. Returns what the server stored, or would store (`is_dry_run`)."""
        ...

    async def update(self, kind: Kind, api_object: ApiObject) -> ApiObject | Rejected:
        """Replace an object with the resource version that it carries."""
        ...

    async def delete(self, kind: Kind, name: str, *, uid: str, resource_version: str) -> Rejected | None:
        """Delete an object if it is still this one. None: it is deleted, or was gone already."""
        ...

    async def annotate(
        self, kind: Kind, name: str, namespace: str, *, uid: str, annotations: Mapping[str, str]
    ) -> Rejected | None:
        """Set annotations of an object if it is still this one. None: it is done."""
        ...

    async def apply_device_status(
        self, name: str, namespace: str, *, uid: str, device_class: str, devices: Sequence[Mapping[str, Any]]
    ) -> Rejected | None:
        """Replace the entries of our devices of a class in a claim's `status.devices`, if it is still
        this claim.

        None: it is done.

        Shapes: devices — in the wire shape; empty: all entries of the class are removed.
        """
        ...

    async def apply_node_conditions(
        self, name: str, *, uid: str, conditions: Sequence[Mapping[str, Any]]
    ) -> ApiObject | Rejected:
        """Replace our conditions of a Node, if it is still this one. Those of others stay.

        Returns the Node as it is stored.
        """
        ...

    async def patch_node(self, name: str, operations: Sequence[Mapping[str, Any]]) -> ApiObject | Rejected:
        """Change a Node by a JSON patch. Returns the Node as it is stored."""
        ...

    async def create_event(self, namespace: str, event: Mapping[str, Any]) -> Rejected | None:
        """Create a v1 Event. None: it is done."""
        ...

    async def patch_event(self, namespace: str, name: str, changes: Mapping[str, Any]) -> Rejected | None:
        """Change a v1 Event. None: it is done."""
        ...

    async def evict(self, name: str, namespace: str, *, uid: str) -> Rejected | None:
        """Request a pod's eviction if it is still this one. None: accepted, or the pod is gone."""
        ...

    def watch(self, kind: Kind, *, fields: str) -> AsyncGenerator[ClusterChange, None]:
        """Follow objects until cancelled: a snapshot, changes, a snapshot after lost history."""
        ...


def claims_of(cluster: Cluster) -> ReadClaim:
    """Return the function that reads claims from an API server."""
    return lambda namespace, name: cluster.get(CLAIMS, name, namespace)


async def may_run(cluster: Cluster, pod: Owner, node: str) -> bool:
    """Return whether the cluster has a pod of this name on a node that has not ended.

    Errors: raises PeerUnavailable.
    """
    api_object = await cluster.get(PODS, pod.name, pod.namespace)
    return (
        api_object is not None
        and api_object.spec.get("nodeName") == node
        and api_object.status.get("phase") not in _ENDED
    )


async def read_node(cluster: Cluster, name: str) -> ApiObject:
    """Read a Node.

    Errors: raises PeerUnavailable, also where there is none of this name.
    """
    node = await cluster.get(NODES, name)
    if node is None:
        raise PeerUnavailable(
            f"there is no node {name} in the cluster",
            next_step="set TOPOBUS_ALL__NODE to the node's name in the cluster",
        )
    return node
