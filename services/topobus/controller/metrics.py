"""Metrics of the controller. Those of the cluster home alone are in `cluster_metrics`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from topobus.process.metric_descriptors import CounterDescriptor, GaugeDescriptor, HistogramDescriptor
from topobus.values.errors import ContractError
from topobus.values.repair import RepairEnd

__all__ = ["ControllerMetrics"]

# From a tenth of a millisecond (a small node, no constraint) to the
# second at which a search gives up.
_SECONDS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

DECISIONS = CounterDescriptor(
    name="topobus_controller_decisions_total",
    meaning="Decisions on claims.",
    labels={"outcome": ("allocated", "refused", "refused-by-node", "released", "taken-back")},
)
SEARCH_SECONDS = HistogramDescriptor(
    name="topobus_controller_search_seconds", meaning="Searches of one claim on one node.", buckets=_SECONDS
)
SEARCH_STEPS = CounterDescriptor(name="topobus_controller_search_steps_total", meaning="Steps of all searches.")
PLANS = CounterDescriptor(
    name="topobus_controller_plans_total",
    meaning="Plans answered.",
    labels={"outcome": ("placed", "refused", "dry-run")},
)
PODS = CounterDescriptor(
    name="topobus_controller_pods_total",
    meaning="Stored pods that got a node, or a condition with the reason why not.",
    labels={"outcome": ("scheduled", "waiting")},
)
OWNERS_QUARANTINED = GaugeDescriptor(
    name="topobus_controller_owners_quarantined",
    meaning="Deleted claims and pods whose devices a node has not released.",
)
CLAIMS_WAITING = GaugeDescriptor(
    name="topobus_controller_claims_waiting",
    meaning="Claims that are not allocated; in a cluster pods that wait behind the gate.",
)
OBJECTS_MALFORMED = CounterDescriptor(
    name="topobus_controller_objects_malformed_total", meaning="Stored objects that cannot be read."
)
NODES_REMARKED = GaugeDescriptor(
    name="topobus_controller_nodes_remarked",
    meaning="Nodes of another release, with a wrong clock, or of which a value cannot be read: /readyz names them.",
)
OBJECTS_SET_ASIDE = CounterDescriptor(
    name="topobus_controller_objects_set_aside_total",
    meaning="Objects and nodes whose work failed and that wait until they change.",
    labels={"loop": "a loop of the controller; `classic-<driver>` for each classic driver of its settings"},
)
REPAIR_SECONDS = HistogramDescriptor(
    name="topobus_controller_repair_seconds",
    meaning="Repairs by policy, from their begin to their end.",
    labels={
        "class": "a device class of the policy",
        "reason": "the first code of the evidence, of docs/reference/health-reasons.md or of a plugin",
        "outcome": tuple(RepairEnd),
    },
    # From a reset of a free device to a day's wait for its owner.
    buckets=(10.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0),
)
REPAIRS = GaugeDescriptor(
    name="topobus_controller_repairs",
    meaning="Repairs by policy: under way, and devices that they left to a person. The same at every replica.",
    labels={"state": ("running", RepairEnd.GAVE_UP.value, RepairEnd.TAKEN_OVER.value)},
)


class ControllerMetrics:
    """All metrics of one controller, registered once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.decisions = DECISIONS.register(registry)
        self.searches = SEARCH_SECONDS.register(registry)
        self.steps = SEARCH_STEPS.register(registry)
        self.plans = PLANS.register(registry)
        self.pods = PODS.register(registry)
        self.quarantined = OWNERS_QUARANTINED.register(registry)
        self.waiting = CLAIMS_WAITING.register(registry)
        self.malformed = OBJECTS_MALFORMED.register(registry)
        self.remarked = NODES_REMARKED.register(registry)
        self.set_aside = OBJECTS_SET_ASIDE.register(registry)
        self.repair_s = REPAIR_SECONDS.register(registry)
        self.repairs = REPAIRS.register(registry)

    def count_refused(self, err: Exception) -> None:
        """Count a stored object that a copy did not accept: it cannot be read, or reading it failed
        in an unforeseen way.
        """
        if isinstance(err, ContractError):
            self.malformed.inc()
        else:
            self.set_aside.labels("intake").inc()
