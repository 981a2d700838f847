"""The metrics of ResourceSlices, for Prometheus. They exist only in a cluster."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from topobus.process.metric_descriptors import CounterDescriptor, GaugeDescriptor

__all__ = ["SliceMetrics"]

SLICES = GaugeDescriptor(
    name="topobus_gateway_slices",
    meaning="ResourceSlices of this node in the API server.",
    labels={"pool": "a pool of this node"},
)
SLICE_WRITES = CounterDescriptor(
    name="topobus_gateway_slice_writes_total",
    meaning="Writes of ResourceSlices.",
    labels={"verb": ("create", "update", "delete"), "outcome": "`ok`, or the API server's reason or code"},
)
FOREIGN_SLICES = CounterDescriptor(
    name="topobus_gateway_foreign_slices_total",
    meaning="ResourceSlices in this node's pools that no gateway made, deleted.",
)
SLICE_FIELDS_DROPPED = GaugeDescriptor(
    name="topobus_gateway_slice_fields_dropped",
    meaning="1: the API server does not keep this field.",
    labels={"field": "a field of a ResourceSlice"},
)


class SliceMetrics:
    """The metrics of the publisher of slices."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.slices = SLICES.register(registry)
        self.writes = SLICE_WRITES.register(registry)
        self.foreign = FOREIGN_SLICES.register(registry)
        self.dropped = SLICE_FIELDS_DROPPED.register(registry)
