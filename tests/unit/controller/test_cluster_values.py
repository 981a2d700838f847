"""A cluster's objects as values: what is kept of them, what their nodes say about pods, and the
patches that allocate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from topobus.controller.state.cluster.api_server_state import ApiServerState
from topobus.controller.state.cluster_objects import downgraded_claim, read_object
from topobus.controller.store.api_server_store import bound_patch
from topobus.engine.allocation.values import DeviceId
from topobus.engine.claims.attempts import Attempt, with_attempt, without_attempt
from topobus.engine.claims.gate import has_gate, is_over, version_of, with_allocated_condition, without_gate
from topobus.engine.claims.lifecycle import with_allocation, without_result
from topobus.engine.claims.reservations import PodRef, with_bound_allocation, with_reservation
from topobus.engine.scheduling.node_fit import (
    node_facts,
    preference_of,
    read_placing,
    why_not,
)
from topobus.formats.kubernetes.merge_patch import merged
from topobus.formats.kubernetes.resource import (
    AllocationResult,
    ClaimSpec,
    DevicesAllocated,
    GrantedDevice,
    SliceSpec,
)
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.device import Device, Inventory
from topobus.values.errors import ContractError, InvariantError
from topobus.values.outcome import Reason

POD = PodRef("default", "p", "uid-p")
NOW = "2026-01-01T00:00:00Z"


def read(kind: str, version: str = "v1", **plain: Any) -> ApiObject:
    """Read an object as an informer does; metadata may be left out."""
    api_object = read_object(
        kind, version, {"metadata": {"name": "x", "namespace": "default", "uid": "u", "resourceVersion": "7"}, **plain}
    )
    assert api_object is not None
    return api_object


def granted(device: str, **fields: Any) -> GrantedDevice:
    """One device of an allocation."""
    return GrantedDevice(request="r", driver="gpu.example.com", pool="n1", device=device, **fields)


def allocation(*devices: str) -> AllocationResult:
    """An allocation of whole devices."""
    return AllocationResult(devices=DevicesAllocated(results=tuple(granted(device) for device in devices)))


def plain_claim(
    name: str, version: int, *, devices: tuple[str, ...] = (), note: Attempt | None = None
) -> dict[str, Any]:
    """A claim as the server shows it: allocated, intended, both or neither."""
    plain: dict[str, Any] = {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}", "resourceVersion": str(version)},
        "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu"}}]}},
    }
    if note is not None:
        plain = patched(plain, lambda claim: with_attempt(claim, note))
        plain["metadata"]["resourceVersion"] = str(version)
    if devices:
        plain = patched(plain, lambda claim: with_bound_allocation(claim, allocation(*devices), POD, now=NOW))
        plain["metadata"]["resourceVersion"] = str(version)
    return plain


def patched(plain: dict[str, Any], change: Callable[[ApiObject], ApiObject | Reason]) -> dict[str, Any]:
    """Write a claim's next version as the store does: the difference, to
    the status or to all else.
    """
    claim = read_again("ResourceClaim", plain)
    value = change(claim)
    assert isinstance(value, ApiObject)
    return merged(plain, bound_patch(claim, value))


def read_again(kind: str, plain: dict[str, Any]) -> ApiObject:
    """Read a plain object."""
    api_object = read_object(kind, "v1", plain)
    assert api_object is not None
    return api_object


def note(number: int = 1, *devices: str, pod: str = "uid-p") -> Attempt:
    """A note in a claim."""
    return Attempt(number=number, node="n1", allocation=allocation(*(devices or ("d0",))), pod=pod)


def test_claim_of_v1beta1_reads_as_one_of_v1() -> None:
    """What v1beta1 writes beside a request's name stands under `exactly`.

    Alternatives stay as they are.
    """
    flat = {"name": "r", "deviceClassName": "gpu", "count": 2, "allocationMode": "ExactCount"}
    first = {"name": "s", "firstAvailable": [{"name": "a", "deviceClassName": "gpu"}]}
    claim = read("ResourceClaim", "v1beta1", spec={"devices": {"requests": [flat, first]}})
    spec = read_as(claim.spec, ClaimSpec, where="test")

    assert spec.devices.requests[0].exactly is not None
    assert (spec.devices.requests[0].exactly.device_class_name, spec.devices.requests[0].exactly.count) == ("gpu", 2)
    assert spec.devices.requests[1].first_available[0].device_class_name == "gpu"
    assert claim.api_version == "resource.k8s.io/v1"


def test_template_of_v1beta1_reads_as_one_of_v1() -> None:
    """A template's claim is brought up to v1, too."""
    api_object = read(
        "ResourceClaimTemplate",
        "v1beta1",
        spec={"spec": {"devices": {"requests": [{"name": "r", "deviceClassName": "gpu"}]}}},
    )

    assert api_object.spec["spec"]["devices"]["requests"] == [{"name": "r", "exactly": {"deviceClassName": "gpu"}}]


def test_slice_of_v1beta1_reads_as_one_of_v1() -> None:
    """What v1beta1 writes under `basic` stands beside a device's name."""
    device = {
        "name": "d",
        "basic": {"attributes": {"model": {"string": "x"}}, "capacity": {"memory": {"value": "1Gi"}}},
    }
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
    resource_slice = read(
        "ResourceSlice", "v1beta1", spec={"driver": "a.b", "nodeName": "n1", "pool": pool, "devices": [device]}
    )
    spec = read_as(resource_slice.spec, SliceSpec, where="test")

    assert spec.devices[0].attributes["model"].string == "x"
    assert spec.devices[0].capacity["memory"].value == "1Gi"


def test_pod_is_not_kept_when_it_has_neither_claims_nor_gates() -> None:
    """Most pods of a cluster are none of our business."""
    assert read_object("Pod", "v1", {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c"}]}}) is None


def test_pod_is_kept_without_what_nobody_reads() -> None:
    """Volumes and environment of a pod that matters are not kept, of its containers only what they
    ask for, and once it is bound not even that.
    """
    affinity = {"podAffinity": {"a": 1}, "nodeAffinity": {"b": 1}, "other": {}}
    spec = {
        "containers": [{"name": "c", "env": [1]}],
        "volumes": [1],
        "resourceClaims": [{"name": "a"}],
        "affinity": affinity,
    }
    pod = read("Pod", spec=spec, status={"phase": "Pending", "podIPs": []})

    bound = read("Pod", spec={**spec, "nodeName": "n1"})

    assert sorted(pod.spec) == ["affinity", "containers", "resourceClaims"]
    assert pod.spec["containers"] == [{"name": "c"}]
    assert sorted(bound.spec) == ["affinity", "nodeName", "resourceClaims"]
    assert pod.spec["affinity"] == {"nodeAffinity": {"b": 1}}
    assert bound.spec["affinity"] == {"nodeAffinity": {"b": 1}}
    assert pod.status == {"phase": "Pending"}


@pytest.mark.parametrize(
    "plain", [{}, {"metadata": []}, {"metadata": {"name": 7}}, {"metadata": {"name": "x"}, "spec": "none"}]
)
def test_object_is_refused_when_nobody_can_read_it(plain: dict[str, Any]) -> None:
    """Garbage is a ContractError and nothing worse."""
    with pytest.raises(ContractError):
        read_object("ResourceClaim", "v1", plain)


def test_pod_is_over_when_it_ended_or_is_deleted_before_it_had_a_node() -> None:
    """A pod that is being ended on its node still uses its claims."""
    spec = {"schedulingGates": [{"name": "topobus.dev/allocation"}]}
    deleted = {"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"}

    assert has_gate(read("Pod", spec=spec))
    assert not is_over(read("Pod", spec=spec))
    assert is_over(read("Pod", spec=spec, status={"phase": "Failed"}))
    assert is_over(read("Pod", spec=spec, metadata=deleted))
    assert not is_over(read("Pod", spec={**spec, "nodeName": "n1"}, metadata=deleted))


TERM = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}


def required(*terms: Any) -> dict[str, Any]:
    """A pod with a required node affinity."""
    return {
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
        }
    }


@pytest.mark.parametrize(
    ("spec", "labels", "node_spec", "code"),
    [
        ({}, {}, {}, ""),
        ({"nodeName": "other"}, {}, {}, "node-name"),
        ({"nodeSelector": {"zone": "a"}}, {"zone": "a"}, {}, ""),
        ({"nodeSelector": {"zone": "a"}}, {"zone": "b"}, {}, "node-selector-label"),
        ({}, {}, {"unschedulable": True}, "node-tainted"),
        (
            {"tolerations": [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]},
            {},
            {"unschedulable": True},
            "",
        ),
        ({}, {}, {"taints": [{"key": "k", "value": "v", "effect": "PreferNoSchedule"}]}, ""),
        ({}, {}, {"taints": [{"key": "k", "value": "v", "effect": "NoExecute"}]}, "node-tainted"),
        ({"tolerations": [{"operator": "Exists"}]}, {}, {"taints": [{"key": "k", "effect": "NoExecute"}]}, ""),
        (
            {"tolerations": [{"key": "k", "value": "w"}]},
            {},
            {"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]},
            "node-tainted",
        ),
        (required(TERM), {"zone": "b"}, {}, ""),
        (required(TERM), {"zone": "c"}, {}, "node-affinity"),
        (required({}), {}, {}, "node-affinity"),
        (required({}, TERM), {"zone": "a"}, {}, ""),
        (required({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["x"]}]}), {}, {}, ""),
        (
            required({"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["x"]}]}),
            {},
            {},
            "node-affinity",
        ),
        (required({"matchExpressions": [{"key": "gpus", "operator": "Gt", "values": ["3"]}]}), {"gpus": "4"}, {}, ""),
        (
            required({"matchExpressions": [{"key": "gpus", "operator": "Lt", "values": ["3"]}]}),
            {"gpus": "x"},
            {},
            "node-affinity",
        ),
        (
            required({"matchExpressions": [{"key": "gpus", "operator": "Near", "values": ["3"]}]}),
            {"gpus": "3"},
            {},
            "node-affinity",
        ),
        (required({"matchExpressions": [{"key": "zone", "operator": "DoesNotExist"}]}), {}, {}, ""),
    ],
)
def test_node_lets_a_pod_in_as_kube_scheduler_would(
    spec: dict[str, Any], labels: dict[str, str], node_spec: dict[str, Any], code: str
) -> None:
    """Name, taints, marks, labels and required affinity, each by the scheduler's own rules."""
    facts = node_facts(read("Node", metadata={"name": "x", "labels": labels}, spec=node_spec))
    reason = why_not(read_placing(read("Pod", spec={"schedulingGates": [{"name": "g"}], **spec})), facts)

    assert (reason.code if reason is not None else "") == code
    assert reason is None or "None" not in reason.message


def test_preferred_affinity_adds_up_weights() -> None:
    """Each preferred term that a node matches counts with its weight; an empty one matches all."""
    terms = [{"weight": 5, "preference": TERM}, {"weight": 2, "preference": {}}]
    spec = {
        "schedulingGates": [1],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms}},
    }
    placing = read_placing(read("Pod", spec=spec))

    assert [
        preference_of(placing, node_facts(read("Node", metadata={"name": "x", "labels": labels}, spec={})).node)
        for labels in ({"zone": "a"}, {"zone": "c"})
    ] == [7, 2]


def test_patches_allocate_and_take_back_without_a_trace() -> None:
    """Intent, allocation, deallocation and withdrawal leave the claim as it was, but for the count
    of attempts.

    Each is bound to the version it was made on.
    """
    first = plain_claim("c", 7)
    intended = patched(first, lambda claim: with_attempt(claim, note()))
    allocated = patched(intended, lambda claim: with_bound_allocation(claim, allocation("d0"), POD, now=NOW))
    allocated["status"]["devices"] = [{"driver": "gpu.example.com", "pool": "n1", "device": "d0"}]
    cleared = without_result(read_again("ResourceClaim", allocated))
    patch = bound_patch(read_again("ResourceClaim", allocated), cleared)
    freed = merged(allocated, patch)
    del freed["status"]["devices"]  # as the server does
    last = patched(freed, without_attempt)

    assert patch == {
        "metadata": {"uid": "uid-c", "resourceVersion": "7"},
        "status": {"allocation": None, "reservedFor": None},
    }
    assert intended["metadata"]["finalizers"] == ["resource.kubernetes.io/delete-protection"]
    assert allocated["status"]["reservedFor"] == [{"resource": "pods", "name": "p", "uid": "uid-p"}]
    assert allocated["status"]["allocation"]["allocationTimestamp"] == "2026-01-01T00:00:00Z"
    assert freed["status"] == {}
    assert last == {
        **first,
        "metadata": {**first["metadata"], "annotations": {"topobus.dev/attempts": "1"}},
        "status": {},
    }


def test_write_is_refused_when_it_changes_the_status_and_something_else() -> None:
    """An API server changes the one or the other; half of a write would look like a crash."""
    claim = read_again("ResourceClaim", plain_claim("c", 7))

    with pytest.raises(InvariantError, match="status or the rest"):
        bound_patch(claim, with_allocation(with_attempt(claim, note()), allocation("d0"), now=NOW))


def test_claim_is_full_for_an_allocation_as_it_is_for_a_reservation() -> None:
    """User 257 is refused with the same reason; who is among the 256 is not refused."""
    full = plain_claim("c", 7)
    full["status"] = {
        "reservedFor": [{"resource": "pods", "name": f"p{index}", "uid": f"u{index}"} for index in range(256)]
    }
    stored = read_again("ResourceClaim", full)
    among = PodRef("default", "p7", "u7")

    assert isinstance(with_reservation(stored, POD), Reason)
    assert with_bound_allocation(stored, allocation("d0"), POD, now=NOW) == with_reservation(stored, POD)
    assert with_reservation(stored, among) is stored


def test_gate_patch_leaves_the_gates_of_others() -> None:
    """Only our gate goes."""
    spec = {"schedulingGates": [{"name": "a"}, {"name": "topobus.dev/allocation"}, {"name": "b"}]}

    pod = read("Pod", spec=spec)

    assert bound_patch(pod, without_gate(pod))["spec"] == {"schedulingGates": [{"name": "a"}, {"name": "b"}]}


def test_condition_is_not_written_again_when_it_says_the_same() -> None:
    """The same words are no news; another status moves the time, another message does not."""
    plain = {
        "metadata": {"name": "p", "uid": "u", "resourceVersion": "1", "generation": 3},
        "spec": {"schedulingGates": [{"name": "g"}]},
        "status": {},
    }
    pod = read_again("Pod", plain)
    first = with_allocated_condition(pod, is_true=False, reason="DoesNotFit", message="n" * 2000, now="t1")
    again = with_allocated_condition(first, is_true=False, reason="DoesNotFit", message="n" * 2000, now="t2")
    other = with_allocated_condition(first, is_true=False, reason="DoesNotFit", message="still not", now="t2")

    (condition,) = first.status["conditions"]
    assert sorted(condition) == ["lastTransitionTime", "message", "reason", "status", "type"]
    assert len(condition["message"]) == 1024
    assert again is first
    assert other.status["conditions"][0]["lastTransitionTime"] == "t1"


def test_world_counts_intents_and_allocations_as_taken() -> None:
    """A device that is about to be somebody's is nobody else's.

    Late news of an older version changes nothing.
    """
    state = ApiServerState()
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.example.com", "nodeName": "n1", "pool": pool, "devices": [{"name": "d0"}, {"name": "d1"}]}
    state.put("Node", "v1", {"metadata": {"name": "n1", "resourceVersion": "1"}})
    state.put("ResourceSlice", "v1", {"metadata": {"name": "s", "resourceVersion": "2"}, "spec": spec})
    state.put("ResourceClaim", "v1", plain_claim("a", 3, note=note(1, "d0")))
    state.put("ResourceClaim", "v1", plain_claim("b", 4, devices=("d1",)))
    state.put("ResourceClaim", "v1", plain_claim("a", 2))

    taken = state.stock.usage_for("n1", [], {}).holders
    assert sorted(device_id.device for device_id in taken) == ["d0", "d1"]
    assert state.gated_pods.later_intents(2) == {"uid-a"}
    assert state.gated_pods.later_intents(3) == frozenset()


def test_world_tells_a_note_from_an_intent_when_the_allocation_was_taken_back() -> None:
    """After somebody took an allocation back the note counts until it is withdrawn, for another
    replica may act on it.

    The node is to be told.
    """
    state = ApiServerState()
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.example.com", "nodeName": "n1", "pool": pool, "devices": [{"name": "d0"}]}
    state.put("Node", "v1", {"metadata": {"name": "n1", "resourceVersion": "1"}})
    state.put("ResourceSlice", "v1", {"metadata": {"name": "s", "resourceVersion": "2"}, "spec": spec})
    state.put("ResourceClaim", "v1", plain_claim("a", 3, note=note(1, "d0"), devices=("d0",)))
    state.put("ResourceClaim", "v1", plain_claim("a", 4, note=note(1, "d0")))

    assert state.is_taken_back(("default", "a"))
    assert [device_id.device for device_id in state.stock.usage_for("n1", [], {}).holders] == ["d0"]
    state.put("ResourceClaim", "v1", plain_claim("a", 5))
    assert state.stock.usage_for("n1", [], {}).holders == {}
    assert list(state.unreleased) == [("default", "a")]


def test_world_finds_devices_that_two_claims_have() -> None:
    """Two claims with one whole device are a double allocation.

    A share or an administrator's look is none.
    """
    state = ApiServerState()
    state.put("ResourceClaim", "v1", plain_claim("a", 3, devices=("d0", "d1")))
    state.put("ResourceClaim", "v1", plain_claim("b", 4, devices=("d1",)))
    looking = plain_claim("c", 5, devices=("d0",))
    looking["status"]["allocation"]["devices"]["results"][0]["adminAccess"] = True
    state.put("ResourceClaim", "v1", looking)

    assert state.doubles() == ((DeviceId("gpu.example.com", "n1", "d1"), (("default", "a"), ("default", "b"))),)
    state.drop("ResourceClaim", ("default", "b"))
    assert state.doubles() == ()


def test_world_finds_a_device_that_one_claim_has_as_part_of_a_shape() -> None:
    """kube-scheduler and our controller may allocate a shape and one of its parts at one moment."""
    state = ApiServerState()
    counters = {"gpu-0": {"value": "16"}, "nic-0": {"value": "16"}}
    uses = [{"counterSet": "shape-0", "counters": counters}]
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "topobus.dev", "pool": pool, "nodeName": "n1"}
    for device_class in ("gpu", "nic"):
        devices = (Device(name=f"{device_class}-0", device_class=device_class),)
        state.put_inventory(Inventory(node="n1", device_class=device_class, generation=1, devices=devices))
    owner = {"kind": "Node", "name": "n1", "uid": "u", "apiVersion": "v1"}
    plain = {"metadata": {"name": "s", "ownerReferences": [owner]}, "spec": spec}
    spec["devices"] = [{"name": "shape-half-0", "consumesCounters": uses}]
    state.put("ResourceSlice", "v1", plain)
    for name, device in (("a", "shape-half-0"), ("b", "gpu-0")):
        claim = plain_claim(name, 3, devices=(device,))
        claim["status"]["allocation"]["devices"]["results"][0]["driver"] = "topobus.dev"
        state.put("ResourceClaim", "v1", claim)

    assert state.doubles() == ((DeviceId("topobus.dev", "n1", "gpu-0"), (("default", "a"), ("default", "b"))),)


def test_version_reads_as_a_number() -> None:
    """What is no number is the oldest of all."""
    assert [version_of(read("Node", metadata={"name": "n", "resourceVersion": text})) for text in ("12", "x")] == [
        12,
        0,
    ]


def test_claim_spec_is_written_as_an_older_server_reads_it() -> None:
    """What is read from v1beta1 and written there again is the same."""
    flat = {"devices": {"requests": [{"name": "r", "deviceClassName": "gpu"}], "constraints": []}}
    claim = read("ResourceClaim", "v1beta1", spec=flat)

    assert downgraded_claim(claim.spec, "v1beta1") == flat
    assert downgraded_claim(claim.spec, "v1") == claim.spec
