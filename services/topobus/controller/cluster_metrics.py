"""Metrics of the controller in a cluster."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

__all__ = ["ClusterMetrics"]


class ClusterMetrics:
    """All metrics of this home, registered once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.writes = Counter(
            "topobus_controller_cluster_writes_total",
            "Writes to the API server: done, lost to somebody else, refused, or unknown (no answer).",
            ["kind", "outcome"],
            registry=registry,
        )
        self.troubled = Gauge(
            "topobus_controller_cluster_watch_troubled",
            "1: the copy of this kind does not follow the API server.",
            ["kind"],
            registry=registry,
        )
        self.objects = Gauge("topobus_controller_cluster_objects", "Objects kept, by kind.", ["kind"], registry=registry)
        self.foreign = Gauge(
            "topobus_controller_cluster_foreign_slices",
            "ResourceSlices that name a driver of ours and are not of its node: they do not count.",
            registry=registry,
        )
