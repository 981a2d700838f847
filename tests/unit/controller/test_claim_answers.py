"""What a claim is told when no node can serve it."""

from __future__ import annotations

from topobus.engine.allocation.explanations import SHOWN_NODES, explain_nodes
from topobus.engine.allocation.values import Fault, GaveUp, NoFit
from topobus.values.outcome import Reason

FULL = NoFit(
    (
        Reason(code="too-few-devices", message="node n: found 0"),
        Reason(code="device-in-use", message="3 devices: held"),
    ),
    1,
)


def test_explain_nodes_says_that_there_is_none_when_none_is_known() -> None:
    """A claim before the first node is told that, not that it does not fit."""
    reason, reasons = explain_nodes((), [])

    assert (reason, reasons[0].code) == ("NoNode", "no-node")


def test_explain_nodes_tells_the_fault_alone_when_it_holds_everywhere() -> None:
    """What is wrong on every node is told once, without node by node."""
    fault = Fault(Reason(code="unknown-class", message="no class"), 0)

    assert explain_nodes(("a", "b"), [fault]) == ("Invalid", (fault.reason,))


def test_explain_nodes_never_says_does_not_fit_when_a_search_gave_up() -> None:
    """One node that is not known keeps the claim from being told that it fits nowhere."""
    reason, reasons = explain_nodes(("a", "b"), [FULL, GaveUp(7)])

    assert reason == "SearchGaveUp"
    assert [each_reason.code for each_reason in reasons] == ["too-few-devices", "gave-up"]


def test_explain_nodes_counts_the_rest_when_there_are_many() -> None:
    """A person reads some nodes' reasons and a number."""
    nodes = tuple(f"n{index}" for index in range(SHOWN_NODES + 3))

    reason, reasons = explain_nodes(nodes, [FULL] * len(nodes))

    assert reason == "DoesNotFit"
    assert len(reasons) == SHOWN_NODES + 1
    assert reasons[0].message == "node n: found 0 (3 devices: held)"
    assert reasons[-1].facts == {"count": 3}
