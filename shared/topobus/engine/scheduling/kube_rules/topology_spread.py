"""Topology spread constraints: how uneven the pods of a selector may lie over the domains of a
topology key.

Pure. Counts by domain are made once for a choice, and each node then gets a Reason or None.
Source: kube-scheduler's PodTopologySpread plugin (calPreFilterState, Filter,
countPodsMatchSelector), 1.36. Pods that are being deleted do not count, nor do nodes that lack the
key of any of the constraints. An empty selector counts no pods. The scheduler's own default
constraints are all `ScheduleAnyway`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from msgspec import Struct, structs

from topobus.engine.allocation.values import Node
from topobus.engine.scheduling.kube_rules.label_selectors import LabelSelector, selects, with_labels
from topobus.engine.scheduling.pod_groups import Groups
from topobus.values.outcome import Fact, Reason

__all__ = [
    "SpreadConstraint",
    "SpreadCounts",
    "SpreadNode",
    "count_spread",
    "required_spread",
    "why_uneven",
]

_HONOR = "Honor"


class SpreadConstraint(Struct, frozen=True, kw_only=True, rename="camel"):
    """One of PodSpec.topologySpreadConstraints."""

    max_skew: int = 1
    topology_key: str = ""
    when_unsatisfiable: str = "DoNotSchedule"
    label_selector: LabelSelector | None = None
    min_domains: int | None = None
    node_affinity_policy: str | None = None
    node_taints_policy: str | None = None
    match_label_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class SpreadNode:
    """A node as the constraints see it."""

    node: Node
    is_wanted: bool
    """Whether the pod's node selector and required node affinity let it be there."""
    is_tolerated: bool
    """Whether the pod tolerates its taints."""


@dataclass(frozen=True)
class SpreadCounts:
    """Pods of one constraint in each domain that counts."""

    constraint: SpreadConstraint
    matching: Mapping[str, int]
    is_own: bool
    """Whether the pod itself is one of those that are spread."""

    @property
    def least(self) -> int:
        """The fewest pods in a domain.

        0 while there are fewer domains than the constraint asks for.
        """
        wanted = self.constraint.min_domains if self.constraint.min_domains is not None else 1
        return 0 if len(self.matching) < wanted else min(self.matching.values(), default=0)


def required_spread(
    constraints: Collection[SpreadConstraint], labels: Mapping[str, str]
) -> tuple[SpreadConstraint, ...]:
    """Choose the constraints that must hold, and put the pod's own values of `matchLabelKeys` into
    their selectors.
    """
    chosen = []
    for constraint in constraints:
        if constraint.when_unsatisfiable == "DoNotSchedule":
            own = {key: labels[key] for key in constraint.match_label_keys if key in labels}
            selector = with_labels(constraint.label_selector, own)
            chosen.append(structs.replace(constraint, label_selector=selector, match_label_keys=()))
    return tuple(chosen)


def count_spread(
    namespace: str,
    labels: Mapping[str, str],
    constraints: Collection[SpreadConstraint],
    nodes: Collection[SpreadNode],
    groups: Groups,
) -> tuple[SpreadCounts, ...]:
    """Count the pods of each constraint by domain.

    Shapes: namespace, labels — the pod's, and only pods of its namespace count; constraints — as
            `required_spread` returns them.
    Cost: one look at each group and at each node for each constraint.
    """
    listed = [(group, counts) for group, counts in groups if group.namespace == namespace and not group.is_deleting]
    eligible = [
        seen for seen in nodes if all(constraint.topology_key in seen.node.labels for constraint in constraints)
    ]
    result = []
    for constraint in constraints:
        by_node: dict[str, int] = {}
        selector = constraint.label_selector
        if selector is not None and not selector.is_empty:
            for group, counts in listed:
                if selects(selector, group.labels):
                    for node, count in counts.items():
                        by_node[node] = by_node.get(node, 0) + count
        matching: dict[str, int] = {}
        for seen in eligible:
            if _counts(constraint, seen):
                value = seen.node.labels[constraint.topology_key]
                matching[value] = matching.get(value, 0) + by_node.get(seen.node.name, 0)
        result.append(SpreadCounts(constraint, matching, selects(selector, labels)))
    return tuple(result)


def why_uneven(counts: Collection[SpreadCounts], node: Node) -> Reason | None:
    """Explain which constraint a pod on this node would break. None when none."""
    for spread in counts:
        constraint = spread.constraint
        key = constraint.topology_key
        facts: dict[str, Fact] = {"node": node.name, "topology_key": key}
        if key not in node.labels:
            return Reason(
                code="topology-spread",
                message=f"node {node.name}: it has no label {key}, over which the pod is spread",
                facts=facts,
            )
        present, least = spread.matching.get(node.labels[key], 0), spread.least
        skew = present + spread.is_own - least
        if skew > constraint.max_skew:
            facts |= {
                "pods": present,
                "least": least,
                "skew": skew,
                "max_skew": constraint.max_skew,
                "domains": len(spread.matching),
            }
            facts["hindrances"] = skew - constraint.max_skew
            few = (
                f", of fewer than {constraint.min_domains} domains"
                if len(spread.matching) < (constraint.min_domains or 1)
                else ""
            )
            message = (
                f"node {node.name}: {key}={node.labels[key]} has {present} of the pods that are spread, the "
                f"least is {least}{few}: "
                f"with this pod the skew would be {skew}, allowed is {constraint.max_skew}"
            )
            return Reason(code="topology-spread", message=message, facts=facts)
    return None


def _counts(constraint: SpreadConstraint, seen: SpreadNode) -> bool:
    """Say whether a constraint spreads pods over a node.

    By default the pod's node affinity is honoured, and taints are ignored.
    """
    if (constraint.node_affinity_policy or _HONOR) == _HONOR and not seen.is_wanted:
        return False
    return constraint.node_taints_policy != _HONOR or seen.is_tolerated
