"""The negotiation over a pod's node: the scheduler's next step, and what drivers write."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from topobus.controller.classic.rules import negotiation
from topobus.controller.classic.rules.negotiation import (
    Negotiate,
    PodClaimView,
    Ready,
    TakeBack,
    Wait,
    next_step,
)
from topobus.formats.kubernetes.classic.classic import PodSchedulingSpec
from topobus.formats.kubernetes.classic.classic_handles import only_node
from topobus.formats.messages.messages import ApiObject

NODES = ("n1", "n2", "n3")
PENDING = PodClaimView("a", "claim-a", is_delayed=True)
OTHER = PodClaimView("b", "claim-b", is_delayed=True)
MINE = replace(OTHER, is_allocated=True, is_mine=True, nodes=only_node("n2"))
POD = ApiObject(api_version="v1", kind="Pod", metadata={"name": "p", "namespace": "team", "uid": "u"})


def _said(**nodes: str) -> dict[str, frozenset[str]]:
    return {entry: frozenset(text.split()) for entry, text in nodes.items()}


def test_one_pending_claim_gets_a_node_at_once() -> None:
    """Nobody else has to be heard: its driver says no by the unsuitable nodes, or allocates."""
    assert next_step([PENDING], NODES, None, {}) == Negotiate("n1", NODES)


def test_several_pending_claims_wait_until_every_driver_has_spoken() -> None:
    """A node is selected among those that were asked about and that nobody has refused."""
    asked = PodSchedulingSpec(potential_nodes=NODES)

    assert next_step([PENDING, OTHER], NODES, None, {}) == Negotiate("", NODES)
    assert next_step([PENDING, OTHER], NODES, asked, _said(a="n1")) == Negotiate("", NODES)
    assert next_step([PENDING, OTHER], NODES, asked, _said(a="n1", b="n2")) == Negotiate("n3", NODES)


def test_selected_node_stays_until_it_is_refused() -> None:
    """What one driver has begun to allocate is not moved for a nicer node."""
    selected = PodSchedulingSpec(selected_node="n2", potential_nodes=NODES)

    assert next_step([PENDING], NODES, selected, _said(a="")) == Negotiate("n2", NODES)
    assert next_step([PENDING], NODES, selected, _said(a="n2")) == Negotiate("n1", NODES)


def test_crowd_of_pods_spreads_over_nodes() -> None:
    """Pods that come together would go from node to node together, each round refused but for a
    few.
    """
    assert next_step([PENDING], NODES, None, {}, {"n1": 2, "n2": 1}) == Negotiate("n3", NODES)


def test_no_node_is_selected_when_all_are_refused_and_the_context_stays() -> None:
    """Drivers go on looking, and say when a node becomes suitable."""
    step = next_step(
        [PENDING], NODES, PodSchedulingSpec(selected_node="n1", potential_nodes=NODES), _said(a="n1 n2 n3")
    )

    assert isinstance(step, Negotiate)
    assert (step.selected, step.potential) == ("", NODES)
    assert "n1, n2, n3" in step.reasons[0].message


def test_allocation_of_the_pods_own_is_taken_back_when_no_node_is_left() -> None:
    """Only a delayed one that nobody else uses; the pod's other claim cannot be had where it is."""
    stuck = [PENDING, MINE]

    assert next_step(stuck, NODES, None, _said(a="n2")) == TakeBack(
        "claim-b", next_step(stuck, NODES, None, _said(a="n2")).reasons
    )  # type: ignore[union-attr]
    assert isinstance(
        next_step([PENDING, replace(MINE, is_used_by_others=True)], NODES, None, _said(a="n2")), Negotiate
    )
    assert isinstance(next_step([PENDING, replace(MINE, is_delayed=False)], NODES, None, _said(a="n2")), Negotiate)
    assert isinstance(next_step([replace(MINE, is_delayed=False)], ("n1",), None, {}), Wait)


@pytest.mark.parametrize(
    ("claim", "code"),
    [
        (replace(MINE, is_mine=False), "claim-in-use"),
        (replace(PENDING, is_delayed=False), "waits-for-allocation"),
    ],
)
def test_pod_waits_when_a_claim_is_not_its_to_negotiate(claim: PodClaimView, code: str) -> None:
    """A claim in use elsewhere, or one that is allocated at once, changes by itself."""
    step = next_step([claim], NODES, None, {})

    assert isinstance(step, Wait)
    assert step.reasons[0].code == code


def test_pod_is_ready_on_the_nodes_where_all_its_claims_can_be_used() -> None:
    """A claim without nodes can be used anywhere."""
    anywhere = replace(PENDING, is_allocated=True, is_free=True)

    assert next_step([anywhere, MINE], NODES, None, {}) == Ready(("n2",))
    assert next_step([anywhere], NODES, None, {}) == Ready(NODES)
    assert next_step([replace(PENDING, nodes=only_node("n3"))], NODES, None, {}) == Negotiate("n3", ("n3",))


def test_potential_nodes_are_those_that_nobody_refused_when_they_are_too_many() -> None:
    """128 fit: a pod must not ask about the same full nodes for ever."""
    nodes = tuple(f"n{index:03d}" for index in range(200))
    full = " ".join(nodes[:100])

    step = next_step([PENDING], nodes, None, _said(a=full))

    assert isinstance(step, Negotiate)
    assert (len(step.potential), step.potential[0], step.selected) == (128, "n100", "n100")


def test_drivers_write_their_own_entries_and_never_lose_the_selected_node() -> None:
    """An empty list says that the driver has looked; 128 nodes fit."""
    nodes = [f"n{index:03d}" for index in range(129)]
    context = msgspec.structs.replace(
        negotiation.context_for(POD),
        spec={"selectedNode": "n128", "potentialNodes": nodes[:128]},
        status={"resourceClaims": [{"name": "b", "unsuitableNodes": ["n1"]}]},
    )

    api_object = negotiation.with_unsuitable(context, {"a": nodes, "c": []})

    (first, second, third) = api_object.status["resourceClaims"]
    assert (len(first["unsuitableNodes"]), first["unsuitableNodes"][-1]) == (128, "n128")
    assert (second, third) == ({"name": "b", "unsuitableNodes": ["n1"]}, {"name": "c"})
    assert negotiation.unsuitable_by_claim(api_object)["c"] == frozenset()


def test_context_is_named_like_its_pod_and_owned_by_it() -> None:
    """Whoever finds it knows for which pod it is, and for which one of that name."""
    context = negotiation.context_for(POD)

    assert (context.metadata["namespace"], context.metadata["name"]) == ("team", "p")
    assert context.metadata["ownerReferences"][0]["uid"] == "u"


def test_pods_that_hold_one_claim_each_do_not_wait_in_a_ring() -> None:
    """Of two pods with the same two claims, one allocated for each, the one that waits for the
    first by name gives its own up; the other keeps it and waits.
    """
    other_pod_claim_view = replace(PENDING, is_allocated=True, is_used_by_others=True)
    own_pod_claim_view = replace(PENDING, is_allocated=True, is_mine=True)
    selected = PodSchedulingSpec(selected_node="n2", potential_nodes=NODES)

    gives = next_step([other_pod_claim_view, MINE], NODES, PodSchedulingSpec(potential_nodes=NODES), {})
    first = next_step([other_pod_claim_view, MINE], NODES, selected, {})
    keeps = next_step([own_pod_claim_view, replace(MINE, is_mine=False, is_used_by_others=True)], NODES, selected, {})

    assert isinstance(gives, TakeBack)
    assert gives.claim == "claim-b"
    assert isinstance(first, Negotiate)  # or its driver would allocate it there again
    assert (first.selected, first.potential) == ("", NODES)
    assert isinstance(keeps, Wait)


def test_pod_keeps_what_others_use_too_when_it_waits() -> None:
    """A claim that another pod has reserved, or that was allocated at once, is not given up."""
    pod_claim_view = replace(PENDING, is_allocated=True, is_used_by_others=True)

    for kept in (replace(MINE, is_used_by_others=True), replace(MINE, is_delayed=False)):
        assert isinstance(next_step([pod_claim_view, kept], NODES, None, {}), Wait)
