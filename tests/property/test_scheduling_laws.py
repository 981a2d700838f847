"""Laws of scheduling pods with claims: what holds for any pods, claims and nodes, in any order of
coming and going.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from support.laws import examples
from topobus.engine.allocation.values import (
    ClaimToAllocate,
    DeviceId,
    Node,
    Outcome,
    Usage,
)
from topobus.engine.claims import reservations as objects
from topobus.engine.claims.objects import Claim, Pod
from topobus.engine.scheduling.decisions import (
    NodeFit,
    NodeMiss,
    PodClaim,
    PodPlan,
    TakeBack,
    filter_node,
    post_filter,
    pre_filter,
)
from topobus.engine.scheduling.score import rank, score_node
from topobus.formats.messages.messages import ApiObject
from unit.controller.allocation import given, gpus, slice_of, solve

NODES = ("n1", "n2", "n3")
NOW = "2026-01-01T00:00:00Z"


class Home:
    """Three nodes of some devices, and the claims as they are stored."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = dict(zip(NODES, sizes, strict=True))
        self.claims: dict[str, ApiObject] = {}
        self.bound: dict[str, str] = {}

    def held(self) -> list[DeviceId]:
        """List the devices of all allocations, each as often as it is there."""
        device_ids: list[DeviceId] = []
        for claim in self.claims.values():
            results = (claim.status.get("allocation") or {"devices": {"results": []}})["devices"]["results"]
            device_ids += [DeviceId(result["driver"], result["pool"], result["device"]) for result in results]
        return device_ids

    def search(self, node: Node, claims: tuple[PodClaim, ...]) -> Outcome:
        """Search a node with the real engine."""
        asked = tuple(ClaimToAllocate(claim.name, claim.spec, len(claims) > 1) for claim in claims)
        devices = slice_of(gpus(self.sizes[node.name]), pool=node.name, nodeName=node.name)
        return solve(
            replace(given([devices], *asked), node=node, usage=Usage(dict.fromkeys(self.held(), "another claim")))
        )

    def schedule(self, name: str, uses: tuple[str, ...], only: str) -> PodPlan | None:
        """Go through the points as a scheduler does, until the pod is bound or nothing helps.

        Gives the last plan.
        """
        entries = [{"name": use, "resourceClaimName": use} for use in uses]
        pod = ApiObject(
            api_version="v1",
            kind="Pod",
            metadata={"name": name, "namespace": "default", "uid": f"uid-{name}"},
            spec={"containers": [], "resourceClaims": entries},
        )
        for _ in range(len(uses) + 1):
            plan = pre_filter(Pod(pod), lambda use: Claim(self.claims[use]) if use in self.claims else None)
            if not isinstance(plan, PodPlan):
                return None
            seen = [filter_node(plan, Node(node), self.search) for node in NODES if only in ("", node)]
            fits = {answer.node: answer for answer in seen if isinstance(answer, NodeFit)}
            if fits:
                best = rank([score_node(plan, node_fit) for node_fit in fits.values()])[0]
                self.bind(plan, fits[best])
                return plan
            answer = post_filter(plan, [miss for miss in seen if isinstance(miss, NodeMiss)])
            if not isinstance(answer, TakeBack):
                return plan
            assert all(user.uid == plan.pod.uid for user in answer.claim.consumers)
            self.claims[answer.claim.name] = objects.without_allocation(
                answer.claim.claim.object, why=answer.why, now=NOW
            )
        return None

    def bind(self, plan: PodPlan, fit: NodeFit) -> None:
        """Write the new allocations, and a reservation into each claim."""
        new = iter(fit.results)
        for claim in plan.claims:
            if claim.allocation is None:
                bound = objects.with_bound_allocation(claim.claim.object, next(new), plan.pod, now=NOW)
            else:
                bound = objects.with_reservation(claim.claim.object, plan.pod)
            assert isinstance(bound, ApiObject)
            self.claims[claim.name] = bound
        self.bound[plan.pod.uid] = fit.node

    def leave(self, name: str) -> None:
        """Take a pod away."""
        who = objects.PodRef("default", name, f"uid-{name}")
        self.claims = {claim: objects.without_reservations(value, (who.uid,)) for claim, value in self.claims.items()}
        self.bound.pop(who.uid, None)


def _claim(name: str, count: int) -> ApiObject:
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": name, "namespace": "default", "uid": f"uid-{name}"},
        spec={"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu", "count": count}}]}},
    )


CLAIMS = ("a", "b", "c", "d")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["come", "come", "go"]),
        st.sampled_from(["p", "q", "r", "s"]),
        st.lists(st.sampled_from(CLAIMS), unique=True, min_size=1, max_size=3).map(tuple),
        st.sampled_from(["", "", *NODES]),
    ),
    max_size=12,
)


@settings(max_examples=examples(120), deadline=None)
@for_all(st.tuples(*[st.integers(0, 4)] * 3), st.tuples(*[st.integers(1, 3)] * 4), STEPS)
def test_devices_and_reservations_stay_right_when_pods_come_and_go(
    sizes: tuple[int, ...], counts: tuple[int, ...], steps: list[Any]
) -> None:
    """No device is given twice; all claims of a bound pod can be used on its node and name it.

    Nobody else's claim is ever taken back.
    """
    home = Home(sizes)
    home.claims = {name: _claim(name, count) for name, count in zip(CLAIMS, counts, strict=True)}
    uses: dict[str, tuple[str, ...]] = {}
    for what, name, wanted, only in steps:
        if what == "go":
            home.leave(name)
        elif f"uid-{name}" not in home.bound:
            uses[f"uid-{name}"] = wanted
            home.schedule(name, wanted, only)

        held = home.held()
        assert len(held) == len(set(held))
        for uid, node in home.bound.items():
            for use in uses[uid]:
                assert uid in {user.uid for user in objects.consumers_of(home.claims[use])}
                assert {result["pool"] for result in home.claims[use].status["allocation"]["devices"]["results"]} == {
                    node
                }


@settings(max_examples=examples(60), deadline=None)
@for_all(st.tuples(*[st.integers(0, 4)] * 3), st.tuples(*[st.integers(1, 3)] * 2))
def test_pod_is_bound_when_one_node_is_large_enough(sizes: tuple[int, ...], counts: tuple[int, ...]) -> None:
    """On empty nodes a pod is bound exactly when some node has devices enough for all of its
    claims.
    """
    home = Home(sizes)
    home.claims = {name: _claim(name, count) for name, count in zip(CLAIMS, counts, strict=False)}

    home.schedule("p", CLAIMS[: len(counts)], "")

    assert bool(home.bound) == (max(sizes) >= sum(counts))


@settings(max_examples=examples(60), deadline=None)
@for_all(st.integers(1, 3), st.sampled_from(NODES), st.sampled_from(NODES))
def test_pod_reaches_its_node_when_unreserved_claims_stand_elsewhere(count: int, first: str, second: str) -> None:
    """A claim that a pod left behind allocated is brought to the node that the next pod needs,
    whatever node that is.
    """
    home = Home((3, 3, 3))
    home.claims = {"a": _claim("a", count), "b": _claim("b", 1)}
    home.schedule("p", ("a",), first)
    home.leave("p")

    for _ in range(2):
        # A take-back frees one claim a round; the second try is the one that binds.
        home.schedule("q", ("a",), second)

    assert home.bound == {"uid-q": second}
    assert len(home.held()) == count
    assert msgspec.json.encode(home.claims["a"])
