"""What a pod is told that fits nowhere because of rules: the nearest miss first, nodes that say the
same as one.
"""

from __future__ import annotations

from typing import Any

import pytest

from topobus.engine.allocation.values import Fault, NoFit
from topobus.engine.scheduling.decisions import NodeMiss
from topobus.engine.scheduling.kube_rules.rule_misses import explain_choice
from topobus.values.outcome import Reason


def kept_off(node: str, *whys: tuple[str, str] | tuple[str, str, dict[str, Any]]) -> NodeMiss:
    """A node that rules keep a pod off: a code, what is said, and facts of each."""
    reasons = [
        Reason(code=why[0], message=f"node {node}: {why[1]}", facts=why[2] if len(why) > 2 else {}) for why in whys
    ]
    return NodeMiss(node, NoFit(tuple(reasons), 0))


def short_of(node: str, lacking: int) -> NodeMiss:
    """A node that has too few devices."""
    facts = {"wanted": lacking, "found": 0}
    return NodeMiss(
        node, NoFit((Reason(code="too-few-devices", message=f"node {node}: lacks {lacking}", facts=facts),), 0)
    )


def messages(*misses: NodeMiss) -> list[str]:
    """What is told, in order."""
    return [reason.message for reason in explain_choice(misses)[1]]


PORT = ("host-port-taken", "port taken", {"hindrances": 1})
TAINT = ("node-tainted", "tainted")


@pytest.mark.parametrize(
    ("nearer", "farther"),
    [
        ([("host-port-taken", "x", {"hindrances": 1})], [("host-port-taken", "y", {"hindrances": 2})]),
        (
            [("no-room", "x", {"hindrances": 3, "permanent": False})],
            [("no-room", "y", {"hindrances": 1, "permanent": True})],
        ),
        ([("pod-anti-affinity", "x", {"hindrances": 9})], [TAINT]),
        ([PORT, ("topology-spread", "x", {"hindrances": 4})], [("volume-elsewhere", "y")]),
        ([PORT], [PORT, ("pod-affinity", "y")]),
        ([TAINT, PORT], [TAINT, ("volume-zone", "y")]),
    ],
    ids=[
        "fewer ports",
        "room that pods take, before more than the node has",
        "pods that may go, before a taint",
        "two that end by themselves, before one that does not",
        "one rule, before two",
        "one that somebody has to change, before two",
    ],
)
def test_nearer_miss_comes_first_whatever_the_order_of_the_nodes(nearer: list[Any], farther: list[Any]) -> None:
    """What ends by itself before what somebody has to change, fewer rules before more, fewer
    hindrances before more.
    """
    texts = messages(kept_off("a", *farther), kept_off("b", *nearer))

    assert [text.partition(":")[0] for text in texts] == ["node b", "node a"]


def test_nodes_that_say_the_same_are_told_as_one() -> None:
    """Four are named and the others counted.

    What else keeps a node off stands behind it, and makes it another group.
    """
    nodes = [kept_off(f"n{index}", TAINT) for index in range(6)]

    assert messages(*nodes, kept_off("m", TAINT, PORT)) == [
        "nodes n0, n1, n2, n3 and 2 more: tainted",
        "node m: tainted (and port taken)",
    ]


def test_nodes_that_were_searched_come_before_those_that_rules_keep_out() -> None:
    """Of those the nearest is first, too; the facts name the nodes of a group and count them."""
    condition, reasons = explain_choice([kept_off("a", PORT), short_of("b", 3), kept_off("c", PORT), short_of("d", 1)])

    assert (condition, [reason.message for reason in reasons]) == (
        "DoesNotFit",
        ["node d: lacks 1", "node b: lacks 3", "nodes a, c: port taken"],
    )
    assert reasons[-1].facts == {"hindrances": 1, "nodes": ("a", "c"), "count": 2}


def test_what_is_not_shown_is_counted_once() -> None:
    """Eight lines at most, of which one at least is about rules.

    The nodes of all others are counted together.
    """
    searched = [short_of(f"s{index}", index + 1) for index in range(10)]
    ruled = [kept_off(f"r{index}", ("node-tainted", f"taint {index // 2}")) for index in range(4)]
    few = [kept_off(f"r{index}", ("node-tainted", f"taint {index}")) for index in range(9)]

    assert messages(*searched, *ruled)[8:] == ["nodes r0, r1: taint 0", "and 4 more nodes"]
    assert messages(*few)[-2:] == ["node r7: taint 7", "and 1 more nodes"]


def test_what_is_wrong_everywhere_is_all_that_is_told() -> None:
    """A claim that nobody can serve, on a node that was searched; and without rules nothing is
    another than before.
    """
    fault = NodeMiss("b", Fault(Reason(code="invalid", message="the class is wrong"), 0))

    assert explain_choice([kept_off("a", PORT), fault]) == (
        "Invalid",
        (Reason(code="invalid", message="the class is wrong"),),
    )
    assert messages(short_of("a", 2)) == ["node a: lacks 2"]
