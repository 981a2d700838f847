"""The controller in a cluster takes allocations back: when kube-scheduler cannot place the pod, and
when two writers gave one device away.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from support.cluster_home import CLASS, ClusterHome, claim, pod, slice_of
from support.cluster_home import node as cluster_node
from topobus.controller.store.kubernetes_api import KubernetesApi
from topobus.kubernetes.reading import Kind

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

UNSCHEDULABLE = [
    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes: insufficient cpu"}
]


def slowly(home: ClusterHome, **changes: float) -> None:
    """Give the controller other times."""
    cluster = msgspec.structs.replace(home.settings.cluster, **changes)
    home.settings = msgspec.structs.replace(home.settings, cluster=cluster)


async def served(home: ClusterHome, *names: str) -> None:
    """Wait until pods have their devices and no gate."""
    await home.until(lambda: not any(home.gates(name) for name in names), "open gates")


async def test_allocation_goes_elsewhere_when_the_scheduler_cannot_place_the_pod(home: ClusterHome) -> None:
    """After the stated time the devices are taken back, in two stages, and given on another node.

    The pod itself is not touched.
    """
    home.put(claim("c"), pod("p", "c"))
    async with home.controller():
        await served(home, "p")
        home.set_status("Pod", "p", conditions=UNSCHEDULABLE)
        spec = home.get("Pod", "p")["spec"]
        await home.until(lambda: home.node_of("c") == "n2" and home.users("c"), "devices elsewhere")
        assert await home.bind("p", "n2") == 201

    assert home.users("c") == ["p"]
    assert {key: value for key, value in home.get("Pod", "p")["spec"].items() if key != "nodeName"} == spec
    assert "insufficient cpu" in next(
        message for reason, message in home.events("p") if reason == "AllocationTakenBack"
    )


def allocated(home: ClusterHome) -> tuple[str, ...]:
    """The condition of pod p about its claims: status, reason, message."""
    conditions = home.get("Pod", "p").get("status", {}).get("conditions", ())
    allocated_condition = next((each for each in conditions if each["type"] == "topobus.dev/Allocated"), {})
    return tuple(str(allocated_condition.get(part, "")) for part in ("status", "reason", "message"))


def note(home: ClusterHome) -> dict[str, Any]:
    """The attempt that claim c records."""
    annotations = home.get("ResourceClaim", "c")["metadata"]["annotations"]
    recorded: dict[str, Any] = json.loads(annotations["topobus.dev/attempt"])
    return recorded


async def test_condition_has_the_schedulers_words_until_the_pod_has_a_node(home: ClusterHome) -> None:
    """Its devices stay for the stated time."""
    slowly(home, unschedulable_s=3600.0)
    home.put(claim("c"), pod("p", "c"))
    async with home.controller():
        await served(home, "p")
        home.set_status("Pod", "p", conditions=UNSCHEDULABLE)
        await home.until(lambda: allocated(home)[1] == "RefusedByScheduler", "the scheduler's words")
        condition, node = allocated(home), home.node_of("c")
        assert await home.bind("p", "n1") == 201
        await home.until(lambda: allocated(home)[1] == "Allocated", "the words gone")

    assert condition == (
        "True",
        "RefusedByScheduler",
        "its claims are allocated on node n1, and kube-scheduler has not placed it there: 0/2 nodes: insufficient "
        "cpu; unless it does within 3600 s, they are allocated elsewhere",
    )
    assert node == "n1"


async def until_all_refused(home: ClusterHome) -> None:
    """Let the pod have devices on both nodes, one after the other, and lose them there."""
    home.put(claim("c"), pod("p", "c"))
    await served(home, "p")
    for node in ("n1", "n2"):
        await home.until(lambda node=node: home.node_of("c") == node and home.users("c"), f"devices on {node}")
        home.set_status("ResourceClaim", "c", allocation=None, reservedFor=None)
    await home.until(lambda: allocated(home)[1] == "DoesNotFit", "no node that fits")


async def test_pod_that_all_nodes_refused_holds_no_device_during_its_pause(home: ClusterHome) -> None:
    """It is told so, other pods get the devices, and a replica that starts meanwhile does not begin
    again.
    """
    slowly(home, unschedulable_s=3600.0)
    async with home.controller():
        await until_all_refused(home)
    home.put(claim("all", count=2), pod("q", "all"), claim("others", count=2), pod("r", "others"))

    async with home.controller():
        await served(home, "q", "r")

    assert allocated(home)[2] == "nodes n1, n2: kube-scheduler could not place the pod there"
    assert (home.devices("c"), note(home)["refused"]) == ([], ["n1", "n2"])


async def test_pod_that_all_nodes_refused_goes_to_a_new_node_without_a_pause(home: ClusterHome) -> None:
    """The pause is only for nodes that have refused."""
    slowly(home, unschedulable_s=3600.0)
    async with home.controller():
        await until_all_refused(home)
        home.put(cluster_node("n3"), slice_of("n3", 1))
        await home.until(lambda: home.node_of("c") == "n3" and home.users("c"), "devices on the new node")


async def test_all_nodes_are_tried_again_after_a_pause_that_counts(home: ClusterHome) -> None:
    """The claim records how many rounds there were, on which the next pause depends."""
    async with home.controller():
        await until_all_refused(home)
        await home.until(lambda: home.node_of("c") == "n1" and home.users("c"), "devices again")

    assert (note(home)["rounds"], note(home).get("refused", [])) == (1, [])


async def test_reservation_comes_back_when_the_pod_was_bound_meanwhile(home: ClusterHome) -> None:
    """A binding that was under way when the reservation went wins: the pod keeps its devices."""
    slowly(home, settle_s=1.0)
    home.put(claim("c"), pod("p", "c"))
    async with home.controller():
        await served(home, "p")
        home.set_status("Pod", "p", conditions=UNSCHEDULABLE)
        await home.until(lambda: not home.users("c"), "the first stage")
        assert await home.bind("p", "n1") == 201
        await home.until(lambda: home.users("c") == ["p"], "the reservation again")

    assert home.devices("c") == ["n1-gpu-0"]


async def test_taking_back_goes_on_when_a_replica_died_between_its_stages(home: ClusterHome) -> None:
    """What a crash left without a reservation is found in that state, and taken back by the next
    replica.
    """
    slowly(home, settle_s=30.0)
    home.put(claim("c"), pod("p", "c"))
    async with home.controller():
        await served(home, "p")
        home.set_status("Pod", "p", conditions=UNSCHEDULABLE)
        await home.until(lambda: not home.users("c"), "the first stage")
    slowly(home, settle_s=0.1)

    async with home.controller():
        await home.until(lambda: home.node_of("c") == "n2" and home.users("c"), "devices elsewhere")


async def test_claim_goes_elsewhere_at_once_when_the_scheduler_took_it_back(home: ClusterHome) -> None:
    """kube-scheduler deallocates a claim whose node it cannot use.

    Ours is then allocated on another node, before the scheduler tries again.
    """
    home.put(claim("c"), pod("p", "c"))
    async with home.controller():
        await served(home, "p")
        home.set_status("ResourceClaim", "c", allocation=None, reservedFor=None)
        await home.until(lambda: home.node_of("c") == "n2" and home.users("c"), "devices elsewhere")


class BindingApi:
    """An API server's client beside which somebody binds the pod, at the very moment at which an
    intent for another node was written.
    """

    def __init__(self, api: KubernetesApi, home: ClusterHome) -> None:
        self._api = api
        self._home = home
        self.intended: list[str] = []
        self.allocated: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], *, part: str = "") -> Any:
        """Write, and bind the pod to n1 after an intent for n2."""
        allocation = (patch.get("status") or {}).get("allocation") or {}
        self.allocated += [result["pool"] for result in (allocation.get("devices") or {}).get("results", ())]
        written = await self._api.patch(kind, namespace, name, patch, part=part)
        note = json.loads((patch.get("metadata") or {}).get("annotations", {}).get("topobus.dev/attempt") or "{}")
        if note.get("node"):
            self.intended.append(note["node"])
        if note.get("node") == "n2" and self.intended.count("n2") == 1:
            assert await self._home.bind("p", "n1") == 201
        return written


async def test_pod_gets_devices_where_it_is_when_it_was_bound_elsewhere_meanwhile(home: ClusterHome) -> None:
    """A pod that somebody bound to another node than the intended one gets nothing there: the
    intent goes, and the claim is allocated on the pod's node.
    """
    home.put(claim("c"), pod("p", "c"))
    made: list[BindingApi] = []

    def wrap(api: KubernetesApi) -> Any:
        made.append(BindingApi(api, home))
        return made[0]

    async with home.controller(wrap=wrap):
        await served(home, "p")
        home.set_status("ResourceClaim", "c", allocation=None, reservedFor=None)
        await home.until(lambda: home.node_of("c") and home.users("c") == ["p"], "devices again")

    assert made[0].intended[:2] == ["n1", "n2"]
    assert set(made[0].allocated) == {"n1"}


async def test_allocation_of_the_scheduler_is_left_alone_when_it_was_faster(home: ClusterHome) -> None:
    """What kube-scheduler allocated for a pod whose gate is open is its own affair, unschedulable
    or not.
    """
    home.put(claim("c"), pod("p", "c"), claim("d"), pod("q", "d"))
    allocation_of_scheduler = {
        "devices": {"results": [{"request": "r", "driver": CLASS, "pool": "n2", "device": "n2-gpu-1"}]}
    }
    async with home.controller():
        await served(home, "p", "q")
        home.set_status("ResourceClaim", "c", allocation=None, reservedFor=None)
        await home.until(lambda: home.node_of("c") == "n2", "devices elsewhere")
        uid = home.get("Pod", "p")["metadata"]["uid"]
        home.server.remove("Pod", "p")
        home.put(pod("p2", "c", gates=()))
        home.set_status(
            "ResourceClaim",
            "c",
            allocation=allocation_of_scheduler,
            reservedFor=[{"resource": "pods", "name": "p2", "uid": uid}],
        )
        home.set_status("Pod", "p2", conditions=UNSCHEDULABLE)
        home.set_status("Pod", "q", conditions=UNSCHEDULABLE)
        await home.until(lambda: home.node_of("d") == "n2", "the other pod's devices taken back")

    assert home.devices("c") == ["n2-gpu-1"]


async def test_shared_claim_stays_when_another_pod_uses_it(home: ClusterHome) -> None:
    """Devices that another pod has reserved as well are never taken from under it."""
    home.put(claim("c"), pod("p", "c"), pod("q", "c"), claim("d"), pod("r", "d"))
    async with home.controller():
        await served(home, "p", "q", "r")
        for name in ("p", "r"):
            home.set_status("Pod", name, conditions=UNSCHEDULABLE)
        await home.until(lambda: home.node_of("d") == "n2", "the third pod's devices taken back")

    assert home.node_of("c") == "n1"
    assert sorted(home.users("c")) == ["p", "q"]


async def test_ours_gives_way_when_the_scheduler_gave_the_same_device_away(home: ClusterHome) -> None:
    """Two writers to two claims may take one device.

    Ours is taken back and allocated anew, and both claims' users are told.
    """
    home.put(claim("c"), pod("p", "c"))
    async with home.controller():
        await served(home, "p")
        home.put(claim("theirs"))
        result = {"request": "r", "driver": CLASS, "pool": "n1", "device": "n1-gpu-0"}
        home.set_status("ResourceClaim", "theirs", allocation={"devices": {"results": [result]}})
        await home.until(lambda: home.devices("c") and len(home.holders()["n1-gpu-0"]) == 1, "one holder")
        await home.until(lambda: home.users("c"), "a reservation")

    assert home.devices("theirs") == ["n1-gpu-0"]
    assert "DoubleAllocation" in {reason for reason, _ in home.events("theirs")}


async def test_ours_stays_when_its_pod_runs_already(home: ClusterHome) -> None:
    """A pod that is bound keeps its claim whatever else was allocated.

    The node lets only one of the two prepare.
    """
    home.put(claim("c"), pod("p", "c"))
    async with home.controller():
        await served(home, "p")
        await home.bind("p", "n1")
        home.put(claim("theirs"))
        result = {"request": "r", "driver": CLASS, "pool": "n1", "device": "n1-gpu-0"}
        home.set_status("ResourceClaim", "theirs", allocation={"devices": {"results": [result]}})
        await home.until(lambda: home.events("theirs") and home.events("c"), "events")

    assert home.holders()["n1-gpu-0"] == ["c", "theirs"]
    assert home.users("c") == ["p"]


async def test_same_node_is_tried_again_when_no_other_is_left(home: ClusterHome) -> None:
    """A pod that fits on one node only gets its devices there again: what kept the scheduler away
    may go.
    """
    home.server.remove("Node", "n2")
    home.put(claim("c"), pod("p", "c"))
    async with home.controller():
        await served(home, "p")
        home.set_status("Pod", "p", conditions=UNSCHEDULABLE)
        await home.until(lambda: not home.devices("c"), "devices taken back")
        await home.until(lambda: home.devices("c") == ["n1-gpu-0"] and home.users("c"), "the same devices again")


async def test_pod_gets_devices_on_its_node_when_it_was_bound_after_they_were_taken_back(home: ClusterHome) -> None:
    """A binding that overtakes even the second stage leaves no pod without devices: they are
    allocated anew where it is.
    """
    home.put(claim("c"), pod("p", "c"))
    async with home.controller():
        await served(home, "p")
    await home.bind("p", "n1")
    home.set_status("ResourceClaim", "c", allocation=None, reservedFor=None)

    async with home.controller():
        await home.until(lambda: home.users("c") == ["p"], "devices again")

    assert home.node_of("c") == "n1"
