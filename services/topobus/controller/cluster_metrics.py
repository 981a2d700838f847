"""Metrics of the controller in a cluster."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from topobus.process.metric_descriptors import CounterDescriptor, GaugeDescriptor

__all__ = ["ClusterMetrics"]

_KIND = "a kind of object that the controller follows"

CLUSTER_WRITES = CounterDescriptor(
    name="topobus_controller_cluster_writes_total",
    meaning="Writes to the API server: done, lost to somebody else, refused, or unknown (no answer).",
    labels={"kind": _KIND, "outcome": ("done", "lost", "refused", "unknown")},
)
WATCH_TROUBLED = GaugeDescriptor(
    name="topobus_controller_cluster_watch_troubled",
    meaning="1: the copy of this kind does not follow the API server.",
    labels={"kind": _KIND},
)
CLUSTER_OBJECTS = GaugeDescriptor(
    name="topobus_controller_cluster_objects", meaning="Objects kept.", labels={"kind": _KIND}
)
FOREIGN_SLICES = GaugeDescriptor(
    name="topobus_controller_cluster_foreign_slices",
    meaning="ResourceSlices that name a driver of ours and are not of its node: they do not count.",
)


class ClusterMetrics:
    """All metrics of the cluster home, registered once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.writes = CLUSTER_WRITES.register(registry)
        self.troubled = WATCH_TROUBLED.register(registry)
        self.objects = CLUSTER_OBJECTS.register(registry)
        self.foreign = FOREIGN_SLICES.register(registry)
