"""Nodes that kube-scheduler refused, in one round of tries."""

from __future__ import annotations

import pytest

from topobus.controller.cluster.node_rules import RefusedNodes

THERE = "node n1: kube-scheduler could not place the pod there"
FULL = "node new: kube-scheduler could not place the pod on 256 other nodes, the next try is later"


@pytest.mark.parametrize(
    ("count", "node", "expected"),
    [(2, "n1", THERE), (2, "new", None), (255, "new", None), (256, "n1", THERE), (256, "new", FULL)],
)
def test_node_is_refused_until_the_next_round(count: int, node: str, expected: str | None) -> None:
    """Each node once, and when as many are recorded as an attempt can hold, all others as well."""
    refused = RefusedNodes(tuple(f"n{index}" for index in range(count)), rounds=3)

    reason = refused.why_not(node)

    assert (reason.message if reason is not None else None) == expected
    assert refused.next_round() == RefusedNodes((), 4)
    assert refused.next_round().why_not(node) is None
