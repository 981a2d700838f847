"""The kinds of objects that the controller reads and writes at a Kubernetes API server."""

from __future__ import annotations

from topobus.kubernetes.reading import CLAIMS, DRA_GROUP, DRA_VERSIONS, PODS, Kind

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
