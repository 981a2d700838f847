"""Pods that are on nodes, or about to be, as the rules about other pods see them: pods with the
same labels and terms form one group with a count for each node.

Pure. A cluster has few kinds of pods and many of each, so a selector is evaluated once for a group
and not for each pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from topobus.engine.scheduling.kube_rules.label_selectors import LabelSelector, selects

__all__ = ["AffinityTerm", "Groups", "PodGroup", "TopologyPair", "by_domain"]

TopologyPair = tuple[str, str]
"""A label of nodes and one of its values: a domain, such as a zone or a host."""


@dataclass(frozen=True)
class AffinityTerm:
    """One required term of a pod's affinity or anti-affinity, its namespaces resolved.

    Source: kube-scheduler's AffinityTerm: without namespaces and without a selector of them it
            applies to its pod's own namespace.
    """

    topology_key: str
    selector: LabelSelector | None
    namespaces: frozenset[str]
    namespace_selector: LabelSelector | None = None

    def matches(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """Say whether it applies to a pod in a namespace with these labels.

        Namespaces' labels are not known here: a term with a namespace selector covers the namespaces
        that it names, and all where it selects all.
        """
        is_meant = namespace in self.namespaces or selects(self.namespace_selector, {})
        return is_meant and selects(self.selector, labels)


@dataclass(frozen=True)
class PodGroup:
    """What the rules see of a pod that is on a node."""

    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)
    anti_affinity: tuple[AffinityTerm, ...] = ()
    """Its required terms: whom it does not bear beside itself."""
    is_deleting: bool = False


Groups = Iterable[tuple[PodGroup, Mapping[str, int]]]
"""Groups with how many of their pods are on each node."""


def by_domain(
    key: str, counts: Mapping[str, int], labels: Mapping[str, Mapping[str, str]], into: dict[TopologyPair, int]
) -> None:
    """Add pods counted by node to the domains of a topology key.

    Nodes without the label are in none.

    Shapes: labels — of each node, by its name.
    """
    for node, count in counts.items():
        value = labels.get(node, {}).get(key)
        if value is not None:
            into[key, value] = into.get((key, value), 0) + count
