"""What discovery counts, for Prometheus."""

from __future__ import annotations

from topobus.process.metric_descriptors import CounterDescriptor, GaugeDescriptor, HistogramDescriptor

__all__ = ["LOOKS", "LOOK_SECONDS", "MACHINE_GENERATION"]

# In seconds: from a small machine to one with thousands of PCI functions.
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

LOOKS = CounterDescriptor(
    name="topobus_discovery_looks_total",
    meaning="Looks at the tree.",
    labels={"outcome": ("published", "same", "unpublished", "unreadable")},
)
LOOK_SECONDS = HistogramDescriptor(
    name="topobus_discovery_look_seconds", meaning="How long one look at the tree takes.", buckets=_BUCKETS
)
MACHINE_GENERATION = GaugeDescriptor(
    name="topobus_discovery_machine_generation", meaning="The published machine's generation."
)
