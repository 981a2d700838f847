"""Which pods would have to move: the fewest and least important, held against all sets of pods and all
ways to place them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.laws import examples
from topobus.controller.snapshots.rules.cluster_view import ClusterView
from topobus.controller.snapshots.rules.defrag import plan_moves
from topobus.controller.snapshots.rules.free import add_pod
from topobus.controller.snapshots.rules.snapshot import Snapshot
from topobus.values.cluster_answers import MovePlan
from unit.controller.allocation import COMPILER
from unit.controller.gpu_cluster import DRA, gpu_class, gpu_node

_LABELS = {"app": "web"}


def _cluster(sizes: Sequence[int], pods: Sequence[Mapping[str, Any]], *more: dict[str, Any]) -> ClusterView:
    """Nodes of so many GPUs, and pods on them: `node`, `gpus`, `priority`, `owner`."""
    items: list[dict[str, Any]] = [gpu_class()]
    for number, size in enumerate(sizes):
        items += gpu_node(f"n{number}", size)
    taken = [0] * len(sizes)
    for number, pod in enumerate(pods):
        name, node = f"p{number}", pod["node"]
        owner = {"kind": pod.get("owner", "ReplicaSet"), "name": "web", "controller": True}
        metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "labels": _LABELS}
        held = range(taken[node], taken[node] + pod["gpus"])
        taken[node] += pod["gpus"]
        results = [
            {"request": "r", "driver": "gpu.example.com", "pool": f"n{node}", "device": f"gpu-{i}"} for i in held
        ]
        status = {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": name, "uid": f"uid-{name}"}],
        }
        items.append({**_claim(f"c{number}", pod["gpus"]), "status": status})
        items.append(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {**metadata, **({"ownerReferences": [owner]} if owner["kind"] else {})},
                "spec": {
                    "nodeName": f"n{node}",
                    "priority": pod.get("priority", 0),
                    "containers": [{"name": "c"}],
                    "resourceClaims": [{"name": "g", "resourceClaimName": f"c{number}"}],
                },
            }
        )
    return ClusterView(Snapshot(items=(*items, *more)))


def _claim(name: str, count: int) -> dict[str, Any]:
    exactly = {"deviceClassName": "gpu", "count": count}
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}"}
    spec = {"devices": {"requests": [{"name": "r", "exactly": exactly}]}}
    return {"apiVersion": DRA, "kind": "ResourceClaim", "metadata": metadata, "spec": spec}


def _planned(view: ClusterView, count: int) -> MovePlan:
    return plan_moves(view, add_pod(view, [_claim("wanted", count)], "default"), COMPILER)


def _costs(sizes: Sequence[int], pods: Sequence[Mapping[str, Any]], wanted: int) -> Iterator[tuple[int, int]]:
    """List what each set of pods costs with which the wanted one fits, however the others are placed."""
    free = [size - sum(pod["gpus"] for pod in pods if pod["node"] == node) for node, size in enumerate(sizes)]
    for node in range(len(sizes)):
        here = [pod for pod in pods if pod["node"] == node]
        for chosen in chain.from_iterable(combinations(here, count) for count in range(len(here) + 1)):
            after = [*free]
            after[node] += sum(pod["gpus"] for pod in chosen) - wanted
            if after[node] < 0:
                continue
            for places in product(range(len(sizes)), repeat=len(chosen)):
                left = [*after]
                for pod, place in zip(chosen, places, strict=True):
                    left[place] -= pod["gpus"]
                if min(left) >= 0:
                    yield len(chosen), sum(pod["priority"] for pod in chosen)
                    break


@settings(max_examples=examples(60))
@given(data=st.data(), sizes=st.lists(st.integers(2, 6), min_size=1, max_size=3), wanted=st.integers(1, 6))
def test_plan_is_the_cheapest_of_all(data: st.DataObject, sizes: list[int], wanted: int) -> None:
    """For up to ten pods: as few as any set, of those the lowest priorities, and none when none helps."""
    pods: list[dict[str, int]] = []
    for node, size in enumerate(sizes):
        left = size
        while left and len(pods) < 10 and data.draw(st.booleans()):
            gpus = data.draw(st.integers(1, left))
            pods.append({"node": node, "gpus": gpus, "priority": data.draw(st.integers(0, 2))})
            left -= gpus

    plan = _planned(_cluster(sizes, pods), wanted)

    best = min(_costs(sizes, pods, wanted), default=None)
    assert (bool(plan.node), plan.is_complete) == (best is not None, True)
    assert not plan.node or (len(plan.moves), sum(move.priority for move in plan.moves)) == best


def test_plan_says_where_each_pod_goes() -> None:
    """Four GPUs on n0 are wanted; the pod of one GPU there fits on n1."""
    view = _cluster([4, 2], [{"node": 0, "gpus": 1}, {"node": 1, "gpus": 1}])

    plan = _planned(view, 4)

    assert plan.node == "n0"
    assert [(move.name, move.owner, move.to) for move in plan.moves] == [("p0", "ReplicaSet/web", "n1")]
    assert view.pod(("default", "p0")) is not None
    assert view.pod(("default", "p0")).node == "n0"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("pods", "more", "kept"),
    [
        ([{"node": 0, "gpus": 1, "owner": "DaemonSet"}], (), {"owned by DaemonSet": 1}),
        ([{"node": 0, "gpus": 1, "owner": ""}], (), {"made by no controller": 1}),
        (
            [{"node": 0, "gpus": 1}],
            (
                {
                    "apiVersion": "policy/v1",
                    "kind": "PodDisruptionBudget",
                    "metadata": {"name": "b", "namespace": "default"},
                    "spec": {"selector": {"matchLabels": _LABELS}},
                    "status": {"disruptionsAllowed": 0},
                },
            ),
            {"their PodDisruptionBudget allows none": 1},
        ),
    ],
)
def test_pod_that_may_not_move_stays(
    pods: list[dict[str, Any]], more: tuple[dict[str, Any], ...], kept: dict[str, int]
) -> None:
    """The plan says how many pods were kept, and why."""
    plan = _planned(_cluster([4, 4], pods, *more), 4)
    assert (plan.node, plan.moves) == ("n1", ())
    plan = _planned(_cluster([4, 1], pods, *more), 4)

    assert (plan.node, plan.kept) == ("", kept)


def test_plan_says_when_not_all_ways_were_tried() -> None:
    """The first of two pods fits on each of 40 nodes, and the second on none: 1,000 tries do not show it."""
    pods = [{"node": 0, "gpus": 1, "priority": 1}, {"node": 0, "gpus": 2}]

    few, many = (_planned(_cluster([4, *[1] * nodes], pods), 4) for nodes in (5, 40))

    assert (few.node, few.is_complete) == ("", True)
    assert (many.node, many.is_complete) == ("", False)


def test_budget_counts_all_pods_that_move_together() -> None:
    """One of two pods may be disrupted, and both would have to move: neither does."""
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "b", "namespace": "default"},
        "spec": {"selector": {"matchLabels": _LABELS}},
        "status": {"disruptionsAllowed": 1},
    }
    pods = [{"node": 0, "gpus": 1}, {"node": 0, "gpus": 1}]

    assert _planned(_cluster([4, 2], pods, budget), 4).node == ""
    assert len(_planned(_cluster([4, 2], pods, {**budget, "status": {"disruptionsAllowed": 2}}), 4).moves) == 2
