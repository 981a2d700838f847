"""The controller in a cluster allocates devices for a gated pod where its nodes have room."""

from __future__ import annotations

from typing import Any

import pytest

from support.cluster_home import ClusterHome, Object, claim, node, pod

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]


@pytest.fixture
def home(home: ClusterHome) -> ClusterHome:
    """The same with room for pods on each node."""
    home.put(*(node(name) | {"status": {"allocatable": {"cpu": "4", "pods": "10"}}} for name in ("n1", "n2")))
    return home


def on(node: str, name: str, **spec: Any) -> Object:
    """A pod on a node, which has nothing to do with us."""
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"nodeName": node, "containers": [{"name": "c"}], **spec},
    }


FULL: dict[str, Any] = {"containers": [{"name": "c", "resources": {"requests": {"cpu": "3"}}}]}


async def test_devices_are_bound_on_the_node_that_has_room(home: ClusterHome) -> None:
    """The first node has free devices and would be taken, but a pod has its CPUs."""
    home.put(on("n1", "q", **FULL), claim("c"), pod("p", "c", **FULL))

    async with home.controller():
        await home.until(lambda: not home.gates("p"), "an open gate")

    assert home.node_of("c") == "n2"


async def test_pods_placed_in_one_round_leave_each_other_room(home: ClusterHome) -> None:
    """The first pod is not bound yet, and the second goes to another node all the same."""
    home.put(*(claim(f"c{index}") for index in (1, 2)), *(pod(f"p{index}", f"c{index}", **FULL) for index in (1, 2)))

    async with home.controller():
        await home.until(lambda: not home.gates("p1") and not home.gates("p2"), "two open gates")

    assert sorted(home.node_of(f"c{index}") for index in (1, 2)) == ["n1", "n2"]


async def test_pod_that_has_room_nowhere_gets_no_device_until_another_has_gone(home: ClusterHome) -> None:
    """It is told what is short, with numbers, and placed when a pod has ended, though no device
    became free.
    """
    home.put(on("n1", "q1", **FULL), on("n2", "q2", **FULL), claim("c"), pod("p", "c", **FULL))

    async with home.controller():
        await home.until(lambda: home.events("p"), "an event")
        event, before = home.events("p")[0], home.devices("c")
        home.set_status("Pod", "q2", phase="Succeeded")
        await home.until(lambda: not home.gates("p"), "an open gate")

    assert event[0] == "DoesNotFit"
    assert event[1] == "nodes n1, n2: no room: the pod requests cpu 3, free are 1 of 4"
    assert (before, home.node_of("c")) == ([], "n2")


async def test_pod_is_told_the_nearest_of_the_rules_first(home: ClusterHome) -> None:
    """Twenty nodes of the wrong kind say the same once, behind the one on which only CPUs are
    taken.

    The event has room for it.
    """
    taint = {"key": "example.com/reserved-for-the-team-that-paid-for-it", "value": "yes", "effect": "NoSchedule"}
    home.put(*(node(f"m{index:02}", taints=[taint]) for index in range(20)), node("n2", taints=[taint]))
    home.put(on("n1", "q", **FULL), claim("c"), pod("p", "c", **FULL))

    async with home.controller():
        await home.until(lambda: home.events("p"), "an event")

    assert home.events("p")[0] == (
        "DoesNotFit",
        "node n1: no room: the pod requests cpu 3, free are 1 of 4; nodes m00, m01, m02, m03 and 17 "
        "more: the pod does not tolerate its taint "
        "example.com/reserved-for-the-team-that-paid-for-it=yes:NoSchedule",
    )
