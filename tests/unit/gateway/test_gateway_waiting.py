"""Pods that wait for claims: what is read of them, what is withheld for them, what stands in their
way, and when kubelet looks again.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from topobus.formats.messages.messages import ApiObject
from topobus.gateway.claims.rules.claim_allocation import allocation_of
from topobus.gateway.cluster.rules.waiting import (
    NodePod,
    PodWait,
    WaitingClaim,
    due_at,
    in_the_way,
    obstacle_of,
    pod_of,
    waiting_claim,
    withheld_devices,
)
from topobus.values.device import Device, Inventory
from topobus.values.health import DeviceHealth, HealthState
from topobus.values.request import Owner, OwnerKind

NODE = "n1"
PLUGIN = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid="hash")
TOLERATES = {"key": "topobus.dev/health", "operator": "Exists"}


def _pod(spec: dict[str, Any] | None = None, status: dict[str, Any] | None = None, **metadata: Any) -> ApiObject:
    return ApiObject(
        api_version="v1",
        kind="Pod",
        metadata={"name": "p", "namespace": "default", "uid": "u-p", **metadata},
        spec={"resourceClaims": [{"name": "own", "resourceClaimName": "c"}]} if spec is None else spec,
        status=status or {},
    )


def _claim(*devices: str, uid: str = "u-c", **more: Any) -> ApiObject:
    results = [{"request": "gpu", "driver": "topobus.dev", "pool": NODE, "device": name, **more} for name in devices]
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": "c", "namespace": "default", "uid": uid},
        status={"allocation": {"devices": {"results": results}}} if devices else {},
    )


def _waiting(*devices: str, **more: Any) -> WaitingClaim:
    claim = waiting_claim(_claim(*devices, **more), NODE)
    assert claim is not None
    return claim


def _inventory(state: HealthState = HealthState.HEALTHY) -> dict[str, Inventory]:
    devices = tuple(
        Device(name=f"gpu-{number}", device_class="gpu", health=DeviceHealth(state=state)) for number in range(2)
    )
    return {"gpu": Inventory(node=NODE, device_class="gpu", generation=1, devices=devices)}


@pytest.mark.parametrize(
    ("pod", "claims"),
    [
        (_pod(), ("c",)),
        (_pod({"resourceClaims": [{"name": "made", "resourceClaimTemplateName": "t"}]}), None),
        (
            _pod(
                {"resourceClaims": [{"name": "made", "resourceClaimTemplateName": "t"}]},
                {"resourceClaimStatuses": [{"name": "made", "resourceClaimName": "p-made-x"}]},
            ),
            ("p-made-x",),
        ),
        (_pod({}, {"extendedResourceClaimStatus": {"resourceClaimName": "p-extended"}}), ("p-extended",)),
        (_pod({}), None),
        (_pod(status={"phase": "Succeeded"}), None),
        (_pod(deletionTimestamp="2026-01-01T00:00:00Z"), None),
        (_pod({"resourceClaims": "nonsense"}, {"resourceClaimStatuses": [7]}), None),
    ],
    ids=["named", "not-made-yet", "made", "extended", "none", "ended", "deleted", "nonsense"],
)
def test_pod_of_reads_claims_when_the_pod_still_wants_them(pod: ApiObject, claims: tuple[str, ...] | None) -> None:
    """Named, made of a template, or made for a resource.

    A pod that has ended, goes, or has none is nobody who waits.
    """
    node_pod = pod_of(pod)

    assert (node_pod.claims if node_pod is not None else None) == claims


def test_pod_of_says_who_makes_it_anew() -> None:
    """Only an owner that controls the pod does."""
    owners = [{"kind": "Node", "name": "n"}, {"kind": "ReplicaSet", "controller": True}]

    assert pod_of(_pod(ownerReferences=owners)) == NodePod(
        namespace="default", name="p", uid="u-p", claims=("c",), has_controller=True
    )
    assert pod_of(_pod(ownerReferences=owners[:1])) == NodePod(namespace="default", name="p", uid="u-p", claims=("c",))


def test_waiting_claim_reads_what_is_ours_on_this_node() -> None:
    """All our drivers' devices of this node.

    Nothing of other nodes or drivers, nor what is only looked at.
    """
    claim = _waiting("gpu-0", "nic-1")

    assert (claim.held, claim.classes) == ({"gpu": ("gpu-0",), "nic": ("nic-1",)}, ("gpu", "nic"))
    assert waiting_claim(None, NODE) is None
    assert waiting_claim(_claim(), NODE) is None
    assert waiting_claim(_claim("gpu-0"), "n2") is None
    assert _waiting("gpu-0", adminAccess=True).held == {}


def test_withheld_devices_names_the_claim_of_each() -> None:
    """Of two claims with one device the first by key, in whatever order they come."""
    first, second = _waiting("gpu-0", uid="u-1"), _waiting("gpu-0", "gpu-1", uid="u-2")

    assert withheld_devices([second, first]) == withheld_devices([first, second])
    assert withheld_devices([first, second]) == {"gpu": {"gpu-0": first.owner, "gpu-1": second.owner}}


@pytest.mark.parametrize(
    ("claim", "changes", "obstacle"),
    [
        (_waiting("gpu-0"), {}, ""),
        (
            _waiting("gpu-0"),
            {"holders": {"gpu": {"gpu-0": PLUGIN}}},
            "device-plugin kubelet/topobus.dev/gpu holds gpu-0",
        ),
        (_waiting("gpu-0"), {"holders": {"gpu": {"gpu-1": PLUGIN}}}, ""),
        (_waiting("gpu-0"), {"holders": {"gpu": {"gpu-0": _waiting("gpu-0").owner}}}, ""),
        (_waiting("gpu-0", shareID="s"), {"holders": {"gpu": {"gpu-0": _waiting("gpu-0", uid="other").owner}}}, ""),
        (
            _waiting("gpu-0", shareID="s"),
            {"holders": {"gpu": {"gpu-0": PLUGIN}}},
            "device-plugin kubelet/topobus.dev/gpu holds gpu-0",
        ),
        (_waiting("gpu-0"), {"silent": {"gpu"}}, "the gpu service does not answer"),
        (_waiting("gpu-0"), {"silent": {"nic"}}, ""),
        (_waiting("gpu-0"), {"is_connected": False}, "NATS is not connected"),
        (_waiting("gpu-7"), {}, "gpu-7 is not in the inventory"),
        (_waiting("gpu-0"), {"inventories": _inventory(HealthState.UNHEALTHY)}, "gpu-0 is unhealthy"),
        (_waiting("gpu-0", tolerations=[TOLERATES]), {"inventories": _inventory(HealthState.UNHEALTHY)}, ""),
        (_waiting("gpu-0"), {"inventories": _inventory(HealthState.UNKNOWN)}, ""),
    ],
    ids=[
        "none",
        "held",
        "another",
        "own",
        "shares",
        "share-of-a-whole",
        "silent",
        "another-class",
        "nats",
        "gone",
        "sick",
        "tolerated",
        "unknown",
    ],
)
def test_obstacle_of_says_what_stands_in_the_way(claim: WaitingClaim, changes: dict[str, Any], obstacle: str) -> None:
    """What the preparation would be refused for, as far as it is known without asking."""
    facts: dict[str, Any] = {
        "holders": {},
        "inventories": _inventory(),
        "silent": set(),
        "is_connected": True,
        **changes,
    }

    assert obstacle_of(claim, **facts) == obstacle
    assert bool(in_the_way(claim, facts["holders"])) is ("holds" in obstacle)


def test_waiting_claim_of_a_shape_waits_for_its_parts() -> None:
    """They are withheld and in the way like any other device; without the shape there is none."""
    parts = {"shape-half-0": ("gpu-0", "nic-0")}
    claim = waiting_claim(_claim("shape-half-0"), NODE, parts)

    assert claim is not None
    assert (claim.held, claim.classes) == ({"gpu": ("gpu-0",), "nic": ("nic-0",)}, ("gpu", "nic"))
    assert withheld_devices([claim]) == {"gpu": {"gpu-0": claim.owner}, "nic": {"nic-0": claim.owner}}
    assert in_the_way(claim, {"nic": {"nic-0": PLUGIN}}) == {"nic-0": PLUGIN}
    assert waiting_claim(_claim("shape-half-0"), NODE) is None


def test_waiting_claim_of_a_shape_with_cpus_is_not_kept_by_other_claims_of_their_node() -> None:
    """Others have other CPUs of the group. A pod that has its GPU is in the way."""
    parts, cpus = {"shape-worker-0": ("cpu-numa-0", "gpu-0")}, {"shape-worker-0": {"cpu-numa-0": 4}}
    claim = waiting_claim(_claim("shape-worker-0"), NODE, parts, cpus)

    assert claim is not None
    assert claim.by_share == {"cpu": ("cpu-numa-0",)}
    other = structs.replace(claim.owner, uid="other")
    holders = {"cpu": {"cpu-numa-0": other}, "gpu": {"gpu-0": PLUGIN}}
    assert in_the_way(claim, holders) == {"gpu-0": PLUGIN}


@pytest.mark.parametrize(
    ("tolerations", "tolerated"),
    [
        ([], ()),
        ([TOLERATES], ("gpu-0",)),
        ([{"operator": "Exists"}], ("gpu-0",)),
        ([{"key": "topobus.dev/health", "value": "unhealthy", "effect": "NoExecute"}], ("gpu-0",)),
        ([{"key": "topobus.dev/health", "value": "unhealthy", "effect": "NoSchedule"}], ()),
        ([{"key": "topobus.dev/health", "value": "unknown"}], ()),
        ([{"key": "topobus.dev/occupied", "operator": "Exists"}], ()),
        ([{**TOLERATES, "tolerationSeconds": 60}], ("gpu-0",)),
        ([{**TOLERATES, "tolerationSeconds": 0}], ()),
    ],
    ids=["none", "key", "all", "exact", "another-effect", "another-value", "another-key", "for-a-while", "not-at-all"],
)
def test_allocation_names_what_may_be_sick_when_its_tolerations_bear_it(
    tolerations: list[Any], tolerated: tuple[str, ...]
) -> None:
    """The taint of a sick device, as Kubernetes judges tolerations.

    One that has no time left bears nothing.
    """
    claim = _claim("gpu-0", tolerations=tolerations)
    allocation = allocation_of(claim, namespace="default", name="c", uid="u-c", node=NODE)

    assert getattr(allocation, "tolerated", None) == tolerated


def test_due_at_is_soon_after_a_failure_and_rarer_when_it_goes_on() -> None:
    """A moment after the first failure, every two seconds for a while, then ever less often, and
    half a minute at most.
    """
    waits = PodWait(since_s=10.0)
    failed = structs.replace(waits, failed_s=20.0)
    after = [due_at(structs.replace(failed, nudged_s=30.0, tries=tries)) - 30.0 for tries in (1, 10, 11, 12, 14, 40)]

    assert (due_at(waits), due_at(failed)) == (11.5, 20.2)
    assert after == [2.0, 2.0, 4.0, 8.0, 30.0, 30.0]
    assert due_at(structs.replace(failed, nudged_s=30.0, tries=1, failed_s=31.0)) == 33.0
