"""Pod affinity and anti-affinity: which pods a pod must be near, which pods it excludes, and which
pods exclude it.

Pure. Counts by topology domain are made once for a choice, and each node then gets a Reason or
None.
Source: kube-scheduler's InterPodAffinity plugin (PreFilter, Filter), 1.36. `matchLabelKeys` and
`mismatchLabelKeys` are in the label selector already: the API server puts them there when it stores
a pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from topobus.engine.allocation.values import Node
from topobus.engine.scheduling.kube_rules.label_selectors import LabelSelector
from topobus.engine.scheduling.pod_groups import AffinityTerm, Groups, PodGroup, TopologyPair, by_domain
from topobus.values.outcome import Fact, Reason

__all__ = [
    "AffinityCounts",
    "PodAffinity",
    "PodAffinityTerm",
    "affinity_term",
    "count_affinity",
    "terms_of",
    "why_apart",
]


class PodAffinityTerm(Struct, frozen=True, kw_only=True, rename="camel"):
    """A term as written in a pod."""

    topology_key: str = ""
    label_selector: LabelSelector | None = None
    namespaces: tuple[str, ...] = ()
    namespace_selector: LabelSelector | None = None


class PodAffinity(Struct, frozen=True, kw_only=True, rename="camel"):
    """PodSpec.affinity.podAffinity or podAntiAffinity: what it requires, and whether it prefers
    anything.
    """

    required_during_scheduling_ignored_during_execution: tuple[PodAffinityTerm, ...] = ()


@dataclass(frozen=True)
class AffinityCounts:
    """Counts of the pods on nodes that matter to one pod that is to be placed."""

    near: Mapping[TopologyPair, int] = field(default_factory=dict)
    """Pods in a domain that match all of the pod's affinity terms."""
    unwanted: Mapping[TopologyPair, int] = field(default_factory=dict)
    """Pods in a domain that match one of its anti-affinity terms."""
    unwilling: Mapping[TopologyPair, int] = field(default_factory=dict)
    """Pods in a domain with an anti-affinity term that matches the pod."""


def terms_of(affinity: PodAffinity | None, namespace: str) -> tuple[AffinityTerm, ...]:
    """Resolve the required terms of a pod in a namespace."""
    required = affinity.required_during_scheduling_ignored_during_execution if affinity is not None else ()
    return tuple(affinity_term(term, namespace) for term in required)


def affinity_term(term: PodAffinityTerm, namespace: str) -> AffinityTerm:
    """Resolve one term of a pod in a namespace."""
    return AffinityTerm(
        topology_key=term.topology_key,
        selector=term.label_selector,
        namespaces=frozenset(
            term.namespaces if term.namespaces or term.namespace_selector is not None else (namespace,)
        ),
        namespace_selector=term.namespace_selector,
    )


def count_affinity(
    pod: PodGroup,
    affinity: tuple[AffinityTerm, ...],
    groups: Groups,
    labels: Mapping[str, Mapping[str, str]],
) -> AffinityCounts:
    """Count the pods that matter to a pod, by topology domain.

    Shapes: pod — its labels and anti-affinity; affinity — its affinity; labels — of nodes, by name.
    Cost: one look at each group for each term.
    """
    near: dict[TopologyPair, int] = {}
    unwanted: dict[TopologyPair, int] = {}
    unwilling: dict[TopologyPair, int] = {}
    for group, counts in groups:
        if affinity and all(term.matches(group.namespace, group.labels) for term in affinity):
            for term in affinity:
                by_domain(term.topology_key, counts, labels, near)
        for term in pod.anti_affinity:
            if term.matches(group.namespace, group.labels):
                by_domain(term.topology_key, counts, labels, unwanted)
        for term in group.anti_affinity:
            if term.matches(pod.namespace, pod.labels):
                by_domain(term.topology_key, counts, labels, unwilling)
    return AffinityCounts(near, unwanted, unwilling)


def why_apart(
    pod: PodGroup,
    affinity: tuple[AffinityTerm, ...],
    counts: AffinityCounts,
    node: Node,
) -> Reason | None:
    """Explain why other pods keep a pod off a node. None when they do not."""
    lacking = [term.topology_key for term in affinity if term.topology_key not in node.labels]
    if lacking:
        return _reason(
            "pod-affinity", node, f"it has no label {lacking[0]}, by which the pod's affinity goes", key=lacking[0]
        )
    missed = [term for term in affinity if not counts.near.get((term.topology_key, node.labels[term.topology_key]))]
    # The first of a series of pods that want to be near each other finds no pod to be near to.
    is_first = not counts.near and all(term.matches(pod.namespace, pod.labels) for term in affinity)
    if missed and not is_first:
        key = missed[0].topology_key
        return _reason(
            "pod-affinity", node, f"no pod that its affinity asks for is in {key}={node.labels[key]}", key=key, pods=0
        )
    for term in pod.anti_affinity:
        count = counts.unwanted.get((term.topology_key, node.labels.get(term.topology_key, "")), 0)
        if count and term.topology_key in node.labels:
            where = f"{term.topology_key}={node.labels[term.topology_key]}"
            return _reason(
                "pod-anti-affinity",
                node,
                f"{_pods(count)} that it does not bear in {where}",
                key=term.topology_key,
                pods=count,
            )
    for (key, value), count in sorted(counts.unwilling.items()):
        if node.labels.get(key) == value:
            return _reason(
                "anti-affinity-of-others",
                node,
                f"{_pods(count)} in {key}={value} that do not bear it",
                key=key,
                pods=count,
            )
    return None


def _pods(count: int) -> str:
    return f"there {'is 1 pod' if count == 1 else f'are {count} pods'}"


def _reason(code: str, node: Node, why: str, *, key: str, pods: int | None = None) -> Reason:
    facts: dict[str, Fact] = {"node": node.name, "topology_key": key}
    if pods is not None:
        facts["pods"] = pods
    if pods:
        facts["hindrances"] = pods
    return Reason(code=code, message=f"node {node.name}: {why}", facts=facts)
