"""Which of several changes is told: the smallest, on whichever node that is."""

from __future__ import annotations

from typing import Any

from support.why_edits import applied
from topobus.controller.snapshots.rules.cluster_view import ClusterView
from topobus.controller.snapshots.rules.explain import explain_pod
from topobus.controller.snapshots.rules.snapshot import Snapshot
from topobus.values.cluster_answers import Change, Verdict
from unit.controller.allocation import COMPILER
from unit.controller.gpu_cluster import gpu_class, gpu_node, gpu_pod


def _verdict(*parts: list[dict[str, Any]]) -> Verdict:
    view = ClusterView(Snapshot(items=(gpu_class(), *(each for part in parts for each in part))))
    return explain_pod(view, ("default", "job"), COMPILER)


def _change(verdict: Verdict, code: str) -> Change:
    return next(change for change in verdict.changes if change.code == code)


def test_pod_asks_for_as_much_as_any_node_has() -> None:
    """Node b has 8 CPUs free and node a 4: with 8 less is given up."""
    verdict = _verdict(gpu_node("a", 4, cpu="4"), gpu_node("b", 4, cpu="8"), gpu_pod("job", 1, cpu="9"))

    assert _change(verdict, "requests").message == "it fits on node b if the pod asked for cpu 8 instead of 9"


def test_one_pod_goes_where_elsewhere_two_would() -> None:
    """Nodes with equal reasons are one group, and each of them is looked at."""
    verdict = _verdict(
        gpu_node("a", 2),
        gpu_node("b", 2),
        gpu_pod("a1", 1, node="a"),
        gpu_pod("a2", 1, node="a", first=1),
        gpu_pod("b1", 2, node="b"),
        gpu_pod("job", 2),
    )

    assert len(verdict.groups) == 1
    assert _change(verdict, "remove-holders").message == "it fits on node b once pod default/b1 is gone"


def test_pod_of_the_lowest_priority_goes() -> None:
    """As kube-scheduler's preemption has it: priorities count before numbers."""
    verdict = _verdict(
        gpu_node("a", 2),
        gpu_node("b", 2),
        gpu_pod("important", 2, node="a", priority=1_000_000),
        gpu_pod("b1", 1, node="b"),
        gpu_pod("b2", 1, node="b", first=1),
        gpu_pod("job", 2),
    )

    assert _change(verdict, "remove-holders").message == "it fits on node b once these are gone: pod default/b1, pod default/b2"  # fmt: skip  # noqa: E501


def test_pod_and_its_claim_change_together_when_neither_helps_alone() -> None:
    """The only node is tainted and has two of the three devices; with both changes the pod fits."""
    cluster = [*gpu_node("a", 2, taints=[{"key": "team", "effect": "NoSchedule"}]), *gpu_pod("job", 3)]

    (change,) = _verdict(cluster).changes

    text = "it fits on node a if the pod tolerated team and with 2 devices instead of 3 for request r0"
    assert (change.code, change.message) == ("toleration", text)
    assert sorted(edit.kind for edit in change.edits) == ["Pod", "ResourceClaim"]
    assert _verdict(list(applied(cluster, change.edits))).code == "fits"


def test_largest_number_of_devices_on_any_node_is_told() -> None:
    """Node a lacks two, node b one."""
    verdict = _verdict(gpu_node("a", 2), gpu_node("b", 3), gpu_pod("job", 4))

    assert _change(verdict, "count").message == "it fits on node b with 3 devices instead of 4 for request r0"


def test_claim_for_more_than_any_claim_may_have_gets_a_number() -> None:
    """The limit is the API's; what fits is what the node has."""
    verdict = _verdict(gpu_node("a", 3), gpu_pod("job", 100_000))

    assert verdict.code == "invalid"
    assert _change(verdict, "count").message == "it fits on node a with 3 devices instead of 100000 for request r0"


def test_devices_that_the_pod_takes_itself_are_not_in_use() -> None:
    """The second request finds none, for the first has them: nobody else has any."""
    verdict = _verdict(gpu_node("a", 2), gpu_pod("job", 2, 1))

    assert "(2: taken by another request of the same claims)" in verdict.message
    assert "in use" not in verdict.message


def test_node_with_devices_comes_before_one_without() -> None:
    """Both lack three: on node b they are there, and tainted."""
    tainted = gpu_node("b", 3)
    tainted[1]["spec"]["devices"] = [
        {**device, "taints": [{"key": "sick", "effect": "NoSchedule"}]} for device in tainted[1]["spec"]["devices"]
    ]

    verdict = _verdict(gpu_node("a", 0), tainted, gpu_pod("job", 3))

    assert [group.nodes for group in verdict.groups] == [("b",), ("a",)]


def test_claim_whose_allocation_cannot_be_read_is_told_of() -> None:
    """What it holds is not known, so a verdict may be wrong: it is among the remarks."""
    claim, pod = gpu_pod("other", 1, node="a")
    broken = {**claim, "status": {"allocation": {"devices": {"results": [None]}}}}

    verdict = _verdict(gpu_node("a", 1), [broken, pod], gpu_pod("job", 1))

    assert [remark.facts["name"] for remark in verdict.remarks if remark.code == "unreadable"] == ["other"]


def test_nodes_that_cannot_be_read_are_not_called_absent() -> None:
    """One is malformed, or the user may not list them: the remarks name it."""
    nameless = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a", "labels": {"zone": 7}}}

    malformed, absent = _verdict([nameless], gpu_pod("job", 1)), _verdict(gpu_pod("job", 1))

    assert (malformed.code, malformed.message) == ("no-nodes", "no node of the cluster can be read")
    assert (absent.code, absent.message) == ("no-nodes", "the cluster has no node")
