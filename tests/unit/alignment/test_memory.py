"""Promises of the memory policy: kubelet's hints, groups of nodes, and the share of each node."""

from __future__ import annotations

import pytest

from topobus.engine.alignment.memory.memory_allocation import (
    MemoryAmount,
    MemoryBlock,
    MemoryNode,
    allocate_memory,
    memory_hints,
    memory_nodes,
)
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet
from topobus.values.outcome import Reason


def node(number: int, free: int, *, total: int = 8, assignments: int = 0, group: str | None = None) -> MemoryNode:
    """A node with so much memory."""
    return MemoryNode(
        id=number,
        assignments=assignments,
        group=NodeSet(number) if group is None else NodeSet.parse(group),
        amounts={"memory": MemoryAmount(allocatable=total, free=free)},
    )


def test_memory_hints_prefer_by_capacity_when_a_node_is_full() -> None:
    """A full node is left out, and a wide mask is not preferred because one node could hold it."""
    hints = memory_hints([node(0, 2), node(1, 6)], {"memory": 5})

    assert hints == {"memory": (Hint(NodeSet(1), preferred=True), Hint(NodeSet(0, 1), preferred=False))}


def test_memory_hints_never_tear_a_group_apart() -> None:
    """A node that serves in a group is offered only with its whole group.

    One that serves alone joins no group.
    """
    nodes = [node(0, 8, assignments=1, group="0-1"), node(1, 8, assignments=1, group="0-1"), node(2, 8, assignments=1)]

    hints = memory_hints(nodes, {"memory": 4})

    assert hints == {"memory": (Hint(NodeSet(2), preferred=True), Hint(NodeSet(0, 1), preferred=False))}


@pytest.mark.parametrize(
    ("is_corrected", "wanted"), [(False, {}), (True, {"memory": ()})], ids=["compatible", "corrected"]
)
def test_memory_hints_refuse_when_nothing_fits_and_corrected(
    is_corrected: bool, wanted: dict[str, tuple[Hint, ...]]
) -> None:
    """k/k 128708: kubelet has no opinion when nothing fits.

    Corrected says that it cannot be satisfied.
    """
    assert memory_hints([node(0, 1)], {"memory": 4}, is_corrected=is_corrected) == wanted


def test_memory_hints_answer_when_the_machine_has_36_nodes() -> None:
    """Memory-only nodes by the dozen do not make the walk exponential."""
    hints = memory_hints([node(index, 8) for index in range(36)], {"memory": 20})

    assert hints["memory"][0] == Hint(NodeSet(0, 1, 2), preferred=True)


def test_allocate_memory_fills_nodes_in_order_of_id() -> None:
    """The affinity's nodes are filled in ascending order, and all of them belong to the group from
    then on.
    """
    made = allocate_memory([node(0, 2), node(1, 3)], {"memory": 4}, Hint(NodeSet(0, 1), preferred=True))

    assert made == (
        MemoryBlock(
            kind="memory",
            nodes=NodeSet(0, 1),
            shares=(
                (0, 2),
                (1, 2),
            ),
        ),
    )


def test_allocate_memory_widens_the_affinity_when_it_is_too_narrow() -> None:
    """An affinity that holds too little is extended to the best hint around it."""
    made = allocate_memory([node(0, 2), node(1, 3), node(2, 8)], {"memory": 9}, Hint(NodeSet(1), preferred=False))

    assert not isinstance(made, Reason)
    assert made[0].nodes == NodeSet(1, 2)


def test_allocate_memory_takes_its_own_best_hint_when_there_is_no_affinity() -> None:
    """Without an opinion from the merge the memory policy uses its own best hint, never a worse one
    than promised.
    """
    nodes = [node(0, 1), node(1, 5), node(2, 4)]

    free = allocate_memory(nodes, {"memory": 5}, Hint(None, preferred=False))
    refused = allocate_memory(nodes, {"memory": 6}, Hint(None, preferred=True))

    assert not isinstance(free, Reason)
    assert free[0].nodes == NodeSet(1)
    assert isinstance(refused, Reason)
    assert refused.code == "not-enough-memory"


def test_allocate_memory_refuses_when_a_node_serves_alone_already() -> None:
    """A wide affinity over a node with single-node blocks is refused even where best-effort
    admitted it, as in kubelet.
    """
    made = allocate_memory([node(0, 4, assignments=1), node(1, 8)], {"memory": 9}, Hint(NodeSet(0, 1), preferred=False))

    assert isinstance(made, Reason)
    assert made.code == "memory-group"


def test_memory_nodes_follow_from_the_blocks_that_are_held() -> None:
    """Free memory, assignments and groups are worked out from the blocks, nothing else is kept."""
    blocks = [
        MemoryBlock(
            kind="memory",
            nodes=NodeSet(0, 1),
            shares=(
                (0, 8),
                (1, 2),
            ),
        ),
        MemoryBlock(kind="memory", nodes=NodeSet(2), shares=((2, 3),)),
    ]

    nodes = memory_nodes({index: {"memory": 8} for index in range(4)}, blocks)

    assert [
        (memory_node.amounts["memory"].free, memory_node.assignments, str(memory_node.group)) for memory_node in nodes
    ] == [
        (0, 1, "0-1"),
        (6, 1, "0-1"),
        (5, 1, "2"),
        (8, 0, "3"),
    ]
