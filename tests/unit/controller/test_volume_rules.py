"""Where the volumes of a pod let it go, by kube-scheduler's rules: what is not ready anywhere, and
what keeps the pod off a node.
"""

from __future__ import annotations

from typing import Any

import pytest

from topobus.controller.snapshots.rules.volume_index import VolumeIndex
from topobus.engine.allocation.values import Node
from topobus.engine.scheduling.kube_rules.volume_rules import PodVolumes, read_pod_volumes
from topobus.values.errors import ContractError

HOST, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
NODES = {"n1": "a", "n2": "b"}
POD = ("default", "p")


def claim(
    name: str = "data", *, bound: str = "", annotations: dict[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    """A claim; `bound` names the volume to which it is bound."""
    completed = {"pv.kubernetes.io/bind-completed": "yes"} if bound else {}
    return {
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "annotations": {**completed, **(annotations or {})},
        },
        "spec": {"volumeName": bound, "storageClassName": "local", "accessModes": ["ReadWriteOnce"], **spec},
    }


def sized(size: str) -> dict[str, Any]:
    """What a claim asks for."""
    return {"resources": {"requests": {"storage": size}}}


def volume(
    name: str, host: str | None = None, *, labels: dict[str, str] | None = None, phase: str = "Available", **spec: Any
) -> dict[str, Any]:
    """A volume, which can be used on one host alone where one is named."""
    terms = [{"matchExpressions": [{"key": HOST, "operator": "In", "values": [host]}]}] if host else []
    affinity = {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}} if host else {}
    return {
        "kind": "PersistentVolume",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {
            "capacity": {"storage": "10Gi"},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "local",
            **affinity,
            **spec,
        },
        "status": {"phase": phase},
    }


def storage_class(
    name: str = "local",
    *,
    mode: str = "WaitForFirstConsumer",
    provisioner: str = "kubernetes.io/no-provisioner",
    **more: Any,
) -> dict[str, Any]:
    """A class, of local volumes by default."""
    return {
        "kind": "StorageClass",
        "metadata": {"name": name},
        "provisioner": provisioner,
        "volumeBindingMode": mode,
        **more,
    }


def csi_node(name: str, driver: str, count: int | None) -> dict[str, Any]:
    """The limit of a driver on a node."""
    return {
        "kind": "CSINode",
        "metadata": {"name": name},
        "spec": {"drivers": [{"name": driver, "allocatable": {"count": count}}]},
    }


def pod(name: str = "p", *claims: str, node: str = "", ephemeral: tuple[str, ...] = ()) -> dict[str, Any]:
    """A pod with volumes."""
    volumes: list[dict[str, Any]] = [{"name": each, "persistentVolumeClaim": {"claimName": each}} for each in claims]
    volumes += [{"name": each, "ephemeral": {"volumeClaimTemplate": {}}} for each in ephemeral]
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"nodeName": node, "volumes": volumes},
    }


def indexed(*objects: dict[str, Any]) -> VolumeIndex:
    """Store objects as a server shows them."""
    index = VolumeIndex()
    for plain in objects:
        key = (plain["metadata"].get("namespace", ""), plain["metadata"]["name"])
        if plain["kind"] == "Pod":
            index.put_pod(key, plain)
        else:
            index.put(plain["kind"], key, plain)
    return index


def judge(*objects: dict[str, Any]) -> PodVolumes:
    """Look up the volumes of pod p."""
    index = indexed(*objects)
    return read_pod_volumes(POD, "uid-p", index.volumes_of(POD), index)


def refusals(*objects: dict[str, Any], labels: dict[str, dict[str, str]] | None = None) -> dict[str, str]:
    """Say for n1 (zone a) and n2 (zone b) by which rules pod p is kept off; `blocked` where it has
    to wait whatever the node.
    """
    volumes = judge(*objects)
    if volumes.blockers:
        return {"blocked": ", ".join(reason.code for reason in volumes.blockers)}
    nodes = {name: Node(name, (labels or {}).get(name, {HOST: name, ZONE: zone})) for name, zone in NODES.items()}
    return {
        name: ", ".join(reason.code for reason in reasons)
        for name, node in nodes.items()
        if (reasons := list(volumes.reasons(node)))
    }


P = pod("p", "data")
BOUND = claim(bound="v")


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        ((P,), "there is no PersistentVolumeClaim default/data"),
        ((pod("p", ephemeral=("tmp",)),), "PersistentVolumeClaim default/p-tmp is not made yet"),
        ((P, claim() | {"status": {"phase": "Lost"}}), "has lost its PersistentVolume"),
        (
            (P, {**BOUND, "metadata": {**BOUND["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}, volume("v")),
            "is being deleted",
        ),
        ((pod("p", ephemeral=("tmp",)), claim("p-tmp", bound="v"), volume("v")), "was not made for this pod"),
        ((P, BOUND), "is bound to PersistentVolume v, which does not exist"),
        (
            (P, claim(), storage_class(mode="Immediate")),
            "is not bound to a volume yet, and StorageClass local binds at once (Immediate)",
        ),
        ((P, claim()), "is not bound to a volume yet, and there is no StorageClass local"),
        ((P, claim(storageClassName="")), "is not bound to a volume yet, and it names no StorageClass"),
        ((P, claim(volumeName="v"), storage_class()), "is not bound yet to PersistentVolume v, which it names"),
        (
            (P, claim(bound="v", accessModes=["ReadWriteOncePod"]), volume("v"), pod("q", "data", node="n1")),
            "is for one pod (ReadWriteOncePod), and pod default/q uses it",
        ),
    ],
)
def test_pod_waits_whatever_the_node_when_a_claim_of_its_volumes_is_not_ready(
    objects: tuple[dict[str, Any], ...], expected: str
) -> None:
    """As kube-scheduler has it before it looks at nodes.

    The message names the volume, the claim and why.
    """
    (blocker,) = judge(*objects).blockers

    assert blocker.message.startswith("volume ")
    assert expected in blocker.message


def test_each_claim_that_is_not_ready_is_named() -> None:
    """Whoever mends one of two learns of the other at once."""
    assert [reason.facts["claim"] for reason in judge(pod("p", "a", "b")).blockers] == ["a", "b"]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (pod("q", "data", node="n2"), {"blocked": "volume-in-use"}),
        (pod("q", "data"), {}),
        (pod("q", "other", node="n2"), {}),
    ],
    ids=["on a node", "waiting", "with another claim"],
)
def test_volume_for_one_pod_is_in_use_when_a_placed_pod_has_it(other: dict[str, Any], expected: dict[str, str]) -> None:
    """A pod that only waits does not count. The claim of the pod itself is its own."""
    assert refusals(P, claim(bound="v", accessModes=["ReadWriteOncePod"]), volume("v"), other) == expected


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (volume("v", "n1"), {"n2": "volume-elsewhere"}),
        (volume("v"), {}),
        (
            volume("v", nodeAffinity={"required": {"nodeSelectorTerms": []}}),
            {"n1": "volume-elsewhere", "n2": "volume-elsewhere"},
        ),
        # Either of two terms will do.
        (
            volume(
                "v",
                nodeAffinity={
                    "required": {
                        "nodeSelectorTerms": [
                            {"matchExpressions": [{"key": ZONE, "operator": "In", "values": ["x", "y", "z", "q"]}]},
                            {"matchExpressions": [{"key": HOST, "operator": "NotIn", "values": ["n1"]}]},
                        ]
                    }
                },
            ),
            {"n1": "volume-elsewhere"},
        ),
        # Labels alone are looked at: the field metadata.name is nobody's there.
        (
            volume(
                "v",
                nodeAffinity={
                    "required": {
                        "nodeSelectorTerms": [
                            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
                        ]
                    }
                },
            ),
            {"n1": "volume-elsewhere", "n2": "volume-elsewhere"},
        ),
        (volume("v", labels={ZONE: "a"}), {"n2": "volume-zone"}),
        (volume("v", labels={ZONE: "a__b"}), {}),
        (volume("v", labels={ZONE: "a__"}), {}),
        (volume("v", labels={"failure-domain.beta.kubernetes.io/zone": "b"}), {"n1": "volume-zone"}),
        (volume("v", labels={"topology.kubernetes.io/region": "r"}), {"n1": "volume-zone", "n2": "volume-zone"}),
    ],
)
def test_bound_volume_keeps_the_pod_where_it_can_be_used(wanted: dict[str, Any], expected: dict[str, str]) -> None:
    """By its node affinity, and by its labels about zones and regions."""
    assert refusals(P, BOUND, wanted) == expected


def test_zone_of_a_volume_says_nothing_to_a_node_without_any() -> None:
    """Such a node is in a cluster of one zone; and a volume that was made for the pod has its zone
    in its node affinity.
    """
    made_for_it = claim("p-tmp", bound="v")
    made_for_it["metadata"]["ownerReferences"] = [{"uid": "uid-p", "controller": True}]
    labels = {"n1": {HOST: "n1"}}

    assert refusals(P, BOUND, volume("v", labels={ZONE: "b"}), labels=labels) == {}
    assert refusals(pod("p", ephemeral=("tmp",)), made_for_it, volume("v", labels={ZONE: "c"})) == {}


NOWHERE = {"n1": "volume-unavailable", "n2": "volume-unavailable"}
NOT_2 = {"n2": "volume-unavailable"}


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        ((claim(), volume("v", "n1")), NOT_2),
        ((claim(),), NOWHERE),
        ((claim(), volume("v", "n1", phase="Bound")), NOWHERE),
        ((claim(**sized("20Gi")), volume("v", "n1")), NOWHERE),
        ((claim(**sized("plenty")), volume("v", "n1")), NOT_2),
        ((claim(volumeMode="Block"), volume("v", "n1")), NOWHERE),
        ((claim(volumeAttributesClassName="fast"), volume("v", "n1")), NOWHERE),
        ((claim(accessModes=["ReadWriteMany"]), volume("v", "n1")), NOWHERE),
        ((claim(), volume("v", "n1", storageClassName="other")), NOWHERE),
        (
            (
                claim(selector={"matchLabels": {"disk": "ssd"}}),
                volume("v", "n1"),
                volume("w", "n2", labels={"disk": "ssd"}),
            ),
            {"n1": "volume-unavailable"},
        ),
        # A volume that names the claim is its own, free or not, and then no other will do.
        (
            (
                claim(),
                volume("v", "n1", phase="Bound", claimRef={"namespace": "default", "name": "data"}),
                volume("w", "n2"),
            ),
            NOT_2,
        ),
        ((claim(), volume("v", "n1", claimRef={"namespace": "default", "name": "data", "uid": "another"})), NOWHERE),
        (
            (
                claim(),
                volume(
                    "v",
                    nodeAffinity={
                        "required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": ZONE, "operator": "Exists"}]}]}
                    },
                ),
            ),
            {},
        ),
        (
            (
                claim(annotations={"volume.beta.kubernetes.io/storage-class": "local"}, storageClassName="other"),
                volume("v", "n1"),
            ),
            NOT_2,
        ),
    ],
)
def test_claim_without_a_volume_keeps_the_pod_where_a_free_one_fits(
    objects: tuple[dict[str, Any], ...], expected: dict[str, str]
) -> None:
    """A class that waits for the pod and makes no volumes: size, mode, access, class, selector and
    node have to fit.
    """
    assert refusals(P, storage_class(), *objects) == expected


def test_volume_that_is_being_deleted_is_not_free() -> None:
    """It is gone soon."""
    leaving = volume("v", "n1")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    assert refusals(P, storage_class(), claim(), leaving) == NOWHERE


def test_two_claims_of_a_pod_want_two_volumes() -> None:
    """The smaller claim takes the smaller volume, so that the larger one is left for the larger
    claim.
    """
    wanted = (pod("p", "a", "b"), storage_class(), claim("a", **sized("8Gi")), claim("b", **sized("2Gi")))
    small, large = volume("v", "n1", capacity={"storage": "4Gi"}), volume("w", "n1")

    assert refusals(*wanted, small, large, volume("x", "n2")) == NOT_2


MAKES = {"provisioner": "csi.example.com"}


@pytest.mark.parametrize(
    ("storage", "annotations", "expected"),
    [
        (storage_class(**MAKES), {}, {}),
        (storage_class(**MAKES), {"volume.kubernetes.io/selected-node": "n1"}, NOT_2),
        (
            storage_class(
                **MAKES, allowedTopologies=[{"matchLabelExpressions": [{"key": ZONE, "values": ["a", "c"]}]}]
            ),
            {},
            NOT_2,
        ),
        (
            storage_class(**MAKES, allowedTopologies=[{}, {"matchLabelExpressions": [{"key": ZONE, "values": ["b"]}]}]),
            {},
            {"n1": "volume-unavailable"},
        ),
        (storage_class(), {"volume.kubernetes.io/selected-node": "n1"}, NOWHERE),
    ],
    ids=["anywhere", "begun on n1", "in zones a and c", "an empty term is no place", "begun, and none is made"],
)
def test_claim_without_a_volume_keeps_the_pod_where_one_can_be_made(
    storage: dict[str, Any], annotations: dict[str, str], expected: dict[str, str]
) -> None:
    """By the topologies that the class allows, and by the node for which the making has begun."""
    assert refusals(P, storage, claim(annotations=annotations)) == expected


def csi(handle: str) -> dict[str, Any]:
    """A volume of a CSI driver."""
    return {"csi": {"driver": "csi.example.com", "volumeHandle": handle}}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (pod("q", "other", node="n1"), {"n1": "volume-limit"}),
        (pod("q", "other", node="n2"), {}),
        (pod("q", "other"), {}),
        (pod("q", "data", node="n1"), {}),
        (pod("q", "no-claim", node="n1"), {}),
    ],
    ids=["full", "another node", "waiting", "the same volume", "a claim that is gone"],
)
def test_driver_attaches_no_more_volumes_than_the_node_allows(other: dict[str, Any], expected: dict[str, str]) -> None:
    """A volume that two pods use is attached once; a driver without a limit is not counted."""
    objects = (
        claim(bound="v"),
        claim("other", bound="w"),
        volume("v", **csi("1")),
        volume("w", **csi("2")),
        csi_node("n1", "csi.example.com", 1),
    )

    assert refusals(P, *objects, csi_node("n2", "csi.example.com", None), other) == expected


def test_volume_that_is_still_to_be_made_counts_for_its_driver() -> None:
    """The limit is reached with the second of two; a volume of no driver counts for none."""
    objects = (
        pod("p", "a", "b", "c"),
        claim("a"),
        claim("b"),
        claim("c", bound="v"),
        volume("v"),
        storage_class(**MAKES),
    )

    assert refusals(*objects, csi_node("n1", "csi.example.com", 1), csi_node("n2", "csi.example.com", 2)) == {
        "n1": "volume-limit"
    }


def test_volume_that_cannot_be_read_is_refused() -> None:
    """The message names the field. A pod's volumes that cannot be read are none."""
    with pytest.raises(ContractError, match="nodeAffinity"):
        indexed(volume("v", nodeAffinity=7))
    assert indexed({**P, "spec": {"nodeName": "n1", "volumes": ["x", {"name": "y"}]}}).volumes_of(POD) == ()
