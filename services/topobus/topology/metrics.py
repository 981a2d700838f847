"""What the topology service counts, for Prometheus.

Labels are bounded: verbs, outcomes, reason codes, classes.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from topobus.process.metric_descriptors import CounterDescriptor, GaugeDescriptor, HistogramDescriptor

__all__ = ["TopologyMetrics"]

# In seconds: from a plan in process (under 1 ms) to the search for what would have to be freed on a
# crowded node.
_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_CLASS = "a device class"
_VERB = ("place", "dry-run", "prefer", "adopt", "commit", "release")

DECISIONS = CounterDescriptor(
    name="topobus_topology_decisions_total",
    meaning="Decisions.",
    labels={"verb": _VERB, "outcome": ("done", "placed", "refused")},
)
REFUSALS = CounterDescriptor(
    name="topobus_topology_refusals_total",
    meaning="Refusals by their first reason.",
    labels={"verb": _VERB, "reason": "a code of docs/reference/reasons.md"},
)
DECISION_SECONDS = HistogramDescriptor(
    name="topobus_topology_decision_seconds",
    meaning="From request to answer.",
    labels={"verb": _VERB},
    buckets=_BUCKETS,
)
SILENT_HINTS = CounterDescriptor(
    name="topobus_topology_silent_hints_total", meaning="Services that gave no hint in time.", labels={"class": _CLASS}
)
SILENT_CLASSES = GaugeDescriptor(
    name="topobus_topology_silent_classes",
    meaning="1 for a device class whose service is silent now.",
    labels={"class": _CLASS},
)
LEDGER_WRITES = CounterDescriptor(
    name="topobus_topology_ledger_writes_total",
    meaning="Writes of the ledger: done, lost to another writer, not known to be done or not, or not possible.",
    labels={"outcome": ("written", "conflict", "ambiguous", "failed")},
)
LEDGER_WRITE_SECONDS = HistogramDescriptor(
    name="topobus_topology_ledger_write_seconds", meaning="How long one write of the ledger takes.", buckets=_BUCKETS
)
LEDGER_REWRITES = CounterDescriptor(
    name="topobus_topology_ledger_rewrites_total",
    meaning="Ledger writes tried again, and ledgers written back over what the store or somebody made of them.",
    labels={"reason": "`conflict`, `ambiguous`, `lost`, or what was wrong with what stood there"},
)
LEDGER_SEQUENCE = GaugeDescriptor(name="topobus_topology_ledger_sequence", meaning="The ledger's sequence.")
HELD_DEVICES = GaugeDescriptor(
    name="topobus_topology_held_devices", meaning="Devices held now.", labels={"class": _CLASS}
)
UNANNOUNCED = GaugeDescriptor(
    name="topobus_topology_unannounced_decisions", meaning="Decisions whose event is not out yet."
)


class TopologyMetrics:
    """All metrics of the service, in the given registry."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        kept = registry if registry is not None else CollectorRegistry()
        self.decisions = DECISIONS.register(kept)
        self.refusals = REFUSALS.register(kept)
        self.decision_s = DECISION_SECONDS.register(kept)
        self.silent_hints = SILENT_HINTS.register(kept)
        self.silent_classes = SILENT_CLASSES.register(kept)
        self.ledger_writes = LEDGER_WRITES.register(kept)
        self.ledger_write_s = LEDGER_WRITE_SECONDS.register(kept)
        self.rewrites = LEDGER_REWRITES.register(kept)
        self.sequence = LEDGER_SEQUENCE.register(kept)
        self.held = HELD_DEVICES.register(kept)
        self.unannounced = UNANNOUNCED.register(kept)
