"""The room that nodes have for a pod: what pods request, what is left, and what is short whatever
goes.
"""

from __future__ import annotations

from typing import Any

import pytest

from topobus.engine.scheduling.node_resources import NodeResources, PodNeeds, needs_of, requests_of, why_no_room
from topobus.values.quantity import Quantity


def container(cpu: str, **fields: Any) -> dict[str, Any]:
    """A container that asks for CPU."""
    return {"name": "c", "resources": {"requests": {"cpu": cpu}}, **fields}


def on(node: str, cpu: str = "0", **spec: Any) -> dict[str, Any]:
    """A pod on a node."""
    return {"spec": {"nodeName": node, "containers": [container(cpu)], **spec}}


def wants(**amounts: str) -> dict[str, Any]:
    """The spec of a pod that requests amounts; `_` in a name stands for `-`."""
    return {
        "containers": [
            {"resources": {"requests": {name.replace("_", "-"): amount for name, amount in amounts.items()}}}
        ]
    }


@pytest.mark.parametrize(
    ("spec", "cpu"),
    [
        ({"containers": [container("1"), container("500m")]}, "1500m"),
        ({"containers": [container("1")], "initContainers": [container("3"), container("2")]}, "3"),
        (
            {
                "containers": [container("1")],
                "initContainers": [container("1", restartPolicy="Always"), container("2")],
            },
            "3",
        ),
        (
            {
                "containers": [container("1")],
                "initContainers": [container("2"), container("4", restartPolicy="Always")],
            },
            "5",
        ),
        ({"containers": [container("1")], "overhead": {"cpu": "250m"}}, "1250m"),
        ({"containers": [{"resources": {"limits": {"cpu": "2"}}}]}, "2"),
        ({"containers": [{"resources": {"requests": {"cpu": "plenty"}}}, "nonsense"]}, "0"),
        # A pod may ask as a whole: that is what counts then.
        ({"containers": [container("1")], "resources": {"requests": {"cpu": "3"}}, "overhead": {"cpu": "1"}}, "4"),
    ],
)
def test_pods_requests_add_up_as_the_scheduler_counts_them(spec: dict[str, Any], cpu: str) -> None:
    """Containers and sidecars together, or the neediest init container with the sidecars before it,
    or the whole pod's; and the overhead.
    """
    assert requests_of(spec).get("cpu", Quantity(0)) == Quantity.parse(cpu)


def test_pod_as_a_whole_asks_for_cpu_memory_and_huge_pages_alone() -> None:
    """What else stands there is nobody's request."""
    amounts = {"memory": "1Gi", "hugepages-2Mi": "4Mi", "example.com/lamp": "1"}

    assert sorted(requests_of({"resources": {"requests": amounts}})) == ["hugepages-2Mi", "memory"]


def test_room_follows_pods_as_they_come_and_go() -> None:
    """Bound pods take room, ended and deleted ones give it back.

    A node that says nothing has room for anything.
    """
    room = NodeResources()
    room.put_node("n1", {"cpu": "4", "pods": "2"})
    needs, nothing = needs_of(wants(cpu="2")), PodNeeds({})
    fits = [not room.shortages("n1", needs), not room.shortages("n2", needs)]
    room.put_pod(("a", "p"), on("n1", "3"))
    fits.append(not room.shortages("n1", needs))
    room.put_pod(("a", "p"), {**on("n1", "3"), "status": {"phase": "Succeeded"}})
    fits.append(not room.shortages("n1", needs))
    for name in ("q", "r"):
        room.put_pod(("a", name), on("n1"))
    fits.append(not room.shortages("n1", nothing))
    room.put_pod(("a", "q"), None)
    fits.append(not room.shortages("n1", nothing))

    assert fits == [True, True, False, True, False, True]


def test_room_counts_what_may_have_changed_it() -> None:
    """A pod that comes, goes or ends, and a node that offers something else.

    The same told again is no change.
    """
    room = NodeResources()
    counts = []
    for plain in (on("n1", "1"), on("n1", "1"), {**on("n1", "1"), "status": {"phase": "Failed"}}, None):
        room.put_pod(("a", "p"), plain)
        counts.append(room.changes)
    for offered in ("4", "4", "8"):
        room.put_node("n1", {"cpu": offered})
        counts.append(room.changes)

    assert counts == [1, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize(
    ("asker", "is_final"),
    [
        ({}, True),
        ({"priority": 100}, True),
        ({"priority": 101}, False),
        ({"priority": 101, "preemptionPolicy": "Never"}, True),
        ({"priority": 101, **wants(cpu="5")}, True),
    ],
    ids=["no priority", "the same", "a higher one", "a higher one that sends nobody away", "more than the node has"],
)
def test_shortage_is_final_when_no_pod_of_lower_priority_could_go(asker: dict[str, Any], is_final: bool) -> None:
    """kube-scheduler sends pods of lower priority away for one of a higher, so a node that is full
    of them is no miss for it.
    """
    room = NodeResources()
    room.put_node("n1", {"cpu": "4", "pods": "10"})
    room.put_pod(("a", "p"), on("n1", "3", priority=100))

    shortages = room.shortages("n1", needs_of({**wants(cpu="2"), **asker}))

    assert [(shortage.resource, shortage.is_final) for shortage in shortages] == [("cpu", is_final)]
    assert (why_no_room("n1", shortages) is not None) == is_final


def test_node_without_room_says_what_is_short_with_numbers() -> None:
    """CPU, memory, disk, pods and a vendor's resource, each with what is wanted, free and there.

    Free is never less than nothing.
    """
    room = NodeResources()
    offered = {"cpu": "4", "memory": "8Gi", "ephemeral-storage": "10Gi", "pods": "1", "example.com/lamp": "2"}
    room.put_node("n1", offered)
    room.put_pod(("a", "p"), {"spec": {"nodeName": "n1", **wants(cpu="3", memory="6Gi", ephemeral_storage="12Gi")}})
    asked = {
        "cpu": "1500m",
        "memory": "4Gi",
        "ephemeral-storage": "1Gi",
        "example.com/lamp": "3",
        "example.com/bell": "0",
    }

    reason = why_no_room("n1", room.shortages("n1", needs_of({"containers": [{"resources": {"requests": asked}}]})))

    assert reason is not None
    assert reason.message == (
        "node n1: no room: the pod requests cpu 1500m, free are 1 of 4; ephemeral-storage 1Gi, free are 0 of "
        "10Gi; example.com/lamp 3, free are 2 of 2; "
        "memory 4Gi, free are 2Gi of 8Gi; pods 1, free are 0 of 1"
    )
    assert (reason.facts["hindrances"], reason.facts["permanent"]) == (5, True)


def test_resource_of_a_device_class_is_short_only_where_the_node_offers_it_itself() -> None:
    """A claim is made for it elsewhere; where a device plugin offers some, those count."""
    room = NodeResources()
    room.put_node("n1", {"pods": "10"})
    room.put_node("n2", {"pods": "10", "example.com/lamp": "1"})
    needs = needs_of({"containers": [{"resources": {"requests": {"example.com/lamp": "2"}}}]})

    short = {
        node: [each.resource for each in room.shortages(node, needs, by_claims={"example.com/lamp"})]
        for node in ("n1", "n2")
    }

    assert short == {"n1": [], "n2": ["example.com/lamp"]}


def test_resource_of_ours_is_never_short_for_good() -> None:
    """What kubelet counts lags behind the node's devices, which are looked at themselves: such a
    node is tried last.
    """
    room = NodeResources()
    room.put_node("n1", {"pods": "10", "topobus.dev/gpu": "1"})

    shortages = room.shortages("n1", needs_of({"containers": [{"resources": {"requests": {"topobus.dev/gpu": "2"}}}]}))

    assert [(shortage.resource, shortage.is_final) for shortage in shortages] == [("topobus.dev/gpu", False)]


def test_waiting_pod_takes_room_where_it_is_intended() -> None:
    """Two pods that are placed in one round see each other.

    Once the first is bound it counts once.
    """
    room = NodeResources()
    room.put_node("n1", {"cpu": "4", "pods": "10"})
    room.put_pod(("a", "p"), {"spec": wants(cpu="3")}, is_ours=True)
    needs = needs_of(wants(cpu="2", memory="0"))
    short = [bool(room.shortages("n1", needs)), bool(room.shortages("n1", needs, besides=[("a", "p"), ("a", "gone")]))]
    room.put_pod(("a", "p"), on("n1", "2"), is_ours=True)
    short.append(bool(room.shortages("n1", needs, besides=[("a", "p")])))

    assert short == [False, True, False]
