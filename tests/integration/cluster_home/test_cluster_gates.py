"""The controller in a cluster: pods behind the gate get their claims allocated, reserved, and their
gate opened, or are told why not.
"""

from __future__ import annotations

import msgspec
import pytest

from support.cluster_home import CLASS, GATE, ClusterHome, claim, device_class, node, pod, slice_of, template
from support.older_server import older_server

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]


async def test_gated_pod_gets_its_claim_and_its_gate_opened(home: ClusterHome) -> None:
    """Finalizer, allocation with the node's selector, reservation, and only then the gate.

    Each write under our name.
    """
    home.put(claim("c"), pod("p", "c"))

    async with home.controller():
        await home.until(lambda: not home.gates("p"), "an open gate")

    stored = home.get("ResourceClaim", "c")
    assert home.devices("c") == ["n1-gpu-0"]
    assert home.node_of("c") == "n1"
    assert home.users("c") == ["p"]
    assert stored["metadata"]["finalizers"] == ["resource.kubernetes.io/delete-protection"]
    writes = [(request.method, request.path.rpartition("/")[2]) for request in home.server.requests if request.is_write]
    assert writes == [("PATCH", "c"), ("PATCH", "status"), ("PATCH", "p")]
    assert {request.query.get("fieldManager") for request in home.server.requests if request.is_write} == {
        "topobus-controller"
    }


async def test_gate_opens_at_once_when_the_pod_has_no_claims(home: ClusterHome) -> None:
    """There is nothing to wait for; others' gates stay."""
    home.put(pod("p", gates=("example.com/quota", GATE)))

    async with home.controller():
        await home.until(lambda: home.gates("p") == ["example.com/quota"], "our gate gone")


async def test_template_claims_are_allocated_when_the_cluster_has_made_them(home: ClusterHome) -> None:
    """The controller waits for the cluster's own resourceclaim controller, and says so.

    It makes no claim itself.
    """
    home.put(template("pair", count=2), pod("p", templates=("pair",)))

    async with home.controller():
        await home.until(lambda: home.events("p"), "an event")
        assert home.server.objects("ResourceClaim") == []
        (name,) = home.server.generate_claims()
        await home.until(lambda: not home.gates("p"), "an open gate")

    assert home.events("p")[0][0] == "WaitingForClaims"
    assert home.devices(name) == ["n1-gpu-0", "n1-gpu-1"]
    assert home.users(name) == ["p"]


async def test_template_claims_are_made_here_when_the_cluster_has_nobody_for_it(home: ClusterHome) -> None:
    """With `housekeeping: own` claims are made as kube-controller-manager makes them, and go with
    their pod.
    """
    cluster = msgspec.structs.replace(home.settings.cluster, housekeeping="own")
    home.put(template("pair", count=2), pod("p", templates=("pair",)))

    async with home.controller(settings=msgspec.structs.replace(home.settings, cluster=cluster)):
        await home.until(lambda: not home.gates("p"), "an open gate")
        (made,) = home.server.objects("ResourceClaim")
        await home.bind("p", "n1")
        home.set_status("Pod", "p", phase="Succeeded")
        await home.until(lambda: not home.server.objects("ResourceClaim"), "no claim")

    assert made["metadata"]["annotations"]["resource.kubernetes.io/pod-claim-name"] == "t0"
    assert [
        (owner_reference["kind"], owner_reference["name"], owner_reference["controller"])
        for owner_reference in made["metadata"]["ownerReferences"]
    ] == [("Pod", "p", True)]


async def test_pod_is_told_why_when_nothing_fits(home: ClusterHome) -> None:
    """An event of the pod and of its claim, and a condition of the pod, say what each node lacks.

    When something becomes free, the pod goes on.
    """
    home.put(claim("all", count=2), pod("first", "all"), claim("big", count=3), pod("second", "big"))

    async with home.controller():
        await home.until(lambda: home.events("big") and home.events("second"), "events")
        conditions = home.get("Pod", "second")["status"]["conditions"]
        home.put(slice_of("n2", 3))
        await home.until(lambda: not home.gates("second"), "an open gate")

    reason, message = home.events("second")[0]
    assert reason == "DoesNotFit"
    assert "node n1: request r wants 3 devices" in message or "wants 3 devices of class gpu.example.com" in message
    assert home.events("big")[0] == (reason, message)
    assert [(condition["type"], condition["status"], condition["reason"]) for condition in conditions] == [
        ("topobus.dev/Allocated", "False", "DoesNotFit")
    ]
    assert home.node_of("big") == "n2"


async def test_event_is_told_once_when_nothing_changes(home: ClusterHome) -> None:
    """Looking again at what still does not fit writes nothing."""
    home.put(claim("big", count=9), pod("p", "big"))

    async with home.controller():
        await home.until(lambda: home.events("p"), "an event")
        home.put(node("n3"), slice_of("n3", 1))
        await home.until(lambda: len(home.events("big")) == 2, "the third node's word")
        writes = len([request for request in home.server.requests if request.is_write])
        home.put(pod("other"))
        await home.until(lambda: not home.gates("other"), "another pod served meanwhile")

    assert len([request for request in home.server.requests if request.is_write]) == writes + 1


async def test_claims_of_one_pod_go_to_one_node_together(home: ClusterHome) -> None:
    """Two claims that fit each alone on the first node, but only together on the second, are
    allocated on the second.
    """
    home.put(claim("held"), pod("holder", "held"))
    async with home.controller():
        await home.until(lambda: not home.gates("holder"), "the first pod served")
        home.put(claim("a"), claim("b"), pod("p", "a", "b"))
        await home.until(lambda: not home.gates("p"), "an open gate")

    assert home.devices("a") + home.devices("b") == ["n2-gpu-0", "n2-gpu-1"]


@pytest.mark.parametrize(
    ("fields", "at_node", "expected"),
    [
        ({"nodeSelector": {"zone": "b"}}, {}, "n2"),
        ({"tolerations": []}, {"taints": [{"key": "infra", "effect": "NoSchedule"}]}, "n2"),
        (
            {"tolerations": [{"key": "infra", "operator": "Exists"}]},
            {"taints": [{"key": "infra", "effect": "NoSchedule"}]},
            "n1",
        ),
        ({}, {"unschedulable": True}, "n2"),
        (
            {
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {
                            "nodeSelectorTerms": [
                                {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]}
                            ]
                        }
                    }
                }
            },
            {},
            "n2",
        ),
    ],
    ids=["node-selector", "taint", "tolerated-taint", "unschedulable", "required-affinity"],
)
async def test_allocation_goes_where_the_scheduler_lets_the_pod(
    home: ClusterHome, fields: dict, at_node: dict, expected: str
) -> None:  # type: ignore[type-arg]
    """Labels, taints, marks and affinity of nodes are looked at before devices, so that the pod can
    run where its devices are.
    """
    home.put(node("n1", **at_node), node("n2", labels={"zone": "b"}), claim("c"), pod("p", "c", **fields))

    async with home.controller():
        await home.until(lambda: not home.gates("p"), "an open gate")

    assert home.node_of("c") == expected


async def test_claims_of_other_pods_are_left_alone_and_counted(home: ClusterHome) -> None:
    """A pod without the gate is kube-scheduler's; what that allocated is taken."""
    home.put(claim("theirs"), pod("plain", "theirs", gates=()), claim("mine"), pod("p", "mine"))
    result = {"request": "r", "driver": CLASS, "pool": "n1", "device": "n1-gpu-0"}
    home.set_status("ResourceClaim", "theirs", allocation={"devices": {"results": [result]}})

    async with home.controller():
        await home.until(lambda: not home.gates("p"), "an open gate")

    assert home.devices("mine") == ["n1-gpu-1"]
    assert [request.path for request in home.server.requests if request.is_write and "theirs" in request.path] == []


async def test_shared_claim_is_reserved_for_both_pods(home: ClusterHome) -> None:
    """Two gated pods that use one claim get it allocated once and reserved twice."""
    home.put(claim("c"), pod("p", "c"), pod("q", "c"))

    async with home.controller():
        await home.until(lambda: not home.gates("p") and not home.gates("q"), "open gates")

    assert home.devices("c") == ["n1-gpu-0"]
    assert sorted(home.users("c")) == ["p", "q"]


async def test_reserved_devices_are_taken_only_here(home: ClusterHome) -> None:
    """The taint `topobus.dev/allocation:NoSchedule` keeps kube-scheduler away from devices.

    Claims of gated pods get them.
    """
    home.put(
        slice_of("n1", 1, taints=[{"key": "topobus.dev/allocation", "effect": "NoSchedule"}]), claim("c"), pod("p", "c")
    )
    home.put(slice_of("n2", 1, taints=[{"key": "example.com/broken", "effect": "NoSchedule"}]))

    async with home.controller():
        await home.until(lambda: not home.gates("p"), "an open gate")

    assert home.devices("c") == ["n1-gpu-0"]


async def test_device_taint_rule_closes_devices(home: ClusterHome) -> None:
    """A rule's taint counts as one of the devices that it selects.

    When the rule goes, they are free again.
    """
    taint = {"key": "example.com/broken", "effect": "NoSchedule"}
    rule = {
        "kind": "DeviceTaintRule",
        "metadata": {"name": "r"},
        "spec": {"deviceSelector": {"driver": CLASS}, "taint": taint},
    }
    home.put(rule, claim("c"), pod("p", "c"))

    async with home.controller():
        await home.until(lambda: home.events("p"), "an event")
        home.server.remove("DeviceTaintRule", "r")
        await home.until(lambda: not home.gates("p"), "an open gate")

    assert "example.com/broken" in home.events("p")[0][1]


async def test_malformed_objects_take_nobody_down(home: ClusterHome) -> None:
    """Classes, slices, pods and claims that nobody can read count as absent, each for itself."""
    home.put(
        device_class("odd"), claim("c"), pod("p", "c"), pod("strange", "c", gates=(GATE,), resourceClaims="all of them")
    )

    async with home.controller():
        await home.until(lambda: not home.gates("p"), "an open gate")
        home.put(pod("strange2", "c", nodeSelector=["zone"]))
        home.put(claim("d"), pod("q", "d"))
        await home.until(lambda: not home.gates("q"), "another open gate")

    assert home.gates("strange2") == [GATE]


async def test_node_on_which_others_would_have_to_go_is_tried_last(home: ClusterHome) -> None:
    """A node that is full of CPU requests of lower priority is avoided while another will do, and
    used when none does: kube-scheduler preempts.
    """
    full = {"name": "main", "image": "x", "resources": {"requests": {"cpu": "4"}}}
    home.put(node("n1") | {"status": {"allocatable": {"cpu": "4", "pods": "10"}}})
    home.put({"kind": "Pod", "metadata": {"name": "web"}, "spec": {"nodeName": "n1", "containers": [full]}})
    home.put(claim("a"), pod("p", "a", containers=[full], priority=1), claim("b", count=2))
    async with home.controller():
        await home.until(lambda: not home.gates("p"), "an open gate")
        home.put(pod("q", "b", containers=[full], priority=1))
        await home.until(lambda: not home.gates("q"), "another open gate")

    assert home.node_of("a") == "n2"
    assert home.node_of("b") == "n1"


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
async def test_gated_pods_are_served_when_the_server_has_a_beta_version_only(home: ClusterHome, version: str) -> None:
    """Kubernetes 1.32 and 1.33: claims, templates and slices in their shape, read, made and
    allocated.
    """
    home.put(claim("c"), pod("p", "c", templates=("one",)), template("one"))
    async with older_server(home.server.url, version, token="secret") as older:
        home.kubeconfig.write_bytes(home.kubeconfig.read_bytes().replace(home.server.url.encode(), older.url.encode()))
        cluster = msgspec.structs.replace(home.settings.cluster, housekeeping="own")
        async with home.controller(settings=msgspec.structs.replace(home.settings, cluster=cluster)):
            await home.until(lambda: not home.gates("p"), "an open gate")
        served = {path.split("/")[3].partition("?")[0] for path in older.asked if "resourceclaims" in path}

    assert served == {version}
    assert sorted(home.holders()) == ["n1-gpu-0", "n1-gpu-1"]


async def test_claim_with_very_long_configuration_is_allocated_with_all_of_it(home: ClusterHome) -> None:
    """What is too long for a note in the claim is worked out again when the status is written:
    every configuration is there.
    """
    long = claim("c")
    entries = [{"opaque": {"driver": CLASS, "parameters": {"n": index, "text": "x" * 9000}}} for index in range(30)]
    long["spec"]["devices"]["config"] = entries
    home.put(long, pod("p", "c"))
    async with home.controller():
        await home.until(lambda: not home.gates("p"), "an open gate")

    stored = home.get("ResourceClaim", "c")
    assert [entry["opaque"] for entry in stored["status"]["allocation"]["devices"]["config"]] == [
        entry["opaque"] for entry in entries
    ]
    assert len(stored["metadata"]["annotations"]["topobus.dev/attempt"]) < 4096


async def test_controller_goes_on_when_it_cannot_write_what_is_wrong(home: ClusterHome) -> None:
    """A pod whose claim is malformed, and whose condition cannot be written either, is told later
    and takes nobody down.
    """
    wish = {
        "driver": "topobus.dev",
        "parameters": {"apiVersion": "topobus.dev/v1", "kind": "AlignmentParameters", "locality": "hard:swich"},
    }
    wrong = claim("c")
    wrong["spec"]["devices"]["config"] = [{"opaque": wish}]
    home.server.refuse("PATCH", "pods", code=403, reason="Forbidden", times=1)
    home.put(wrong, pod("p", "c"))

    async with home.controller():
        await home.until(lambda: any("swich" in message for _, message in home.events("p")), "the word on the claim")
        home.put(claim("d"), pod("q", "d"))
        await home.until(lambda: not home.gates("q"), "an open gate")
