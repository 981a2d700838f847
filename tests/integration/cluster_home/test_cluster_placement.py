"""The controller in a cluster chooses no node, and binds no device there, that other pods keep a
gated pod off.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from support.cluster_home import ClusterHome, Object, claim, node, pod
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

HOST = "kubernetes.io/hostname"
WEB = {"matchLabels": {"app": "web"}}


@pytest_asyncio.fixture
async def home(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[ClusterHome]:
    """An API server with two nodes of two devices each."""
    async with ApiServerSimulator(token="secret", bookmark_s=0.5) as server:
        made = ClusterHome(server, nats_server.url, tmp_path)
        made.machine_room()
        made.put(*(node(name) | {"status": {"allocatable": {"cpu": "4", "pods": "10"}}} for name in ("n1", "n2")))
        yield made


def labelled(made: Object) -> Object:
    """Give a pod the label of the web."""
    return {**made, "metadata": {**made["metadata"], "labels": {"app": "web"}}}


def on(node: str, name: str, **spec: Any) -> Object:
    """A pod of the web on a node, which has nothing to do with us."""
    return labelled(
        {
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"nodeName": node, "containers": [{"name": "c"}], **spec},
        }
    )


PORT: dict[str, Any] = {"containers": [{"name": "c", "ports": [{"hostPort": 8080, "containerPort": 8080}]}]}
APART: dict[str, Any] = {
    "affinity": {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": HOST, "labelSelector": WEB}]
        }
    }
}
BESIDE: dict[str, Any] = {
    "affinity": {
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": HOST, "labelSelector": WEB}]}
    }
}
FULL: dict[str, Any] = {"containers": [{"name": "c", "resources": {"requests": {"cpu": "3"}}}]}
EVEN: dict[str, Any] = {
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": HOST, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": WEB}
    ]
}


@pytest.mark.parametrize(
    ("wanted", "present"),
    [
        (pod("p", "c", **PORT), on("n1", "q", **PORT)),
        (pod("p", "c", **APART), on("n1", "q")),
        (labelled(pod("p", "c")), on("n1", "q", **APART)),
        (pod("p", "c", **BESIDE), on("n2", "q")),
        (labelled(pod("p", "c", **EVEN)), on("n1", "q")),
        (pod("p", "c", **FULL), on("n1", "q", **FULL)),
    ],
    ids=["host port", "anti-affinity", "anti-affinity of the other", "affinity", "spread", "room"],
)
async def test_devices_are_bound_on_the_node_that_the_pod_can_go_to(
    home: ClusterHome, wanted: Object, present: Object
) -> None:
    """The first node has free devices and would be taken, but a pod stands in the way, or is
    missing there.
    """
    home.put(present, claim("c"), wanted)

    async with home.controller():
        await home.until(lambda: not home.gates("p"), "an open gate")

    assert home.node_of("c") == "n2"


DATA: dict[str, Any] = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}


def volume_claim(*, bound: str = "", mode: str = "ReadWriteOnce") -> Object:
    """The claim of a volume, bound to one or not."""
    completed = {"pv.kubernetes.io/bind-completed": "yes"} if bound else {}
    return {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data", "namespace": "default", "annotations": completed},
        "spec": {"accessModes": [mode], "storageClassName": "disks", "volumeName": bound},
    }


def volume(host: str) -> Object:
    """A volume that can be used on one node."""
    term = {"matchExpressions": [{"key": HOST, "operator": "In", "values": [host]}]}
    spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": "disks", "capacity": {"storage": "1Gi"}}
    return {
        "kind": "PersistentVolume",
        "metadata": {"name": "v"},
        "spec": {**spec, "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}}},
        "status": {"phase": "Available"},
    }


def disks(mode: str) -> Object:
    """Their class, which makes none."""
    return {
        "kind": "StorageClass",
        "metadata": {"name": "disks"},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": mode,
    }


@pytest.mark.parametrize("wanted", [volume_claim(bound="v"), volume_claim()], ids=["bound", "free"])
async def test_devices_are_bound_where_the_pods_volume_is(home: ClusterHome, wanted: Object) -> None:
    """A volume that can be used on n2 alone, bound already or the only one that fits, keeps the
    devices there.
    """
    home.put(disks("WaitForFirstConsumer"), volume("n2"), wanted, claim("c"), pod("p", "c", **DATA))

    async with home.controller():
        await home.until(lambda: not home.gates("p"), "an open gate")

    assert home.node_of("c") == "n2"


async def test_pod_gets_no_device_until_its_volume_is_bound(home: ClusterHome) -> None:
    """A class that binds at once, and has not: the pod waits, is told which claim, and is placed as
    soon as the volume is there.
    """
    home.put(disks("Immediate"), volume_claim(), claim("c"), pod("p", "c", **DATA))

    async with home.controller():
        await home.until(lambda: home.events("p"), "an event")
        event, before = home.events("p")[0], home.devices("c")
        condition = next(
            each for each in home.get("Pod", "p")["status"]["conditions"] if each["type"] == "topobus.dev/Allocated"
        )
        home.put(volume("n2"), volume_claim(bound="v"))
        await home.until(lambda: not home.gates("p"), "an open gate")

    assert (condition["status"], condition["reason"]) == ("False", "WaitingForVolumes")
    assert event == ("WaitingForVolumes", condition["message"])
    assert condition["message"] == (
        "volume data: PersistentVolumeClaim default/data is not bound to a volume yet, and StorageClass "
        "disks binds at once (Immediate), whatever pod comes"
    )
    assert (before, home.node_of("c")) == ([], "n2")


async def test_pod_gets_no_device_while_another_has_its_volume_for_one_pod(home: ClusterHome) -> None:
    """ReadWriteOncePod: the pod waits for the other, which is named, and is placed when that one
    has ended.
    """
    home.put(
        disks("Immediate"),
        volume("n2"),
        volume_claim(bound="v", mode="ReadWriteOncePod"),
        on("n2", "q", **DATA),
        claim("c"),
        pod("p", "c", **DATA),
    )

    async with home.controller():
        await home.until(lambda: home.events("p"), "an event")
        event, before = home.events("p")[0], home.devices("c")
        home.set_status("Pod", "q", phase="Succeeded")
        await home.until(lambda: not home.gates("p"), "an open gate")

    assert event[0] == "WaitingForVolumes"
    assert "pod default/q uses it" in event[1]
    assert (before, home.node_of("c")) == ([], "n2")


@pytest.mark.parametrize("rule", [PORT, APART, EVEN, FULL], ids=["host port", "anti-affinity", "spread", "room"])
async def test_pods_placed_in_one_round_see_each_other(home: ClusterHome, rule: dict[str, Any]) -> None:
    """Nobody has bound the first pod yet, and the second goes to another node all the same."""
    home.put(
        *(claim(f"c{index}") for index in (1, 2)),
        *(labelled(pod(f"p{index}", f"c{index}", **rule)) for index in (1, 2)),
    )

    async with home.controller():
        await home.until(lambda: not home.gates("p1") and not home.gates("p2"), "two open gates")

    assert sorted(home.node_of(f"c{index}") for index in (1, 2)) == ["n1", "n2"]


LIKES: dict[str, dict[str, Any]] = {
    "anti-affinity": {
        "affinity": {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 1, "podAffinityTerm": {"topologyKey": HOST, "labelSelector": WEB}}
                ]
            }
        }
    },
    "spread": {
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": HOST, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": WEB}
        ]
    },
    "node affinity": {
        "affinity": {
            "nodeAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 1,
                        "preference": {"matchExpressions": [{"key": HOST, "operator": "In", "values": ["n2"]}]},
                    }
                ]
            }
        }
    },
}


@pytest.mark.parametrize("liking", LIKES.values(), ids=LIKES)
async def test_what_a_pod_prefers_decides_among_nodes_that_have_the_devices(
    home: ClusterHome, liking: dict[str, Any]
) -> None:
    """Both nodes would do for one device, and the second is preferred.

    Two devices are on the first alone, whatever is preferred.
    """
    home.put(on("n1", "q"), claim("c"), pod("p", "c", **liking))

    async with home.controller():
        await home.until(lambda: not home.gates("p"), "an open gate")
        home.put(claim("both", count=2), pod("r", "both", **liking))
        await home.until(lambda: not home.gates("r"), "another open gate")

    assert (home.node_of("c"), home.node_of("both")) == ("n2", "n1")


async def test_pod_that_fits_nowhere_gets_no_device_until_its_port_is_free(home: ClusterHome) -> None:
    """It is told the port, node by node.

    When one of the pods ends it is placed, though no device became free.
    """
    home.put(on("n1", "q1", **PORT), on("n2", "q2", **PORT), claim("c"), pod("p", "c", **PORT))

    async with home.controller():
        await home.until(lambda: home.events("p"), "an event")
        event, before = home.events("p")[0], home.devices("c")
        home.set_status("Pod", "q2", phase="Succeeded")
        await home.until(lambda: not home.gates("p"), "an open gate")

    assert event[0] == "DoesNotFit"
    assert event[1] == "nodes n1, n2: host port 8080/TCP of 1 wanted is taken by pods there"
    assert (before, home.node_of("c")) == ([], "n2")


async def test_pod_that_has_room_nowhere_gets_no_device_until_another_has_gone(home: ClusterHome) -> None:
    """It is told what is short, with numbers, and placed when a pod has ended, though no device
    became free.
    """
    cluster = msgspec.structs.replace(home.settings.cluster, unschedulable_s=3600.0)
    home.put(on("n1", "q1", **FULL), on("n2", "q2", **FULL), claim("c"), pod("p", "c", **FULL))

    async with home.controller(settings=msgspec.structs.replace(home.settings, cluster=cluster)):
        await home.until(lambda: home.events("p"), "an event")
        event, before = home.events("p")[0], home.devices("c")
        home.set_status("Pod", "q2", phase="Succeeded")
        await home.until(lambda: not home.gates("p"), "an open gate")

    assert event[0] == "DoesNotFit"
    assert event[1] == "nodes n1, n2: no room: the pod requests cpu 3, free are 1 of 4"
    assert (before, home.node_of("c")) == ([], "n2")


async def test_pod_is_told_the_nearest_of_the_rules_first(home: ClusterHome) -> None:
    """Twenty nodes of the wrong kind say the same once, behind the one on which only a port is
    taken.

    The event has room for it.
    """
    taint = {"key": "example.com/reserved-for-the-team-that-paid-for-it", "value": "yes", "effect": "NoSchedule"}
    home.put(*(node(f"m{index:02}", taints=[taint]) for index in range(20)), node("n2", taints=[taint]))
    home.put(on("n1", "q", **PORT), claim("c"), pod("p", "c", **PORT))

    async with home.controller():
        await home.until(lambda: home.events("p"), "an event")

    assert home.events("p")[0] == (
        "DoesNotFit",
        "node n1: host port 8080/TCP of 1 wanted is taken by pods there; nodes m00, m01, m02, m03 and 17 "
        "more: the pod does not tolerate its taint "
        "example.com/reserved-for-the-team-that-paid-for-it=yes:NoSchedule",
    )
