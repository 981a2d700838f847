"""What a pod prefers of nodes, in points: by labels, by the pods there, by how evenly its kind
lies.
"""

from __future__ import annotations

from typing import Any

import pytest

from topobus.controller.state.cluster.placed_pods import PlacedPods
from topobus.engine.scheduling.kube_rules.preferences import points_of, read_preferences
from topobus.engine.scheduling.node_fit import node_facts, read_placing
from topobus.engine.scheduling.score import NodeScore, rank
from topobus.formats.messages.messages import ApiObject

HOST, ZONE = "kubernetes.io/hostname", "zone"
WEB = {"matchLabels": {"app": "web"}}
NODES: dict[str, dict[str, str]] = {
    "n1": {HOST: "n1", ZONE: "a"},
    "n2": {HOST: "n2", ZONE: "a"},
    "n3": {HOST: "n3", ZONE: "b"},
    "n4": {HOST: "n4"},
}


def web(name: str, node: str) -> dict[str, Any]:
    """A pod of the web."""
    return {"metadata": {"name": name, "namespace": "default", "labels": {"app": "web"}}, "spec": {"nodeName": node}}


def likes(key: str, weight: int = 10, *, anti: bool = False) -> dict[str, Any]:
    """A preferred term of affinity, or of anti-affinity, for the web."""
    terms = [{"weight": weight, "podAffinityTerm": {"topologyKey": key, "labelSelector": WEB}}]
    return {"podAntiAffinity" if anti else "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms}}


def labelled(key: str, value: str, weight: int) -> dict[str, Any]:
    """A preferred term of node affinity."""
    return {"weight": weight, "preference": {"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]}}


def in_nodes(*terms: dict[str, Any]) -> dict[str, Any]:
    """Preferred node affinity."""
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": list(terms)}}


def evenly(*keys: str, action: str = "ScheduleAnyway", skew: int = 1) -> dict[str, Any]:
    """Spread constraints, which may be broken by default."""
    return {
        "topologySpreadConstraints": [
            {"maxSkew": skew, "topologyKey": key, "whenUnsatisfiable": action, "labelSelector": WEB} for key in keys
        ]
    }


def points(spec: dict[str, Any], *present: dict[str, Any]) -> list[int]:
    """Give the points of the four nodes for a pod of the web."""
    index = PlacedPods()
    for plain in present:
        index.put_pod(("default", plain["metadata"]["name"]), plain)
    nodes = {
        name: node_facts(
            ApiObject(api_version="v1", kind="Node", metadata={"name": name, "labels": labels}, spec={}, status={})
        )
        for name, labels in NODES.items()
    }
    metadata = {"name": "p", "namespace": "default", "labels": {"app": "web"}}
    stored = ApiObject(api_version="v1", kind="Pod", metadata=metadata, spec=spec, status={})
    given = points_of(read_preferences(stored, read_placing(stored)), nodes, index.groups({}))
    return [given[name] for name in NODES]


@pytest.mark.parametrize(
    ("spec", "present", "expected"),
    [
        ({}, [web("q", "n1")], [0, 0, 0, 0]),
        ({"affinity": in_nodes(labelled(ZONE, "a", 30), labelled(HOST, "n1", 10))}, [], [100, 75, 0, 0]),
        ({"affinity": in_nodes(labelled(ZONE, "elsewhere", 30))}, [], [0, 0, 0, 0]),
        ({"affinity": likes(ZONE)}, [web("q", "n1")], [100, 100, 0, 0]),
        ({"affinity": likes(HOST, anti=True)}, [web("q", "n1"), web("r", "n1"), web("s", "n2")], [0, 50, 100, 100]),
        ({"affinity": likes(ZONE)}, [], [0, 0, 0, 0]),
        # Together: the weights of both terms, then all of it from nothing to a hundred.
        ({"affinity": likes(ZONE, 10) | likes(HOST, 30, anti=True)}, [web("q", "n1")], [0, 100, 66, 66]),
        (evenly(HOST), [web("q", "n1"), web("r", "n1"), web("s", "n2")], [0, 50, 100, 100]),
        (evenly(ZONE), [web("q", "n1"), web("r", "n3")], [100, 100, 100, 0]),
        (evenly(ZONE), [], [100, 100, 100, 0]),
        # 1 x ln 4 for the zone, 1 x ln 5 for the host, and 2 + 2 for the
        # skews: 7, 5 and 4; n4 has no zone.
        (evenly(ZONE, HOST, skew=3), [web("q", "n1")], [57, 85, 100, 0]),
        (evenly(HOST, action="DoNotSchedule"), [web("q", "n1")], [0, 0, 0, 0]),
        ({"affinity": in_nodes(labelled(HOST, "n1", 1))} | evenly(HOST), [web("q", "n1")], [100, 100, 100, 100]),
    ],
    ids=[
        "nothing",
        "labels",
        "labels of none",
        "near",
        "apart",
        "near to nobody",
        "near and apart",
        "even over hosts",
        "even over zones",
        "even, nobody there",
        "even over both",
        "must be even",
        "labels and even",
    ],
)
def test_node_gets_points_for_what_the_pod_prefers(
    spec: dict[str, Any], present: list[dict[str, Any]], expected: list[int]
) -> None:
    """Each kind from 0 to 100, added up.

    A node without the label of a constraint gets nothing for it, and
    what must hold is no preference.
    """
    assert points(spec, *present) == expected


def test_devices_come_before_what_the_pod_prefers() -> None:
    """Alternatives and alignment first, then points, then the name."""
    scores = [
        NodeScore("a", preference=7, liked=300),
        NodeScore("b", preference=8),
        NodeScore("c", preference=8, liked=1),
        NodeScore("d", preference=8, crossed=1, liked=9),
    ]

    assert rank(scores) == ("c", "b", "d", "a")
