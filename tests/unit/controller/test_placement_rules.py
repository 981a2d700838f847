"""What pods on nodes mean for a pod that is to be placed: host ports, affinity, anti-affinity and
topology spread, by kube-scheduler's rules.
"""

from __future__ import annotations

from typing import Any

import pytest

from topobus.controller.snapshots.rules.placed_pods import PlacedPods
from topobus.engine.scheduling.kube_rules.label_selectors import LabelSelector, selects, with_labels
from topobus.engine.scheduling.kube_rules.placement_rules import count_rules, read_placement
from topobus.engine.scheduling.node_fit import node_facts, read_placing
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError

WEB = {"matchLabels": {"app": "web"}}
HOST, ZONE = "kubernetes.io/hostname", "zone"
NODES = {"n1": "a", "n2": "a", "n3": "b"}


def pod(
    name: str, *, node: str = "", labels: dict[str, str] | None = None, namespace: str = "default", **spec: Any
) -> dict[str, Any]:
    """A pod as the server shows it."""
    metadata = {"name": name, "namespace": namespace, "uid": name, "labels": labels or {}}
    return {"metadata": metadata, "spec": {**({"nodeName": node} if node else {}), **spec}}


def web(name: str, node: str, **fields: Any) -> dict[str, Any]:
    """A pod of the web."""
    return pod(name, node=node, labels={"app": "web"}, **fields)


def port(number: int, **fields: Any) -> dict[str, Any]:
    """Containers that want a host port."""
    return {"containers": [{"name": "c", "ports": [{"hostPort": number, **fields}]}]}


def near(key: str = ZONE, *, anti: bool = False, **term: Any) -> dict[str, Any]:
    """A required term of affinity, or of anti-affinity, for the web."""
    terms = [{"topologyKey": key, "labelSelector": WEB, **term}]
    return {
        "affinity": {
            "podAntiAffinity" if anti else "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}
        }
    }


def spread(key: str = ZONE, **fields: Any) -> dict[str, Any]:
    """A constraint that must hold."""
    return {
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": WEB, **fields}
        ]
    }


def refusals(
    wanted: dict[str, Any],
    *present: dict[str, Any],
    taints: dict[str, Any] | None = None,
) -> dict[str, str]:
    """Say for each of n1 and n2 (zone a) and n3 (zone b) by which rule
    the wanted pod is kept off.
    """
    nodes = {
        name: node_facts(
            ApiObject(
                api_version="v1",
                kind="Node",
                metadata={"name": name, "labels": {HOST: name, ZONE: zone}},
                spec={"taints": [taints[name]]} if taints and name in taints else {},
                status={},
            )
        )
        for name, zone in NODES.items()
    }
    pods = PlacedPods()
    for plain in present:
        pods.put_pod((plain["metadata"]["namespace"], plain["metadata"]["name"]), plain)
    stored = ApiObject(api_version="v1", kind="Pod", metadata=wanted["metadata"], spec=wanted["spec"], status={})
    rules = count_rules(
        read_placement(stored),
        read_placing(stored),
        nodes,
        pods.groups(),
        pods.ports_on,
    )
    reasons = {name: rules.why_not(at) for name, at in nodes.items()}
    return {name: reason.code for name, reason in reasons.items() if reason is not None}


@pytest.mark.parametrize(
    ("wanted", "used", "is_taken"),
    [
        (port(80), port(80), True),
        (port(80), port(81), False),
        (port(80, protocol="UDP"), port(80), False),
        (port(80, hostIP="10.0.0.1"), port(80), True),
        (port(80), port(80, hostIP="10.0.0.1"), True),
        (port(80, hostIP="10.0.0.1"), port(80, hostIP="10.0.0.2"), False),
        (port(80, hostIP="10.0.0.1"), port(80, hostIP="0.0.0.0"), True),
        (port(80), {"initContainers": port(80)["containers"]}, False),
        (port(80), {"initContainers": [{**port(80)["containers"][0], "restartPolicy": "Always"}]}, True),
    ],
)
def test_host_port_is_taken_as_kube_scheduler_has_it(
    wanted: dict[str, Any], used: dict[str, Any], is_taken: bool
) -> None:
    """Protocol and number are the same, and the address, or one of them is for all.

    What ends before the containers start has none.
    """
    assert refusals(pod("p", **wanted), pod("q", node="n1", **used)) == ({"n1": "host-port-taken"} if is_taken else {})


EVERYWHERE = {"n1": "pod-affinity", "n2": "pod-affinity", "n3": "pod-affinity"}


@pytest.mark.parametrize(
    ("wanted", "present", "expected"),
    [
        (pod("p", **near()), [web("q", "n1")], {"n3": "pod-affinity"}),
        (pod("p", **near(HOST)), [web("q", "n1")], {"n2": "pod-affinity", "n3": "pod-affinity"}),
        (pod("p", **near()), [], EVERYWHERE),
        # The first of its kind may be where it likes, as long as nobody of it is anywhere.
        (pod("p", labels={"app": "web"}, **near()), [], {}),
        (pod("p", labels={"app": "web"}, **near()), [web("q", "n3")], {"n1": "pod-affinity", "n2": "pod-affinity"}),
        (pod("p", **near("rack")), [web("q", "n1")], EVERYWHERE),
        (pod("p", **near(anti=True)), [web("q", "n1")], {"n1": "pod-anti-affinity", "n2": "pod-anti-affinity"}),
        (pod("p", **near("rack", anti=True)), [web("q", "n1")], {}),
        # Another namespace is meant only where the term says so.
        (pod("p", **near(anti=True)), [web("q", "n1", namespace="other")], {}),
        (
            pod("p", **near(anti=True, namespaces=["other"])),
            [web("q", "n3", namespace="other"), web("r", "n1")],
            {"n3": "pod-anti-affinity"},
        ),
        (
            pod("p", **near(anti=True, namespaceSelector={})),
            [web("q", "n3", namespace="other")],
            {"n3": "pod-anti-affinity"},
        ),
        # Those that are there need not bear the new one.
        (
            pod("p", labels={"app": "web"}),
            [pod("q", node="n1", **near(anti=True))],
            {"n1": "anti-affinity-of-others", "n2": "anti-affinity-of-others"},
        ),
        (pod("p", labels={"app": "db"}), [pod("q", node="n1", **near(anti=True))], {}),
        (pod("p", labels={"app": "web"}, namespace="other"), [pod("q", node="n1", **near(anti=True))], {}),
        # A selector that is left out means nobody, an empty one everybody.
        (pod("p", **near(anti=True, labelSelector=None)), [web("q", "n1")], {}),
        (pod("p", **near(HOST, anti=True, labelSelector={})), [pod("q", node="n2")], {"n2": "pod-anti-affinity"}),
    ],
)
def test_affinity_keeps_a_pod_off_as_kube_scheduler_has_it(
    wanted: dict[str, Any], present: list[dict[str, Any]], expected: dict[str, str]
) -> None:
    """Own terms, those of the pods that are there, namespaces, and the first of a series."""
    assert refusals(wanted, *present) == expected
    assert refusals(wanted, *reversed(present)) == expected


ZONE_A = {"n1": "topology-spread", "n2": "topology-spread"}
IN_ZONE_A = {"nodeSelector": {ZONE: "a"}}


@pytest.mark.parametrize(
    ("wanted", "present", "expected"),
    [
        (pod("p", labels={"app": "web"}, **spread()), [web("q", "n1")], ZONE_A),
        (pod("p", labels={"app": "web"}, **spread(maxSkew=2)), [web("q", "n1")], {}),
        (pod("p", **spread()), [web("q", "n1")], {}),
        (pod("p", labels={"app": "web"}, **spread(whenUnsatisfiable="ScheduleAnyway")), [web("q", "n1")], {}),
        (
            pod("p", labels={"app": "web"}, **spread("rack")),
            [],
            {"n1": "topology-spread", "n2": "topology-spread", "n3": "topology-spread"},
        ),
        # Fewer domains than wanted: the least counts as none.
        (
            pod("p", labels={"app": "web"}, **spread(minDomains=3)),
            [web("q", "n1"), web("r", "n3")],
            {"n1": "topology-spread", "n2": "topology-spread", "n3": "topology-spread"},
        ),
        # By default the pod's own node selector says over which nodes is spread.
        (pod("p", labels={"app": "web"}, **IN_ZONE_A, **spread()), [web("q", "n1")], {}),
        (pod("p", labels={"app": "web"}, **IN_ZONE_A, **spread(nodeAffinityPolicy="Ignore")), [web("q", "n1")], ZONE_A),
        # Another namespace's pods and those that are on their way out do not count,
        # an empty selector counts nobody.
        (pod("p", labels={"app": "web"}, **spread()), [web("q", "n1", namespace="other")], {}),
        (pod("p", labels={"app": "web"}, **spread(labelSelector={})), [web("q", "n1")], {}),
        # Only those of the same version.
        (pod("p", labels={"app": "web", "v": "2"}, **spread(matchLabelKeys=["v", "none"])), [web("q", "n1")], {}),
    ],
)
def test_spread_keeps_a_pod_off_as_kube_scheduler_has_it(
    wanted: dict[str, Any], present: list[dict[str, Any]], expected: dict[str, str]
) -> None:
    """The skew that the pod would make, over the nodes that count, of the pods that count."""
    assert refusals(wanted, *present) == expected
    assert refusals(wanted, *reversed(present)) == expected


def test_spread_ignores_pods_that_are_being_deleted() -> None:
    """They are gone soon; affinity and ports still count them."""
    leaving = web("q", "n1")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    assert refusals(pod("p", labels={"app": "web"}, **spread()), leaving) == {}
    assert refusals(pod("p", **near(HOST, anti=True)), leaving) == {"n1": "pod-anti-affinity"}


@pytest.mark.parametrize(("policy", "expected"), [("Ignore", ZONE_A), ("Honor", {})])
def test_spread_counts_tainted_nodes_unless_told_otherwise(policy: str, expected: dict[str, str]) -> None:
    """With `Honor` a domain that the pod cannot go to does not hold it to its emptiness."""
    taints = {"n3": {"key": "k", "effect": "NoSchedule"}}

    assert (
        refusals(pod("p", labels={"app": "web"}, **spread(nodeTaintsPolicy=policy)), web("q", "n1"), taints=taints)
        == expected
    )


@pytest.mark.parametrize(
    ("wanted", "other", "expected"),
    [
        (pod("p", **port(80)), port(80), {"n2": "host-port-taken"}),
        (pod("p", **near(HOST, anti=True)), {"labels": {"app": "web"}}, {"n2": "pod-anti-affinity"}),
        (pod("p", labels={"app": "web"}), near(HOST, anti=True), {"n2": "anti-affinity-of-others"}),
        (pod("p", labels={"app": "web"}, **spread()), {"labels": {"app": "web"}}, ZONE_A),
    ],
)
def test_pod_counts_where_it_is(wanted: dict[str, Any], other: dict[str, Any], expected: dict[str, str]) -> None:
    """One that waits counts nowhere, and so does one that has gone."""
    assert refusals(wanted, pod("q", **other)) == {}
    assert refusals(wanted, pod("q", node="n2", **other)) == expected
    assert refusals(wanted, pod("q", node="n2", **other), pod("q", **other)) == {}


@pytest.mark.parametrize(
    ("operator", "values", "labels", "expected"),
    [
        ("In", ["1"], {"a": "1"}, True),
        ("In", ["1"], {}, False),
        ("NotIn", ["1"], {}, True),
        ("NotIn", ["1"], {"a": "1"}, False),
        ("Exists", [], {"a": ""}, True),
        ("DoesNotExist", [], {"a": ""}, False),
        ("Near", [], {"a": ""}, False),
    ],
)
def test_label_selector_selects_as_apimachinery_has_it(
    operator: str, values: list[str], labels: dict[str, str], expected: bool
) -> None:
    """Each operator; one that nobody knows never holds."""
    selector = read_as(
        {"matchExpressions": [{"key": "a", "operator": operator, "values": values}]}, LabelSelector, where="test"
    )

    assert selects(selector, labels) is expected
    assert not selects(with_labels(selector, {"b": "1"}), labels)


def test_pod_with_terms_that_cannot_be_read_is_refused() -> None:
    """The message names the field."""
    garbage: dict[str, Any] = {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": 7}}}

    with pytest.raises(ContractError, match="affinity"):
        refusals(pod("p", **garbage))
