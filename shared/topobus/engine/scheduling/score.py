"""PreScore and Score: ranks the nodes that fit a pod.

Upstream scores a node by the alternatives of `firstAvailable` that were taken there, and breaks
ties at random. Here the same score comes first. Among nodes of equal score the better aligned one
wins, then the name. A pod without alternatives, without devices that have a place in the topology
and without exclusive CPUs goes to the first node by name. Source:
pkg/scheduler/framework/plugins/dynamicresources (computeScore, NormalizeScore), 1.36.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from topobus.engine.allocation.values import DeviceId
from topobus.engine.scheduling.decisions import NodeFit, PodPlan
from topobus.engine.scheduling.rank import crossings
from topobus.formats.kubernetes.limits import MAX_ALTERNATIVES
from topobus.formats.kubernetes.resource import AllocationResult, ClaimSpec
from topobus.values.idset import NodeSet
from topobus.values.outcome import Placement

__all__ = ["NodeScore", "preference", "rank", "score_node"]

"""What the best node gets after normalizing (framework.MaxNodeScore)."""


@dataclass(frozen=True)
class NodeScore:
    """How good a node is for a pod. `rank` compares the scores."""

    node: str
    preference: int = 0
    """Points for the alternatives taken: 8 for the first of a request's, one less for each that was
    passed over."""
    crossed: int = 0
    """NUMA nodes beyond one that each claim's devices, and each container's own, lie on."""
    unpreferred: int = 0
    """Containers whose own resources are not aligned as the policy prefers."""


def preference(specs: Sequence[ClaimSpec], results: Sequence[AllocationResult]) -> int:
    """Count the points of the alternatives that these claims got.

    A request without alternatives gives none.

    Shapes: results — one for each spec.
    """
    points = 0
    for spec, result in zip(specs, results, strict=True):
        granted = {device.request for device in result.devices.results}
        for request in spec.devices.requests:
            for index, sub in enumerate(request.first_available):
                if f"{request.name}/{sub.name}" in granted:
                    points += MAX_ALTERNATIVES - index
                    break
    return points


def score_node(
    plan: PodPlan,
    fit: NodeFit,
    *,
    placement: Placement | None = None,
    numa_of: Callable[[DeviceId], NodeSet | None] = lambda _: None,
) -> NodeScore:
    """Score one node.

    Shapes: placement — what the node would give the pod's own resources; numa_of — the NUMA nodes
            of a device, None when they are unknown.
    """
    own = crossings(placement) if placement is not None else (0, 0)
    specs = [pod_claim.spec for pod_claim in plan.pending]
    allocated = [pod_claim for pod_claim in plan.allocated if pod_claim.allocation is not None]
    results = [*fit.results, *(pod_claim.allocation for pod_claim in allocated if pod_claim.allocation is not None)]
    return NodeScore(
        node=fit.node,
        preference=preference([*specs, *(pod_claim.spec for pod_claim in allocated)], results),
        crossed=own[0] + sum(_crossed(allocation_result, numa_of) for allocation_result in fit.results),
        unpreferred=own[1],
    )


def rank(scores: Sequence[NodeScore]) -> tuple[str, ...]:
    """Order nodes, the best first.

    Order: most points for alternatives, fewest NUMA nodes crossed, fewest containers without a
    preferred alignment, then the name.
    """
    return tuple(
        score.node
        for score in sorted(scores, key=lambda score: (-score.preference, score.crossed, score.unpreferred, score.node))
    )


def _crossed(result: AllocationResult, numa_of: Callable[[DeviceId], NodeSet | None]) -> int:
    touched: set[int] = set()
    for granted in result.devices.results:
        touched |= set(numa_of(DeviceId.of(granted)) or ())
    return max(len(touched) - 1, 0)
