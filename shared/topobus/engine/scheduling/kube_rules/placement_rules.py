"""The rules that pods on nodes impose on a pod that is to be placed: host ports, affinity and
anti-affinity, topology spread.

Pure. The pods are counted once for a choice, and each node then gets one Reason or None.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from msgspec import Struct

from topobus.engine.scheduling.kube_rules.host_ports import HostPort, host_ports_of, why_ports_taken
from topobus.engine.scheduling.kube_rules.pod_affinity import (
    AffinityCounts,
    PodAffinity,
    count_affinity,
    terms_of,
    why_apart,
)
from topobus.engine.scheduling.kube_rules.topology_spread import (
    SpreadConstraint,
    SpreadCounts,
    SpreadNode,
    count_spread,
    required_spread,
    why_uneven,
)
from topobus.engine.scheduling.node_fit import NodeFacts, Placing, is_tolerated, is_wanted
from topobus.engine.scheduling.pod_groups import AffinityTerm, Groups, PodGroup
from topobus.formats.kubernetes.objects import metadata_of, name_of
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.outcome import Reason

__all__ = ["PLACEMENT_CODES", "PlacementRules", "PodPlacement", "count_rules", "read_placement"]

PLACEMENT_CODES = frozenset(
    {
        "host-port-taken",
        "pod-affinity",
        "pod-anti-affinity",
        "anti-affinity-of-others",
        "topology-spread",
        "no-room",
        "volume-limit",
    }
)
"""Codes of what other pods block. It ends when they go, which does not change what can be
allocated."""


class _Affinity(Struct, frozen=True, kw_only=True, rename="camel"):
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class _PodRules(Struct, frozen=True, kw_only=True, rename="camel"):
    affinity: _Affinity | None = None
    topology_spread_constraints: tuple[SpreadConstraint, ...] = ()


@dataclass(frozen=True)
class PodPlacement:
    """What a pod requires of the pods beside it."""

    group: PodGroup
    ports: tuple[HostPort, ...] = ()
    affinity: tuple[AffinityTerm, ...] = ()
    spread: tuple[SpreadConstraint, ...] = ()

    @property
    def asks_nothing(self) -> bool:
        """Say whether it has no requirements of its own, so that only other pods' can exclude a
        node.
        """
        return not (self.ports or self.affinity or self.spread or self.group.anti_affinity)


@dataclass(frozen=True)
class PlacementRules:
    """The rules of one pod, with the counts behind them."""

    placement: PodPlacement
    counts: AffinityCounts
    spread: tuple[SpreadCounts, ...]
    ports_on: Callable[[str], Collection[HostPort]]

    def why_not(self, at: NodeFacts) -> Reason | None:
        """Return the first reason by which pods keep this pod off a node. None when there is
        none.
        """
        return next(self.reasons(at), None)

    def reasons(self, at: NodeFacts) -> Iterator[Reason]:
        """Return all reasons by which pods keep this pod off a node, one for each rule."""
        placement, node = self.placement, at.node
        ports = why_ports_taken(node.name, placement.ports, self.ports_on(node.name)) if placement.ports else None
        uneven = why_uneven(self.spread, node)
        apart = why_apart(placement.group, placement.affinity, self.counts, node)
        yield from (reason for reason in (ports, uneven, apart) if reason is not None)


def read_placement(pod: ApiObject) -> PodPlacement:
    """Read what a pod requires of the pods beside it.

    Errors: raises ContractError.
    """
    rules = read_as(pod.spec, _PodRules, where=f"{name_of(pod)}: spec")
    metadata = metadata_of(pod)
    affinity = rules.affinity or _Affinity()
    anti = terms_of(affinity.pod_anti_affinity, metadata.namespace)
    return PodPlacement(
        PodGroup(metadata.namespace, metadata.labels, anti),
        host_ports_of(pod.spec),
        terms_of(affinity.pod_affinity, metadata.namespace),
        required_spread(rules.topology_spread_constraints, metadata.labels),
    )


def count_rules(
    placement: PodPlacement,
    placing: Placing,
    nodes: Mapping[str, NodeFacts],
    groups: Groups,
    ports_on: Callable[[str], Collection[HostPort]],
) -> PlacementRules:
    """Count the pods on the nodes for one pod.

    Cost: one look at each group for each term, and at each node for each spread constraint.
    """
    listed = list(groups)
    labels = {name: at.node.labels for name, at in nodes.items()}
    spread: tuple[SpreadCounts, ...] = ()
    if placement.spread:
        seen = [SpreadNode(at.node, is_wanted(placing, at.node), is_tolerated(placing, at)) for at in nodes.values()]
        spread = count_spread(placement.group.namespace, placement.group.labels, placement.spread, seen, listed)
    counts = count_affinity(placement.group, placement.affinity, listed, labels)
    return PlacementRules(placement, counts, spread, ports_on)
