"""A snapshot whose names are replaced gets the same answers, and holds none of the names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest

from support.why_clusters import CASES, JOB, Case
from support.why_objects import NVIDIA, asks, claim, slice_of
from topobus.controller.snapshots.rules.cluster_view import ClusterView, Key
from topobus.controller.snapshots.rules.defrag import plan_moves
from topobus.controller.snapshots.rules.explain import explain_pod
from topobus.controller.snapshots.rules.free import add_pod, count_fits, device_states, free_rows
from topobus.controller.snapshots.rules.replaced_names import replace_names
from topobus.controller.snapshots.rules.snapshot import Server, Snapshot, gates_of_release
from topobus.controller.snapshots.rules.what_if import edits_of, what_if
from topobus.engine.cel.selector import CelCompiler
from topobus.values.outcome import Reason

_GATES = {**gates_of_release("v1.36.2"), "DRADeviceTaintRules": True}
_SERVER = Server(address="https://cluster.secret.example", version="v1.36.2", gates=_GATES)
_COMPILER = CelCompiler()
# What would be a name that is near to another one is far from it then.
_OF_NAMES = ("claim-name",)


def _codes(reasons: Iterable[Reason]) -> list[str]:
    return [reason.code for reason in reasons]


def _answers(snapshot: Snapshot, name: Callable[[str], str]) -> dict[str, Any]:
    """Ask all questions, and keep of the answers what has no names."""

    def view() -> ClusterView:
        return ClusterView(snapshot)

    key: Key = (name(JOB[0]), name(JOB[1]))
    verdict = explain_pod(view(), key, _COMPILER)
    seen = view()
    added = add_pod(seen, [{**claim("more", asks(NVIDIA, 2)), "metadata": {"name": "more"}}], key[0])
    plan = plan_moves(seen, added, _COMPILER)
    nodes = seen.node_names
    return {
        "why": (verdict.code, _codes(verdict.reasons), _codes(verdict.remarks)),
        "groups": [(group.count, _codes(group.reasons), len(group.holders)) for group in verdict.groups],
        "changes": [(each.code, len(each.edits)) for each in verdict.changes if each.code not in _OF_NAMES],
        "free": [
            msgspec.structs.replace(row, such_as=())
            for row in free_rows(list(device_states(view(), _COMPILER)), ("driver", "kind", "model", "class"))
        ],
        "fits": [(fit.count, fit.nodes) for fit in count_fits(seen, added, _COMPILER)],
        "defrag": (bool(plan.node), len(plan.moves), plan.kept, plan.is_complete),
        "what-if": [
            [(pod.before.code, pod.after.code) for pod in what_if(view(), edits_of(view(), [], [gone]), _COMPILER)]
            for gone in (("Node", ("", node)) for node in nodes)
        ],
    }


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_answers_are_those_of_the_original_when_names_are_replaced(case: Case) -> None:
    """The same codes and the same counts, for every cluster, and the same nodes by their new names."""
    original = Snapshot(server=_SERVER, items=case.objects)
    replaced, names = replace_names(original)
    new = {old: each for each, old in names.items()}

    assert _answers(replaced, lambda name: new[name]) == _answers(original, lambda name: name)
    assert names[new["job"]] == "job"


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_names_are_replaced_everywhere_and_the_same_whatever_the_order(case: Case) -> None:
    """No object but a class keeps its name, and another order of the objects gives the same names."""
    replaced, names = replace_names(Snapshot(server=_SERVER, items=case.objects))
    _, again = replace_names(Snapshot(server=_SERVER, items=case.objects[::-1]))

    own = {plain["metadata"]["name"] for plain in case.objects if plain["kind"] != "DeviceClass"}
    assert own.isdisjoint(_texts(msgspec.to_builtins(replaced)))
    assert own <= set(names.values())
    assert names == again


def test_what_people_wrote_is_replaced_and_what_decides_stays() -> None:
    """Values of labels, annotations, owners, messages and a driver's parameters on one side; keys,
    numbers, zones and what a CEL expression reads on the other.
    """
    labels = {
        "app": "secret-app",
        "generation": "12",
        "topology.kubernetes.io/zone": "zone-1",
        "kubernetes.io/hostname": "secret-host",
    }
    spec = {
        "nodeName": "secret-node",
        "serviceAccountName": "secret-account",
        "containers": [{"name": "secret-main", "image": "secret-image", "resources": {"requests": {"cpu": "1"}}}],
        "tolerations": [{"key": "team", "operator": "Equal", "value": "secret-team"}],
    }
    metadata = {
        "name": "secret-pod",
        "namespace": "secret-space",
        "labels": labels,
        "annotations": {"a": "secret-note"},
        "ownerReferences": [{"kind": "Job", "name": "secret-job", "uid": "secret-uid", "controller": True}],
    }
    status = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "secret-text"}]}
    made = claim("secret-claim", asks(NVIDIA, 1, f"device.attributes['{NVIDIA}'].name == 'gpu'"))
    made["spec"]["devices"]["config"] = [{"opaque": {"driver": NVIDIA, "parameters": {"key": "secret-key"}}}]
    device = {"name": "gpu-0", "attributes": {"name": {"string": "gpu"}, "labels": {"string": "x"}}}
    taints = [{"key": "team", "value": "secret-team", "effect": "NoSchedule"}]
    items: tuple[dict[str, Any], ...] = (
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status},
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "secret-node"}, "spec": {"taints": taints}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "secret-secret"}, "data": {"a": "secret-data"}},
        made,
        slice_of(NVIDIA, "secret-node", [device]),
    )

    replaced, names = replace_names(Snapshot(server=_SERVER, items=items))

    pod, node, want, published = replaced.items
    assert not [text for text in _texts(msgspec.to_builtins(replaced)) if "secret" in text]
    kept = pod["metadata"]["labels"]
    assert names[kept["app"]] == "secret-app"
    assert names[kept["kubernetes.io/hostname"]] == "secret-host"
    assert (kept["generation"], kept["topology.kubernetes.io/zone"]) == ("12", "zone-1")
    assert pod["spec"]["tolerations"][0]["value"] == node["spec"]["taints"][0]["value"]
    assert want["spec"]["devices"]["requests"] == made["spec"]["devices"]["requests"]
    assert published["spec"]["devices"] == [device]
    assert published["spec"]["pool"]["name"] == node["metadata"]["name"] == pod["spec"]["nodeName"]


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _texts(inner)
