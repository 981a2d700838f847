"""What the topology service counts, for Prometheus. Labels are bounded: verbs, outcomes, reason codes, classes."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["TopologyMetrics"]

# Seconds; from a plan in process (under 1 ms) to the search of what would have to be freed on a crowded node.
_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class TopologyMetrics:
    """All counters of the service, in the given registry."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        kept = registry if registry is not None else CollectorRegistry()
        self.decisions = Counter("topobus_topology_decisions_total", "Decisions", ["verb", "outcome"], registry=kept)
        self.refusals = Counter("topobus_topology_refusals_total", "Refusals by their first reason", ["verb", "reason"], registry=kept)
        self.decision_s = Histogram(
            "topobus_topology_decision_seconds", "From request to answer", ["verb"], registry=kept, buckets=_BUCKETS
        )
        self.silent_hints = Counter(
            "topobus_topology_silent_hints_total", "Services that gave no hint in time", ["device_class"], registry=kept
        )
        self.silent_classes = Gauge(
            "topobus_topology_silent_classes_total", "Device classes whose service is silent now", ["device_class"], registry=kept
        )
        self.rewrites = Counter("topobus_topology_ledger_rewrites_total", "Ledger writes tried again", ["reason"], registry=kept)
        self.sequence = Gauge("topobus_topology_ledger_sequence_total", "The ledger's sequence", registry=kept)
        self.held = Gauge("topobus_topology_held_devices_total", "Devices held now", ["device_class"], registry=kept)
        self.unannounced = Gauge("topobus_topology_unannounced_decisions_total", "Decisions whose event is not out yet", registry=kept)
