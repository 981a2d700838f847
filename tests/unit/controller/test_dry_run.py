"""Dry runs and their advice: where claims would go, what comes nearest, and what would fit, each
piece proved by a search.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from support.alignment_nodes import dgx_facts
from topobus.controller.dry_run.rules.run import DryRun
from topobus.controller.dry_run.rules.situation import DryAnswer, Situation
from topobus.engine.allocation.suggestions import nearest, would_fit
from topobus.engine.allocation.values import Allocated, Mode, NoFit
from topobus.engine.cel.selector import CelCompiler
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError
from topobus.values.outcome import Reason
from unit.controller.allocation import COMPILER, claim, given, gpus, request, slice_of, solve

ROOT = "resource.kubernetes.io/pcieRoot"


def dry_run(situation: Situation, compiler: CelCompiler) -> tuple[DryAnswer, ...]:
    """Answer all that is wanted."""
    return DryRun(situation, compiler).answer_all(situation.wanted)


def _slice(node: str, count: int) -> ApiObject:
    devices = [{"name": f"gpu-{index}"} for index in range(count)]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.example.com", "pool": pool, "nodeName": node, "devices": devices}
    return ApiObject(api_version="resource.k8s.io/v1", kind="ResourceSlice", metadata={"name": node}, spec=spec)


def _claim(name: str, count: int, **status: Any) -> ApiObject:
    asked = {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu", "count": count}}]}}
    return ApiObject(
        api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata={"name": name}, spec=asked, status=status
    )


CLASS = ApiObject(
    api_version="resource.k8s.io/v1",
    kind="DeviceClass",
    metadata={"name": "gpu"},
    spec={"selectors": [{"cel": {"expression": 'device.driver == "gpu.example.com"'}}]},
)
NODES = (_slice("n1", 2), _slice("n2", 4), CLASS)


def _run(*wanted: ApiObject, objects: tuple[ApiObject, ...] = NODES) -> tuple[DryAnswer, ...]:
    return dry_run(Situation(wanted=wanted, objects=objects), COMPILER)


def _devices(answer: DryAnswer) -> list[str]:
    return [
        granted_device.device for result in answer.allocations.values() for granted_device in result.devices.results
    ]


def test_dry_run_names_node_and_devices_when_a_claim_fits() -> None:
    """Claims are answered one after the other: the second sees what the first would take."""
    first, second, third = _run(_claim("a", 2), _claim("b", 3), _claim("c", 1))

    assert (first.condition, first.node, _devices(first)) == ("Allocated", "n1", ["gpu-0", "gpu-1"])
    assert (second.node, _devices(second)) == ("n2", ["gpu-0", "gpu-1", "gpu-2"])
    assert (third.node, _devices(third)) == ("n2", ["gpu-3"])


def test_dry_run_says_nearest_miss_and_what_would_fit_when_nothing_does() -> None:
    """Each node is told, then the one that lacks least, then what was found to fit there."""
    (answer,) = _run(_claim("big", 5))

    codes = [reason.code for reason in answer.reasons]
    assert codes == ["too-few-devices", "too-few-devices", "nearest-miss", "would-fit"]
    assert answer.reasons[2].message == "nearest miss: node n2 has 4 of 5 devices for request r"
    assert answer.reasons[3].message == "would fit on node n2 with 4 devices instead of 5 for request r"
    assert answer.reasons[3].facts["count"] == 4


def test_dry_run_names_who_would_have_to_let_go_when_devices_are_held() -> None:
    """Claims that are allocated in the file hold their devices; only those in the way are named."""
    results = [
        {"request": "r", "driver": "gpu.example.com", "pool": "n2", "device": f"gpu-{index}"} for index in (0, 1)
    ]
    taker = _claim("taker", 2, allocation={"devices": {"results": results}})
    (answer,) = _run(_claim("all", 4), objects=(*NODES, taker))

    freed = [reason for reason in answer.reasons if reason.facts.get("change") == "free"]
    assert [reason.message for reason in freed] == [
        "would fit on node n2 when claim default/taker (2 devices) releases them"
    ]


def test_dry_run_puts_claims_of_one_pod_on_one_node() -> None:
    """A pod's claims, named and by template, are answered together.

    The template's claim is named after pod and entry.
    """
    template = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaimTemplate",
        metadata={"name": "t"},
        spec={"spec": _claim("x", 2).spec},
    )
    pod = ApiObject(
        api_version="v1",
        kind="Pod",
        metadata={"name": "p"},
        spec={
            "containers": [{"name": "c"}],
            "resourceClaims": [
                {"name": "a", "resourceClaimName": "one"},
                {"name": "b", "resourceClaimTemplateName": "t"},
            ],
        },
    )
    (answer,) = _run(pod, _claim("one", 1), objects=(*NODES, template))

    assert answer.name == "Pod default/p"
    assert answer.node == "n2"
    assert sorted(answer.allocations) == ["default/one", "default/p-b"]
    assert len(set(_devices(answer))) == 3


def _pod(name: str, resources: dict[str, Any], *claims: str, **spec: Any) -> ApiObject:
    uses = [{"name": claim, "resourceClaimName": claim} for claim in claims]
    return ApiObject(
        api_version="v1",
        kind="Pod",
        metadata={"name": name},
        spec={"containers": [{"name": "c", "resources": resources}], "resourceClaims": uses, **spec},
    )


def test_dry_run_goes_where_a_pods_other_claim_is() -> None:
    """A claim that is allocated already binds its pod to its node, as the controller has it."""
    result = {"request": "r", "driver": "gpu.example.com", "pool": "n2", "device": "gpu-0"}
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}]
    here = _claim(
        "here", 1, allocation={"devices": {"results": [result]}, "nodeSelector": {"nodeSelectorTerms": terms}}
    )
    (answer,) = _run(_pod("p", {}, "here", "more"), here, _claim("more", 1))

    assert (answer.node, _devices(answer)) == ("n2", ["gpu-1"])


def test_dry_run_finds_a_place_for_extended_resources() -> None:
    """What a class serves under a resource's name becomes a claim of the pod, as the controller
    makes it.
    """
    spec = {**CLASS.spec, "extendedResourceName": "example.com/gpu"}
    served = ApiObject(api_version=CLASS.api_version, kind="DeviceClass", metadata={"name": "gpu"}, spec=spec)
    (answer,) = _run(_pod("p", {"limits": {"example.com/gpu": 3}}), objects=(*NODES[:2], served))

    assert (answer.node, list(answer.allocations)) == ("n2", ["default/p-extended-resources"])
    assert _devices(answer) == ["gpu-0", "gpu-1", "gpu-2"]


def test_dry_run_leaves_out_what_nobody_can_read() -> None:
    """One slice of somebody else's that is malformed is told, and takes no other away."""
    broken = _slice("n0", 1)
    broken.spec["devices"][0]["name"] = "NOT A LABEL"
    run = DryRun(Situation(wanted=(), objects=(broken, *NODES)), COMPILER)
    (answer,) = run.answer_all((_claim("a", 1),))

    assert (answer.node, len(run.faults)) == ("n1", 1)
    assert "ResourceSlice n0" in run.faults[0]


def test_dry_run_tries_the_other_nodes_when_one_cannot_be_worked_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that fails in a way that nobody thought of is told as the controller tells it, and
    takes no other down.
    """
    run = DryRun(Situation(wanted=(), objects=NODES), COMPILER)
    real = run.state.input_for

    def input_for(node: str, *arguments: Any, **options: Any) -> Any:
        if node == "n1":
            raise TypeError("'int' object is not a mapping")
        return real(node, *arguments, **options)

    monkeypatch.setattr(run.state, "input_for", input_for)
    served, refused = run.answer_all((_claim("a", 1), _claim("b", 5)))

    assert (served.condition, served.node) == ("Allocated", "n2")
    assert [reason.code for reason in refused.reasons][:2] == ["too-few-devices", "node-failed"]


def test_dry_run_takes_the_node_with_the_better_alternative_for_a_pod() -> None:
    """As both schedulers do, a pod's nodes are compared where its claim names alternatives.

    A claim of its own goes to the first node that serves it.
    """
    either = _claim("a", 1)
    alternatives = [
        {"name": "four", "deviceClassName": "gpu", "count": 4},
        {"name": "one", "deviceClassName": "gpu", "count": 1},
    ]
    either.spec["devices"]["requests"] = [{"name": "r", "firstAvailable": alternatives}]
    (with_pod,) = _run(_pod("p", {}, "a"), either)
    (alone,) = _run(either)

    assert (with_pod.node, len(_devices(with_pod))) == ("n2", 4)
    assert (alone.node, len(_devices(alone))) == ("n1", 1)


def test_dry_run_tries_the_nodes_first_that_a_pod_of_a_cluster_prefers() -> None:
    """Of two nodes that serve the claim the one is named that the pod's node affinity prefers."""
    labelled = ApiObject(api_version="v1", kind="Node", metadata={"name": "n2", "labels": {"zone": "b"}})
    term = {"weight": 1, "preference": {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}
    pods = (_pod("plain", {}, "a"), _pod("picky", {}, "b", affinity=affinity))
    plain, picky = _run(*pods, _claim("a", 1), _claim("b", 1), objects=(*NODES, labelled))

    assert (plain.node, picky.node) == ("n1", "n2")


def test_dry_run_asks_the_node_what_the_pod_itself_needs() -> None:
    """A pod whose claims fit and whose own CPUs do not is not said to be allocated."""
    machine, inventories = dgx_facts()
    parts: dict[str, Any] = {"machines": (machine,), "inventories": tuple(inventories.values())}
    claim_ = _claim("a", 1)
    claim_.spec["devices"]["requests"][0]["exactly"]["deviceClassName"] = "gpu.topobus.dev"
    answers = [
        dry_run(Situation(wanted=(_pod("p", {"limits": {"cpu": cpus}}, "a"), claim_), **parts), COMPILER)[0]
        for cpus in (4, 500)
    ]

    assert [dry_answer.condition for dry_answer in answers] == ["Allocated", "DoesNotFit"]
    assert [reason.code for reason in answers[1].reasons] == ["not-enough-cpus"]


def test_dry_run_says_what_is_missing_when_a_pod_names_it() -> None:
    """A pod whose claim is nowhere is bad content with a way on."""
    pod = ApiObject(
        api_version="v1",
        kind="Pod",
        metadata={"name": "p"},
        spec={"resourceClaims": [{"name": "a", "resourceClaimName": "gone"}]},
    )
    with pytest.raises(ContractError, match="there is no ResourceClaim default/gone") as raised:
        _run(pod)

    assert "same manifest" in raised.value.next_step


def test_nearest_prefers_fewest_lacking_then_order_when_nodes_miss() -> None:
    """Lacking one of two is nearer than lacking three of eight.

    Among equals the first node stays.
    """

    def miss(wanted: int, found_count: int) -> NoFit:
        return NoFit(
            (
                Reason(
                    code="too-few-devices", message="", facts={"wanted": wanted, "found": found_count, "request": "r"}
                ),
            ),
            1,
        )

    node_and_reason = nearest(["n1", "n2", "n3"], [miss(8, 5), miss(2, 1), miss(2, 1)])

    assert node_and_reason is not None
    assert node_and_reason[0] == "n2"
    assert nearest(["n1"], [Allocated((), 1)]) is None


@pytest.mark.parametrize(
    ("devices", "asked", "changes"),
    [
        (
            gpus(2, **{ROOT: ["a", "b"]}),
            claim(request(count=2), constraints=[{"matchAttribute": ROOT}]),
            ["count", "constraint"],
        ),
        (
            gpus(2, model=["x", "x"]),
            claim(request(where=["device.attributes['gpu.example.com'].model == 'y'"])),
            ["selector"],
        ),
        ([{"name": "d", "taints": [{"key": "k", "effect": "NoSchedule"}]}], claim(request()), ["tolerations"]),
    ],
    ids=["constraint", "selector", "taint"],
)
def test_advice_is_what_the_search_finds_when_the_claim_is_changed_so(
    devices: list[Any], asked: Any, changes: list[str]
) -> None:
    """Every piece of advice names one change under which there is a fit, and no other."""
    situation = given([slice_of(devices)], asked)
    assert isinstance(solve(situation), NoFit)

    assert [reason.facts["change"] for reason in would_fit(situation, solve)] == changes


def test_advice_is_none_when_no_one_change_helps() -> None:
    """A class without devices is not talked around."""
    assert would_fit(given([slice_of(gpus(1))], claim(request(device_class="nic", count=2))), solve) == ()


def _selecting(expression: str) -> ApiObject:
    asked = {"name": "r", "exactly": {"deviceClassName": "gpu", "selectors": [{"cel": {"expression": expression}}]}}
    spec = {"devices": {"requests": [asked]}}
    return ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata={"name": "a"}, spec=spec)


def _healthy_on(node: str) -> tuple[ApiObject, ...]:
    """Two nodes, of which one tells whether its device is healthy."""
    slices = []
    for name in ("n1", "n2"):
        plain = _slice(name, 1)
        attributes = {"healthy": {"bool": True}} if name == node else {}
        slices.append(
            structs.replace(plain, spec={**plain.spec, "devices": [{"name": "gpu-0", "attributes": attributes}]})
        )
    return (*slices, CLASS)


@pytest.mark.parametrize(
    ("node", "mode", "condition"),
    [
        ("n2", Mode.COMPATIBLE, "Invalid"),
        ("n2", Mode.CORRECTED, "Invalid"),
        ("n1", Mode.COMPATIBLE, "Invalid"),
        ("n1", Mode.CORRECTED, "Allocated"),
    ],
)
def test_selector_that_fails_on_a_device_ends_the_attempt_as_the_scheduler_has_it(
    node: str, mode: Mode, condition: str
) -> None:
    """kube-scheduler looks at all nodes of a small cluster and gives up.

    The controller at one after the other until one fits (kubernetes#135184).
    """
    wanted = _selecting("device.attributes['gpu.example.com'].healthy")

    (answer,) = dry_run(Situation(wanted=(wanted,), objects=_healthy_on(node), mode=mode), COMPILER)

    assert answer.condition == condition
    assert answer.node == ("n1" if condition == "Allocated" else "")


def test_shares_of_one_device_have_ids_of_their_own_when_several_claims_are_answered() -> None:
    """In a claim's status they tell shares apart."""
    plain = _slice("n1", 1)
    shared = {"name": "gpu-0", "allowMultipleAllocations": True, "capacity": {"memory": {"value": "10Gi"}}}
    objects = (structs.replace(plain, spec={**plain.spec, "devices": [shared]}), CLASS)

    def share(name: str) -> ApiObject:
        asked = {"name": "r", "exactly": {"deviceClassName": "gpu", "capacity": {"requests": {"memory": "2Gi"}}}}
        spec = {"devices": {"requests": [asked]}}
        return ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata={"name": name}, spec=spec)

    answers = _run(share("a"), share("b"), objects=objects)

    ids = [
        device.share_id
        for answer in answers
        for result in answer.allocations.values()
        for device in result.devices.results
    ]
    assert ids == ["SHARE-0", "SHARE-1"]
