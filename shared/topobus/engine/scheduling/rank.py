"""Ranks nodes for a pod by their answers to a dry run. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from topobus.values.outcome import Placement, Refusal

__all__ = ["crossings", "holding_nodes", "rank_nodes"]

# The code with which a node's plan refuses a pod that it holds already.
_HELD = "already-placed"


def holding_nodes(answers: Mapping[str, Placement | Refusal]) -> tuple[str, ...]:
    """Name the nodes that refuse because they hold the pod already."""
    return tuple(
        sorted(
            node
            for node, answer in answers.items()
            if isinstance(answer, Refusal) and any(reason.code == _HELD for reason in answer.reasons)
        )
    )


def rank_nodes(answers: Mapping[str, Placement | Refusal]) -> tuple[str, ...]:
    """Order the nodes that can take the pod, best first.

    Order: fewest NUMA nodes crossed over all containers, then more containers with a preferred
    alignment, then by name. Independent of the order of answers.
    """
    return tuple(
        node
        for _, node in sorted(
            (crossings(answer), node) for node, answer in answers.items() if isinstance(answer, Placement)
        )
    )


def crossings(placement: Placement) -> tuple[int, int]:
    """Count the NUMA nodes crossed over all containers, and the containers without a preferred
    alignment.
    """
    crossed = sum(max(len(container.numa_nodes) - 1, 0) for container in placement.containers)
    return crossed, sum(not container.alignment.preferred for container in placement.containers)
