"""Which of several nodes is best for a pod, as a pure comparison of their answers.

Flows in: what each node answered to a dry run. Flows out: the nodes that could take it, best first.
"""

from __future__ import annotations

from collections.abc import Mapping

from topobus.domain.outcome import Placement, Refusal

__all__ = ["crossings", "holding_nodes", "rank_nodes"]

# The code with which a node's plan refuses a pod that it holds already.
_HELD = "already-placed"


def holding_nodes(answers: Mapping[str, Placement | Refusal]) -> tuple[str, ...]:
    """Name the nodes that say that they hold the pod already."""
    return tuple(
        sorted(node for node, one in answers.items() if isinstance(one, Refusal) and any(reason.code == _HELD for reason in one.reasons))
    )


def rank_nodes(answers: Mapping[str, Placement | Refusal]) -> tuple[str, ...]:
    """Order the nodes that said yes.

    Order: fewest NUMA nodes crossed over all containers, then more containers with a preferred alignment, then by name. Independent of the order of answers.
    """
    return tuple(node for _, node in sorted((crossings(one), node) for node, one in answers.items() if isinstance(one, Placement)))


def crossings(placement: Placement) -> tuple[int, int]:
    """Count the NUMA nodes crossed over all containers, and the containers without a preferred alignment."""
    crossed = sum(max(len(container.numa_nodes) - 1, 0) for container in placement.containers)
    return crossed, sum(not container.alignment.preferred for container in placement.containers)
