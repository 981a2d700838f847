"""Promises of the memory policy: kubelet's hints, groups of nodes, and the share of each node."""

from __future__ import annotations

import pytest

from topobus.domain.alignment.memory import MemoryAmount, MemoryNode, memory_hints, share_memory
from topobus.domain.hint import Hint
from topobus.domain.idset import NodeSet


def node(one: int, free: int, *, total: int = 8, assignments: int = 0, group: str | None = None) -> MemoryNode:
    """A node with so much memory."""
    return MemoryNode(
        id=one,
        assignments=assignments,
        group=NodeSet(one) if group is None else NodeSet.parse(group),
        amounts={"memory": MemoryAmount(allocatable=total, free=free)},
    )


def test_memory_hints_prefer_by_capacity_when_a_node_is_full() -> None:
    """A full node is left out, and a wide mask is not preferred because one node could hold it."""
    hints = memory_hints([node(0, 2), node(1, 6)], {"memory": 5})

    assert hints == {"memory": (Hint(NodeSet(1), preferred=True), Hint(NodeSet(0, 1), preferred=False))}


def test_memory_hints_never_tear_a_group_apart() -> None:
    """A node that serves in a group is offered only with its whole group; one that serves alone joins no group."""
    nodes = [node(0, 8, assignments=1, group="0-1"), node(1, 8, assignments=1, group="0-1"), node(2, 8, assignments=1)]

    hints = memory_hints(nodes, {"memory": 4})

    assert hints == {"memory": (Hint(NodeSet(2), preferred=True), Hint(NodeSet(0, 1), preferred=False))}


@pytest.mark.parametrize(("is_corrected", "wanted"), [(False, {}), (True, {"memory": ()})], ids=["compatible", "corrected"])
def test_memory_hints_refuse_when_nothing_fits_and_corrected(is_corrected: bool, wanted: dict[str, tuple[Hint, ...]]) -> None:
    """k/k 128708: kubelet has no opinion when nothing fits; corrected says that it cannot be satisfied."""
    assert memory_hints([node(0, 1)], {"memory": 4}, is_corrected=is_corrected) == wanted


def test_memory_hints_answer_when_the_machine_has_36_nodes() -> None:
    """Memory-only nodes by the dozen do not make the walk exponential."""
    hints = memory_hints([node(one, 8) for one in range(36)], {"memory": 20})

    assert hints["memory"][0] == Hint(NodeSet(0, 1, 2), preferred=True)


def test_share_memory_fills_nodes_in_order_of_id() -> None:
    """Nodes are filled in ascending order; too little gives nothing."""
    nodes = [node(1, 3), node(0, 2)]

    assert share_memory(nodes, NodeSet(0, 1), 4, "memory") == {0: 2, 1: 2}
    assert share_memory(nodes, NodeSet(0, 1), 6, "memory") is None
