"""Metrics of the controller."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from topobus.domain.errors import ContractError

__all__ = ["ControllerMetrics"]

# From a tenth of a millisecond (a small node, no constraint) to the second at which a search gives up.
_SECONDS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class ControllerMetrics:
    """All metrics of one controller, registered once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.decisions = Counter("topobus_controller_decisions_total", "Decisions on claims, by outcome.", ["outcome"], registry=registry)
        self.searches = Histogram(
            "topobus_controller_search_seconds", "Searches of one claim on one node.", buckets=_SECONDS, registry=registry
        )
        self.steps = Counter("topobus_controller_search_steps_total", "Steps of all searches.", registry=registry)
        self.plans = Counter("topobus_controller_plans_total", "Plans answered, by outcome.", ["outcome"], registry=registry)
        self.pods = Counter(
            "topobus_controller_pods_total", "Stored pods that got a node, or were told why not.", ["outcome"], registry=registry
        )
        self.quarantined = Gauge(
            "topobus_controller_owners_quarantined", "Deleted claims and pods whose devices a node has not let go of.", registry=registry
        )
        self.waiting = Gauge("topobus_controller_claims_waiting", "Claims that are not allocated.", registry=registry)
        self.malformed = Counter("topobus_controller_objects_malformed_total", "Stored objects that nobody can read.", registry=registry)
        self.remarked = Gauge(
            "topobus_controller_nodes_remarked",
            "Nodes of another release, with a wrong clock, or of which a value cannot be read: /readyz names them.",
            registry=registry,
        )
        self.set_aside = Counter(
            "topobus_controller_objects_set_aside_total",
            "Objects and nodes whose work failed and that wait until they change, by loop.",
            ["loop"],
            registry=registry,
        )

    def count_refused(self, err: Exception) -> None:
        """Count a stored object that a copy did not take in: one that nobody can read, or one that failed in a way that nobody thought of."""
        if isinstance(err, ContractError):
            self.malformed.inc()
        else:
            self.set_aside.labels("intake").inc()
