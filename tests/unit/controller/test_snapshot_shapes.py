"""Fields of a wrong type in a snapshot that somebody wrote by hand: each is named, or changes no answer's
form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.laws import every_third
from support.why_clusters import CASES, JOB
from support.why_objects import (
    NVIDIA,
    Plain,
    allocated,
    asks,
    bound_volume,
    claim,
    class_of,
    node,
    pod,
    slice_of,
    template,
    volume_claim,
    volume_class,
)
from topobus.controller.snapshots.main import read_snapshot
from topobus.controller.snapshots.rules.cluster_view import ClusterView
from topobus.controller.snapshots.rules.defrag import plan_moves
from topobus.controller.snapshots.rules.explain import explain_claim, explain_pod
from topobus.controller.snapshots.rules.free import GROUPINGS, add_pod, count_fits, device_states, free_rows
from topobus.controller.snapshots.rules.shapes import wrong_types
from topobus.controller.snapshots.rules.snapshot import Snapshot
from topobus.controller.snapshots.rules.what_if import edits_of, what_if
from topobus.engine.cel.selector import CelCompiler
from topobus.values.errors import ContractError, TopobusError

_COMPILER = CelCompiler()
_WRONG: tuple[object, ...] = ("text", 7, [7], {"a": 7})


def _cluster() -> list[Plain]:
    """A cluster with every kind and every field that an answer reads."""
    labels = {"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "app", "operator": "In", "values": ["web"]}]}
    term = {"labelSelector": labels, "topologyKey": "kubernetes.io/hostname", "namespaces": ["team"]}
    apart = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "uid-web", "controller": True}
    holder = pod("holder", "held", on="gpu-a", labels={"app": "web"}, port=80, priority=5)
    holder["metadata"] |= {"ownerReferences": [owner], "creationTimestamp": "2026-01-01T00:00:00Z"}
    holder["spec"]["affinity"] = {"podAntiAffinity": apart}
    waiting = pod(
        "job",
        "want",
        templates=["gpus"],
        labels={"app": "batch"},
        port=81,
        priority=7,
        schedulerName="default-scheduler",
        nodeSelector={"zone": "a"},
        tolerations=[{"key": "team", "operator": "Exists", "effect": "NoSchedule"}],
        affinity={
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [zone]}},
            "podAffinity": apart,
        },
        topologySpreadConstraints=[{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        overhead={"cpu": "1"},
        initContainers=[{"name": "init", "resources": {"requests": {"cpu": "1"}}}],
    )
    waiting["status"] |= {
        "conditions": [{"type": "PodScheduled", "status": "False", "message": "no"}],
        "resourceClaimStatuses": [{"name": "use-gpus", "resourceClaimName": "made"}],
    }
    gpu = {"attributes": {"type": {"string": "gpu"}, "slot": {"int": 0}}, "capacity": {"memory": {"value": "1Gi"}}}
    taint = {"key": "team", "value": "a", "effect": "NoSchedule"}
    made = {**claim("made", asks(NVIDIA, 2, "true")), "kind": "ResourceClaim"}
    made["metadata"]["ownerReferences"] = [{"kind": "Pod", "name": "job", "uid": "uid-job", "controller": True}]
    held = claim("held", asks(NVIDIA, 2, name="held"))
    policy = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "b", "namespace": "team"}}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q", "namespace": "team"}}
    rule = {"apiVersion": "resource.k8s.io/v1beta2", "kind": "DeviceTaintRule", "metadata": {"name": "r"}}
    drivers = [{"name": "csi.example.com", "allocatable": {"count": 3}}]
    csi = {"apiVersion": "storage.k8s.io/v1", "kind": "CSINode", "metadata": {"name": "gpu-a"}}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team", "labels": {"a": "b"}}},
        node("gpu-a", labels={"zone": "a", "topology.kubernetes.io/zone": "a"}, taints=[taint]),
        node("gpu-b", labels={"zone": "b"}, is_cordoned=True),
        class_of(NVIDIA),
        slice_of(NVIDIA, "gpu-a", [{"name": "gpu-0", **gpu, "taints": [taint]}, {"name": "gpu-1"}]),
        slice_of(NVIDIA, "gpu-b", [{"name": "gpu-0"}]),
        allocated(held, NVIDIA, "gpu-a", "gpu-0", "gpu-1", by=("holder",)),
        claim(
            "want",
            asks(NVIDIA, 2, f"device.attributes['{NVIDIA}'].tipe == 'gpu'"),
            constraints=[{"matchAttribute": "a/b"}],
        ),
        made,
        template("gpus", asks(NVIDIA, 2)),
        holder,
        waiting,
        {**policy, "spec": {"selector": labels}, "status": {"disruptionsAllowed": 1}},
        {**quota, "status": {"hard": {"count/x": "1"}, "used": {"count/x": "1"}}},
        {**rule, "spec": {"deviceSelector": {"driver": "x"}, "taint": taint}},
        volume_class("fast"),
        volume_claim("data", "fast", volume="v"),
        bound_volume("v", "fast", zone="a", claim_name="data"),
        {**csi, "spec": {"drivers": drivers}},
    ]


def _places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """List the paths of all values within one."""
    if path:
        yield path
    inner: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from _places(each, (*path, key))


def _with(value: Any, path: tuple[str | int, ...], wrong: object) -> Any:
    if not path:
        return wrong
    copy = value.copy()
    copy[path[0]] = _with(value[path[0]], path[1:], wrong)
    return copy


def _ask_everything(items: tuple[Plain, ...]) -> None:
    """Ask every question that a snapshot answers. What somebody did wrong may be refused."""
    more = [{**claim("more", asks(NVIDIA, 1)), "apiVersion": "resource.k8s.io/v1"}]

    def view() -> ClusterView:
        return ClusterView(Snapshot(items=items))

    for question in (
        lambda: explain_pod(view(), JOB, _COMPILER),
        lambda: explain_claim(view(), ("team", "want"), _COMPILER),
        lambda: free_rows(list(device_states(view(), _COMPILER)), GROUPINGS),
        lambda: (lambda seen: count_fits(seen, add_pod(seen, more, "team"), _COMPILER))(view()),
        lambda: (lambda seen: plan_moves(seen, add_pod(seen, more, "team"), _COMPILER))(view()),
        lambda: (lambda seen: what_if(seen, edits_of(seen, [], [("Node", ("", "gpu-a"))]), _COMPILER))(view()),
    ):
        try:
            question()
        except TopobusError:
            continue


@pytest.mark.law
@pytest.mark.parametrize("number", [pytest.param(at, id=each["kind"]) for at, each in enumerate(_cluster())])
def test_a_field_of_a_wrong_type_is_named_or_harmless(number: int) -> None:
    """Each value of each kind is replaced by a value of each type: the check names the object and the
    field, or all questions are answered.
    """
    items = _cluster()
    named = 0
    for path, wrong in every_third([(path, wrong) for path in _places(items[number]) for wrong in _WRONG]):
        broken = [*items]
        broken[number] = _with(items[number], path, wrong)
        problems = wrong_types(broken)
        named += bool(problems)
        if not problems:
            try:
                _ask_everything(tuple(broken))
            except Exception as err:
                raise AssertionError((path, wrong)) from err

    assert named


def test_seeded_clusters_have_no_wrong_types() -> None:
    """What an API server takes is never refused."""
    assert {case.name: wrong_types(case.objects) for case in CASES if wrong_types(case.objects)} == {}
    assert wrong_types(_cluster()) == []


def test_file_with_wrong_types_is_refused_by_names(tmp_path: Path) -> None:
    """The file, the object, the field, what it has and what it should have, of one field or of many."""
    labels = {"kind": "Pod", "metadata": {"name": "p", "namespace": "team", "labels": {"app": 7}}}
    (tmp_path / "one.json").write_text(json.dumps({"items": [labels]}), encoding="utf-8")
    (tmp_path / "many.json").write_text(json.dumps({"items": [labels] * 25}), encoding="utf-8")

    with pytest.raises(ContractError) as single:
        read_snapshot(tmp_path / "one.json")
    with pytest.raises(ContractError) as many:
        read_snapshot(tmp_path / "many.json")

    assert single.value.message == f"{tmp_path}/one.json: Pod team/p: metadata.labels[...]: wanted str, got int"
    assert many.value.message.splitlines()[-1] == f"{tmp_path}/many.json: and 5 more"


def test_nulls_of_a_file_count_as_absent(tmp_path: Path) -> None:
    """Kubernetes writes `creationTimestamp: null` into templates."""
    path = tmp_path / "cluster.json"
    plain = {"kind": "Node", "metadata": {"name": "n1", "creationTimestamp": None}, "spec": None}
    path.write_text(json.dumps({"items": [plain]}), encoding="utf-8")

    assert read_snapshot(path).items == ({"kind": "Node", "metadata": {"name": "n1"}},)
