"""Ranking of nodes for a pod."""

from __future__ import annotations

from itertools import permutations

from topobus.engine.scheduling.rank import holding_nodes, rank_nodes
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet
from topobus.values.outcome import ContainerPlacement, Placement, Reason, Refusal


def _placed(*nodes: NodeSet, preferred: bool = True) -> Placement:
    return Placement(
        containers=tuple(
            ContainerPlacement(name="c", alignment=Hint(node, preferred), numa_nodes=node) for node in nodes
        )
    )


ANSWERS = {
    "wide": _placed(NodeSet(0, 1)),
    "b-narrow": _placed(NodeSet(1)),
    "a-narrow": _placed(NodeSet(0)),
    "unpreferred": _placed(NodeSet(0), preferred=False),
    "full": Refusal(reasons=(Reason(code="x", message="x"),)),
}


def test_rank_nodes_prefers_few_numa_nodes_then_preferred_then_name_in_any_order_of_answers() -> None:
    """The ranking follows from the answers alone; a node that refused is not in it."""
    rankings = {rank_nodes(dict(order)) for order in permutations(ANSWERS.items())}

    assert rankings == {("a-narrow", "b-narrow", "unpreferred", "wide")}


def test_holding_nodes_are_those_that_say_so_and_no_others() -> None:
    """A node that holds the pod already is told from one that is full or would take it."""
    held = Refusal(reasons=(Reason(code="already-placed", message="x"), Reason(code="more", message="y")))

    assert holding_nodes({**ANSWERS, "holds": held}) == ("holds",)
    assert holding_nodes(ANSWERS) == ()
