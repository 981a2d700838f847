"""What a pod prefers of nodes without requiring it: preferred node affinity, preferred pod affinity
and anti-affinity, spread constraints that may be broken.

Pure. The points order the nodes for the search. Each of the three kinds gives 0 to 100 points, and
they are added up, because kube-scheduler's plugins of the three have the same weight. Points are
compared over all nodes, not over those that fit, so that they can be computed before any node is
searched. The preferences of the pods that are on nodes already are left out.
Source: kube-scheduler's NodeAffinity, InterPodAffinity and PodTopologySpread plugins (Score,
NormalizeScore), 1.36.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from topobus.engine.allocation.values import Node
from topobus.engine.scheduling.kube_rules.pod_affinity import PodAffinityTerm, affinity_term
from topobus.engine.scheduling.kube_rules.topology_spread import (
    SpreadConstraint,
    SpreadCounts,
    SpreadNode,
    count_spread,
    spread_of,
)
from topobus.engine.scheduling.node_fit import (
    NodeFacts,
    Placing,
    has_preferences,
    is_tolerated,
    is_wanted,
    preference_of,
)
from topobus.engine.scheduling.pod_groups import AffinityTerm, Groups, TopologyPair, by_domain
from topobus.formats.kubernetes.objects import metadata_of, name_of
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject

__all__ = ["PodPreferences", "points_of", "read_preferences"]

MOST_POINTS = 100
"""What the best node gets of each kind (framework.MaxNodeScore)."""


class _WeightedTerm(Struct, frozen=True, kw_only=True, rename="camel"):
    weight: int = 0
    pod_affinity_term: PodAffinityTerm = PodAffinityTerm()


class _Preferred(Struct, frozen=True, kw_only=True, rename="camel"):
    preferred_during_scheduling_ignored_during_execution: tuple[_WeightedTerm, ...] = ()


class _Affinity(Struct, frozen=True, kw_only=True, rename="camel"):
    pod_affinity: _Preferred = _Preferred()
    pod_anti_affinity: _Preferred = _Preferred()


class _Wishes(Struct, frozen=True, kw_only=True, rename="camel"):
    affinity: _Affinity = _Affinity()
    topology_spread_constraints: tuple[SpreadConstraint, ...] = ()


@dataclass(frozen=True)
class PodPreferences:
    """What a pod prefers."""

    namespace: str
    labels: Mapping[str, str]
    placing: Placing
    near: tuple[tuple[int, AffinityTerm], ...] = ()
    """Terms with their weights: above nothing for pods that it likes beside itself, below for those
    that it does not."""
    spread: tuple[SpreadConstraint, ...] = ()

    @property
    def is_any(self) -> bool:
        """Say whether it prefers anything."""
        return bool(self.near or self.spread) or has_preferences(self.placing)


def read_preferences(pod: ApiObject, placing: Placing) -> PodPreferences:
    """Read what a pod prefers.

    Errors: raises ContractError.
    """
    wishes = read_as(pod.spec, _Wishes, where=f"{name_of(pod)}: spec")
    metadata = metadata_of(pod)
    terms = [
        (sign * term.weight, affinity_term(term.pod_affinity_term, metadata.namespace))
        for sign, preferred in ((1, wishes.affinity.pod_affinity), (-1, wishes.affinity.pod_anti_affinity))
        for term in preferred.preferred_during_scheduling_ignored_during_execution
    ]
    spread = spread_of(wishes.topology_spread_constraints, metadata.labels, "ScheduleAnyway")
    return PodPreferences(metadata.namespace, metadata.labels, placing, tuple(terms), spread)


def points_of(wishes: PodPreferences, nodes: Mapping[str, NodeFacts], groups: Groups) -> dict[str, int]:
    """Give each node its points, 0 to 300.

    Cost: one look at each group for each term and constraint, one at each node.
    """
    listed = list(groups)
    points = dict.fromkeys(nodes, 0)
    for kind in (_by_labels(wishes, nodes), _by_pods(wishes, nodes, listed), _by_spread(wishes, nodes, listed)):
        for name, count in kind.items():
            points[name] += count
    return points


def _by_labels(wishes: PodPreferences, nodes: Mapping[str, NodeFacts]) -> dict[str, int]:
    """Compare nodes by the weights of the preferred node affinity terms that they match."""
    if not has_preferences(wishes.placing):
        return {}
    weights = {name: preference_of(wishes.placing, at.node) for name, at in nodes.items()}
    most = max(weights.values(), default=0)
    return {name: weight * MOST_POINTS // most for name, weight in weights.items()} if most > 0 else {}


def _by_pods(wishes: PodPreferences, nodes: Mapping[str, NodeFacts], groups: Groups) -> dict[str, int]:
    """Compare nodes by the pods in their domains that the pod prefers or avoids."""
    labels = {name: at.node.labels for name, at in nodes.items()}
    sums: dict[TopologyPair, int] = {}
    for weight, term in wishes.near:
        counted: dict[TopologyPair, int] = {}
        for group, counts in groups:
            if term.matches(group.namespace, group.labels, {}):
                by_domain(term.topology_key, counts, labels, counted)
        for pair, count in counted.items():
            sums[pair] = sums.get(pair, 0) + weight * count
    keys = {key for key, _ in sums}
    weights = {name: sum(sums.get((key, own[key]), 0) for key in keys if key in own) for name, own in labels.items()}
    least, most = min(weights.values(), default=0), max(weights.values(), default=0)
    return (
        {name: (weight - least) * MOST_POINTS // (most - least) for name, weight in weights.items()}
        if most > least
        else {}
    )


def _by_spread(wishes: PodPreferences, nodes: Mapping[str, NodeFacts], groups: Groups) -> dict[str, int]:
    """Compare nodes by how few of the pods that are spread their domains have.

    A node that lacks a key of the constraints gets no points.
    """
    if not wishes.spread:
        return {}
    seen = [
        SpreadNode(at.node, is_wanted(wishes.placing, at.node), is_tolerated(wishes.placing, at))
        for at in nodes.values()
    ]
    counts = count_spread(wishes.namespace, wishes.labels, wishes.spread, seen, groups)
    crowds = {at.node.name: crowd for at in nodes.values() if (crowd := _crowd(counts, at.node)) is not None}
    least, most = min(crowds.values(), default=0), max(crowds.values(), default=0)
    return {
        name: MOST_POINTS * (most + least - crowd) // most if most else MOST_POINTS for name, crowd in crowds.items()
    }


def _crowd(counts: Sequence[SpreadCounts], node: Node) -> int | None:
    """Compute how many of the pods that are spread are in a node's domains, weighted so that a key
    of few domains does not count for less. None without one of the keys.
    """
    if any(spread.constraint.topology_key not in node.labels for spread in counts):
        return None
    return round(
        sum(
            spread.matching.get(node.labels[spread.constraint.topology_key], 0) * math.log(len(spread.matching) + 2)
            + spread.constraint.max_skew
            - 1
            for spread in counts
        )
    )
