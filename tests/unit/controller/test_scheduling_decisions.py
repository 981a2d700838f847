"""The extension points of scheduling a pod with claims: each decision on frozen values, with its
reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from topobus.engine.allocation.values import (
    Allocated,
    Fault,
    Node,
    NoFit,
    Outcome,
)
from topobus.engine.claims import reservations as objects
from topobus.engine.claims.attempts import Attempt, with_attempt
from topobus.engine.claims.objects import Claim, Pod
from topobus.engine.claims.reservations import PodRef
from topobus.engine.scheduling.decisions import (
    Blocked,
    NodeFit,
    NodeMiss,
    PodClaim,
    PodPlan,
    TakeBack,
    enough_nodes,
    filter_node,
    filter_outcome,
    post_filter,
    pre_filter,
    static_miss,
)
from topobus.engine.scheduling.score import (
    NodeScore,
    preference,
    rank,
    score_node,
)
from topobus.formats.kubernetes.objects import DELETE_PROTECTION
from topobus.formats.kubernetes.resource import AllocationResult
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError
from topobus.values.idset import NodeSet
from topobus.values.outcome import Reason

POD = ApiObject(
    api_version="v1",
    kind="Pod",
    metadata={"name": "trainer", "namespace": "team", "uid": "pod-1"},
    spec={
        "containers": [{"name": "main"}],
        "resourceClaims": [
            {"name": "own", "resourceClaimTemplateName": "t"},
            {"name": "shared", "resourceClaimName": "common"},
        ],
    },
    status={"resourceClaimStatuses": [{"name": "own", "resourceClaimName": "trainer-own-1"}]},
)
WHO = PodRef("team", "trainer", "pod-1")
OWNED: dict[str, Any] = {"ownerReferences": [{"kind": "Pod", "name": "trainer", "uid": "pod-1", "controller": True}]}


def _wire(node: str | None, *devices: str, request: str = "r") -> dict[str, Any]:
    results = [
        {"request": request, "driver": "gpu.example.com", "pool": node or "net", "device": device}
        for device in devices or ("d0",)
    ]
    bound = {
        "nodeSelector": {
            "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]
        }
    }
    return {"devices": {"results": results}} | (bound if node else {})


def _allocation(node: str | None, *devices: str, request: str = "r") -> AllocationResult:
    return read_as(_wire(node, *devices, request=request), AllocationResult, where="allocation")


def _claim(name: str, *, allocation: Any = None, users: Sequence[str] = (), **metadata: Any) -> ApiObject:
    status: dict[str, Any] = {}
    if allocation is not None:
        status["allocation"] = allocation
    if users:
        status["reservedFor"] = [{"resource": "pods", "name": f"p-{uid}", "uid": uid} for uid in users]
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": name, "namespace": "team", "uid": f"uid-{name}", **metadata},
        spec={"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu"}}]}},
        status=status,
    )


def _state(*claims: ApiObject) -> dict[str, Claim]:
    return {claim.metadata["name"]: Claim(claim) for claim in claims}


def _plan(claims: Mapping[str, Claim], **how: Any) -> PodPlan:
    plan = pre_filter(Pod(POD), claims.get, **how)
    assert isinstance(plan, PodPlan), plan
    return plan


def _codes(answer: object) -> list[str]:
    assert isinstance(answer, Blocked), answer
    return [reason.code for reason in answer.reasons]


def _found(node: Node, claims: tuple[PodClaim, ...]) -> Outcome:
    return Allocated(tuple(_allocation(node.name, f"{node.name}-d{index}") for index, _ in enumerate(claims)), 1)


def test_pre_filter_gives_pending_and_allocated_claims_when_all_is_well() -> None:
    """A pod goes on with its claims in its own order, told apart."""
    plan = _plan(_state(_claim("trainer-own-1", **OWNED), _claim("common", allocation=_wire("n2"), users=["other"])))

    assert [claim.name for claim in plan.claims] == ["trainer-own-1", "common"]
    assert [pod_claim.name for pod_claim in plan.pending] == ["trainer-own-1"]
    assert [pod_claim.name for pod_claim in plan.allocated] == ["common"]
    assert not plan.is_reserved


@pytest.mark.parametrize(
    ("common", "code"),
    [
        (None, "claim-missing"),
        (_claim("common", deletionTimestamp="2026-01-01T00:00:00Z"), "claim-deleting"),
        (_claim("common", users=["other"]), "claim-reserved"),
        (_claim("common", allocation=_wire("n1"), users=[f"u{index}" for index in range(256)]), "claim-full"),
        (_claim("common", annotations={objects.ALLOCATION_MODE_ANNOTATION: "Soon"}), "malformed"),
    ],
    ids=["missing", "deleting", "reserved-unallocated", "256-users", "unknown-mode"],
)
def test_pre_filter_blocks_when_a_claim_cannot_be_used(common: ApiObject | None, code: str) -> None:
    """Each thing that no node can mend is told with its own code."""
    claims = [_claim("trainer-own-1", **OWNED), *([common] if common is not None else [])]

    assert _codes(pre_filter(Pod(POD), _state(*claims).get)) == [code]


def test_pre_filter_goes_on_when_the_claim_is_full_of_which_it_is_a_part() -> None:
    """The 256th user of a claim is a user: it does not wait for a place that it has."""
    users = ["pod-1", *(f"u{index}" for index in range(255))]
    full = _claim("common", allocation=_wire("n1"), users=users)

    assert _plan(_state(_claim("trainer-own-1", allocation=_wire("n1"), users=["pod-1"], **OWNED), full)).is_reserved


def test_pre_filter_blocks_when_claims_are_not_made_or_are_anothers() -> None:
    """A template's claim is waited for.

    An object of its name that is not the pod's is never taken.
    """
    fresh = ApiObject(api_version="v1", kind="Pod", metadata=POD.metadata, spec=POD.spec)
    common = _claim("common")

    assert _codes(pre_filter(Pod(fresh), _state(common).get)) == ["claim-not-made"]
    assert _codes(pre_filter(Pod(POD), _state(_claim("trainer-own-1"), common).get)) == ["claim-of-another"]


def test_pre_filter_blocks_when_somebody_allocates_the_claim_now() -> None:
    """What is in flight is not allocated a second time."""
    attempt = Attempt(number=1, node="n1", allocation=_allocation("n1", "d0"))
    state = _state(_claim("trainer-own-1", **OWNED), with_attempt(_claim("common"), attempt))

    assert _codes(pre_filter(Pod(POD), state.get)) == ["claim-in-flight"]


def test_pre_filter_leaves_an_entry_out_when_the_status_says_that_it_needs_none() -> None:
    """A null name in resourceClaimStatuses is an answer: no claim is needed."""
    pod = ApiObject(
        api_version="v1",
        kind="Pod",
        metadata=POD.metadata,
        spec=POD.spec,
        status={"resourceClaimStatuses": [{"name": "own"}]},
    )
    plan = pre_filter(Pod(pod), _state(_claim("common")).get)

    assert isinstance(plan, PodPlan)
    assert [claim.name for claim in plan.claims] == ["common"]


def test_pre_filter_allocates_an_immediate_claim_when_it_is_still_free() -> None:
    """A claim that is free when its pod comes is best allocated where the pod fits."""
    immediate = _claim("common", annotations={objects.ALLOCATION_MODE_ANNOTATION: "Immediate"})
    plan = _plan(_state(_claim("trainer-own-1", **OWNED), immediate))

    assert [pod_claim.name for pod_claim in plan.pending] == ["trainer-own-1", "common"]


def test_filter_allocates_pending_claims_together_when_the_node_is_right() -> None:
    """On the node of the allocated claim the others are searched for, all at once."""
    plan = _plan(_state(_claim("trainer-own-1", **OWNED), _claim("common", allocation=_wire("n1"))))
    asked: list[tuple[str, list[str]]] = []

    def search(node: Node, claims: tuple[PodClaim, ...]) -> Outcome:
        asked.append((node.name, [claim.name for claim in claims]))
        return _found(node, claims)

    fit, miss = filter_node(plan, Node("n1"), search), filter_node(plan, Node("n2"), search)

    assert isinstance(fit, NodeFit)
    assert asked == [("n1", ["trainer-own-1"])]
    assert isinstance(miss, NodeMiss)
    assert miss.unavailable == {"common"}
    assert isinstance(miss.outcome, NoFit)
    assert miss.outcome.reasons[0].message == "node n2: ResourceClaim team/common is allocated for node n1"


def test_filter_searches_nothing_when_all_claims_are_allocated() -> None:
    """A network-attached claim is usable anywhere; with nothing pending every node fits."""
    plan = _plan(
        _state(_claim("trainer-own-1", allocation=_wire(None), **OWNED), _claim("common", allocation=_wire(None)))
    )

    def search(node: Node, claims: tuple[PodClaim, ...]) -> Outcome:
        raise AssertionError(f"searched {node} for {claims}")

    assert filter_node(plan, Node("n1"), search) == NodeFit("n1")


def test_filter_honours_labels_when_the_node_selector_has_some() -> None:
    """An allocation for a group of nodes is usable on each node with the label."""
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
    wire = {"devices": {"results": []}, "nodeSelector": {"nodeSelectorTerms": terms}}
    plan = _plan(_state(_claim("trainer-own-1", allocation=wire, **OWNED), _claim("common", allocation=_wire(None))))

    assert isinstance(filter_node(plan, Node("n1", {"zone": "a"}), _found), NodeFit)
    assert isinstance(filter_node(plan, Node("n2", {"zone": "b"}), _found), NodeMiss)


def test_filter_skips_a_node_when_it_refused_the_pod() -> None:
    """The reason of the refusal is what people are told of that node."""
    plan = _plan(_state(_claim("trainer-own-1", **OWNED), _claim("common")))
    missed = static_miss(plan, Node("n1"), refused=Reason(code="refused", message="node n1 refused it"))

    assert isinstance(missed, NodeMiss)
    assert isinstance(missed.outcome, NoFit)
    assert missed.outcome.reasons[0].message == "node n1 refused it"
    assert not missed.unavailable


def test_filter_says_everywhere_when_the_claim_itself_is_wrong() -> None:
    """An unknown class ends the round: no other node knows it either."""
    wrong = Fault(Reason(code="unknown-class", message="there is no DeviceClass"), 0)
    plan = _plan(_state(_claim("trainer-own-1", **OWNED), _claim("common")))

    missed = filter_outcome(plan, "n1", wrong)
    assert isinstance(missed, NodeMiss)
    assert missed.is_everywhere


def test_post_filter_takes_back_one_claim_when_several_stand_in_the_way() -> None:
    """Exactly one allocation goes at a time, the first by name among those that nobody else has
    reserved.
    """
    plan = _plan(
        _state(_claim("trainer-own-1", allocation=_wire("n1"), **OWNED), _claim("common", allocation=_wire("n2")))
    )
    misses = [
        missed for name in ("n1", "n2", "n3") if isinstance(missed := filter_node(plan, Node(name), _found), NodeMiss)
    ]

    answer = post_filter(plan, misses)

    assert isinstance(answer, TakeBack)
    assert answer.claim.name == "common"
    assert "allocated for node n2" in answer.why


def test_post_filter_leaves_claims_alone_when_others_use_them_or_they_are_not_in_the_way() -> None:
    """Another pod's reservation protects a claim; one that every node can use is not the reason."""
    state = _state(
        _claim("trainer-own-1", allocation=_wire(None), **OWNED),
        _claim("common", allocation=_wire("n2"), users=["pod-1", "other"]),
    )
    plan = _plan(state)
    misses = [missed for name in ("n1", "n3") if isinstance(missed := filter_node(plan, Node(name), _found), NodeMiss)]

    assert _codes(post_filter(plan, misses)) == ["claim-elsewhere", "claim-elsewhere"]


def test_post_filter_takes_back_when_only_this_pod_has_reserved_it() -> None:
    """The pod's own reservation does not protect a claim from the pod's own scheduling."""
    plan = _plan(_state(_claim("trainer-own-1", allocation=_wire("n1"), users=["pod-1"], **OWNED), _claim("common")))
    missed = filter_node(plan, Node("n2"), _found)

    assert isinstance(missed, NodeMiss)
    assert isinstance(post_filter(plan, [missed]), TakeBack)


def test_reservation_is_undone_when_the_pod_is_unreserved() -> None:
    """Reserve and Unreserve are inverse, twice is once, and other pods' entries stay."""
    shared = _claim("common", allocation=_wire("n1"), users=["other"])
    reserved = objects.with_reservation(shared, WHO)
    assert isinstance(reserved, ApiObject)

    assert [consumer.uid for consumer in objects.consumers_of(reserved)] == ["other", "pod-1"]
    assert objects.with_reservation(reserved, WHO) is reserved
    assert objects.without_reservations(reserved, (WHO.uid,)) == shared
    assert objects.without_reservations(shared, (WHO.uid,)) is shared


def test_reservation_is_refused_when_the_claim_is_full() -> None:
    """The 257th user is told so, and nothing is written."""
    full = _claim("common", allocation=_wire("n1"), users=[f"u{index}" for index in range(256)])
    answer = objects.with_reservation(full, WHO)

    assert isinstance(answer, Reason)
    assert answer.facts["reserved_for"] == 256


def test_bound_allocation_says_all_in_one_write_when_a_pod_is_bound() -> None:
    """Allocation, reservation and condition stand in one version: no
    crash can come between them.
    """
    bound = objects.with_bound_allocation(_claim("common"), _allocation("n1", "d3"), WHO, now="2026-01-01T00:00:00Z")

    assert isinstance(bound, ApiObject)
    assert bound.status["allocation"]["devices"]["results"][0]["device"] == "d3"
    assert bound.status["reservedFor"] == [{"resource": "pods", "name": "trainer", "uid": "pod-1"}]


def test_taken_back_claim_holds_nothing_when_it_is_written() -> None:
    """No allocation, no users, no finalizer; the condition says why."""
    held = _claim("common", allocation=_wire("n1"), users=["pod-1"], finalizers=[DELETE_PROTECTION])
    freed = objects.without_allocation(held, why="pod team/trainer fits nowhere", now="2026-01-01T00:00:00Z")

    assert freed.status.keys() == {"conditions"}
    assert freed.status["conditions"][0]["reason"] == "TakenBack"
    assert "finalizers" not in freed.metadata


def test_pod_names_its_node_when_it_is_bound() -> None:
    """PostBind's last word stands where kube-scheduler writes it."""
    bound = objects.with_node(POD, "n1", now="2026-01-01T00:00:00Z")

    assert objects.node_of_pod(POD) == ""
    assert objects.node_of_pod(bound) == "n1"
    condition = bound.status["conditions"][0]
    assert (condition["type"], condition["status"]) == ("PodScheduled", "True")
    assert bound.status["resourceClaimStatuses"] == POD.status["resourceClaimStatuses"]


def test_claim_uses_are_refused_when_the_pod_is_malformed() -> None:
    """A pod that nobody can read is an error with its path, not an empty list."""
    with pytest.raises(ContractError, match=r"Pod team/trainer: spec.*resourceClaims"):
        objects.claim_uses(
            ApiObject(api_version="v1", kind="Pod", metadata=POD.metadata, spec={"resourceClaims": "all"})
        )


def test_score_prefers_early_alternatives_when_nodes_fit() -> None:
    """The first alternative gives 8 points, each later one a point less.

    Alignment decides only among equals.
    """
    claim = _claim("common")
    claim.spec["devices"]["requests"] = [
        {
            "name": "r",
            "firstAvailable": [{"name": "big", "deviceClassName": "gpu"}, {"name": "small", "deviceClassName": "gpu"}],
        }
    ]
    plan = _plan(_state(_claim("trainer-own-1", allocation=_wire(None), **OWNED), claim))
    near = {"a": NodeSet(0), "b": NodeSet(1)}
    fits = {
        "n1": NodeFit("n1", (_allocation("n1", "a", request="r/small"),)),
        "n2": NodeFit("n2", (_allocation("n2", "a", "b", request="r/big"),)),
        "n3": NodeFit("n3", (_allocation("n3", "a", request="r/big"),)),
    }
    scores = [score_node(plan, fit, numa_of=lambda device_id: near.get(device_id.device)) for fit in fits.values()]

    assert [score.preference for score in scores] == [7, 8, 8]
    assert rank(scores) == ("n3", "n2", "n1")


def test_score_is_by_name_when_nothing_tells_nodes_apart() -> None:
    """Without alternatives and places the first node by name wins, in any order of looking."""
    assert rank([NodeScore("n3"), NodeScore("n1"), NodeScore("n2")]) == ("n1", "n2", "n3")
    assert preference([], []) == 0


def test_enough_nodes_is_kube_schedulers_when_there_are_many() -> None:
    """All of a hundred nodes are looked at, and never fewer than a hundred."""
    assert [enough_nodes(count) for count in (1, 100, 150, 1000, 6000)] == [1, 100, 100, 420, 300]
