"""The allocator at its edges: gates that are off, objects that nobody checked, devices of other
nodes, and requests larger than a claim may be.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from topobus.engine.allocation.bitset_allocator import make_bitset_plan
from topobus.engine.allocation.explanations import explain_nodes
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.allocation.node_selectors import node_matches
from topobus.engine.allocation.node_table import NodeTable, Numbers
from topobus.engine.allocation.pools import Slice, gather_pools
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.suggestions import would_fit
from topobus.engine.allocation.values import (
    Allocated,
    AllocationInput,
    DeviceId,
    Fault,
    Gate,
    Mode,
    Node,
    NoFit,
    Outcome,
    Usage,
)
from topobus.engine.cel.seam import facts_of
from topobus.formats.kubernetes.resource import Attribute, Capacity, DeviceClassSpec, NodeSelector, SliceDevice
from topobus.formats.kubernetes.shape import read_as
from topobus.values.outcome import Reason
from topobus.values.quantity import Quantity
from unit.controller.allocation import COMPILER, NODE, claim, device, given, gpus, request, slice_of, solve

ALL = frozenset(Gate)
MODEL = "device.attributes['gpu.example.com'].model"


def _codes(outcome: Outcome) -> list[str]:
    assert isinstance(outcome, NoFit), outcome
    return [reason.code for reason in outcome.reasons]


def _text(outcome: Outcome) -> str:
    assert isinstance(outcome, NoFit), outcome
    return summarize(outcome.reasons)


@pytest.mark.parametrize(
    ("operator", "values", "label", "is_met"),
    [
        ("In", ("a", "b"), "a", True),
        ("In", ("b",), "a", False),
        ("In", ("a",), None, False),
        ("NotIn", ("b",), "a", True),
        ("NotIn", ("a",), "a", False),
        ("NotIn", ("a",), None, True),
        ("Exists", (), "a", True),
        ("Exists", (), None, False),
        ("DoesNotExist", (), None, True),
        ("DoesNotExist", (), "a", False),
        ("Gt", ("3",), "4", True),
        ("Gt", ("3",), "3", False),
        ("Gt", ("-3",), "+2", True),
        ("Lt", ("3",), "2", True),
        ("Lt", ("3",), "3", False),
        ("Lt", ("3",), None, False),
        ("Gt", ("3",), "many", False),
        ("Gt", ("3",), "４", False),
        ("Gt", ("3",), " 4", False),
        ("Gt", ("three",), "4", False),
        ("Gt", (), "4", False),
        ("Near", ("a",), "a", False),
    ],
)
def test_node_matches_as_labels_are_selected_when_an_operator_is_given(
    operator: str, values: tuple[str, ...], label: str | None, is_met: bool
) -> None:
    """The operators of node selectors mean what they mean to the scheduler.

    What is no number is neither less nor more.
    """
    requirement = {"key": "zone", "operator": operator, "values": list(values)}
    selector = read_as({"nodeSelectorTerms": [{"matchExpressions": [requirement]}]}, NodeSelector, where="selector")
    node = Node(NODE, {"zone": label} if label is not None else {})

    assert node_matches(node, None, selector, is_everywhere=False) is is_met


@pytest.mark.parametrize(
    "spec",
    [{"sharedCounters": [{"name": "set", "counters": {}}], "nodeName": NODE}, {"perDeviceNodeSelection": True}],
    ids=["counters", "nodes-of-devices"],
)
def test_slice_is_not_seen_when_partitions_are_off(spec: dict[str, Any]) -> None:
    """As upstream: a slice of a field whose gate is off is none of the node's."""
    outcome = solve(
        given(
            [slice_of([device("part", allNodes=True)], **spec)],
            claim(request()),
            gates=ALL - {Gate.PARTITIONABLE_DEVICES},
        )
    )

    assert _codes(outcome) == ["too-few-devices"]
    assert _text(outcome).endswith("there is no device here")


def test_device_is_not_taken_when_it_draws_on_counters_that_are_off() -> None:
    """A device whose counters cannot be counted is left alone, and the gate is named."""
    drawing = device("part", consumesCounters=[{"counterSet": "set", "counters": {"memory": {"value": "1"}}}])

    outcome = solve(given([slice_of([drawing])], claim(request()), gates=ALL - {Gate.PARTITIONABLE_DEVICES}))

    assert f"{Gate.PARTITIONABLE_DEVICES} is off" in _text(outcome)


def test_device_is_not_selected_when_it_has_conditions_that_are_off() -> None:
    """A device that is ready only later is not taken where nobody would wait for it, and the gate
    is named.
    """
    later = device("later", bindingConditions=["ready"])

    outcome = solve(given([slice_of([later])], claim(request()), gates=ALL - {Gate.BINDING_CONDITIONS}))

    assert f"{Gate.BINDING_CONDITIONS} is off" in _text(outcome)


def test_alternatives_are_a_fault_when_their_gate_is_off() -> None:
    """A claim whose alternatives nobody may read fails as a whole, not on one node."""
    either = {"name": "r", "firstAvailable": [{"name": "a", "deviceClassName": "gpu", "count": 1}]}

    outcome = solve(given([slice_of(gpus(1))], claim(either), gates=ALL - {Gate.PRIORITIZED_LIST}))

    assert isinstance(outcome, Fault)
    assert (outcome.reason.code, outcome.is_local) == ("gate-off", False)


def test_miss_says_so_when_a_device_serves_another_node() -> None:
    """A slice that names a node for each device shows this node those of others, which are counted
    and told.
    """
    elsewhere, here = device("far", nodeName="node-2"), device("near", nodeName=NODE)

    outcome = solve(given([slice_of([elsewhere, here], perDeviceNodeSelection=True)], claim(request(count=2))))

    assert _text(outcome).endswith("1 device: it serves other nodes)")


def test_allocation_fails_when_a_node_selector_of_a_slice_has_several_terms() -> None:
    """Such a slice is against the API's rules; the claim could not say where its devices are."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [NODE]}]}

    outcome = solve(given([slice_of(gpus(1), nodeSelector={"nodeSelectorTerms": [term, term]})], claim(request())))

    assert isinstance(outcome, Fault)
    assert outcome.reason.code == "node-selector"
    assert "has 2 terms, wanted one" in outcome.reason.message


def test_fault_is_the_nodes_own_when_a_quantity_of_a_slice_is_none() -> None:
    """What one driver published wrongly ends the search on its node
    alone, and the text is shown.
    """
    counters = [{"name": "set", "counters": {"memory": {"value": "much"}}}]
    pool = [
        slice_of([], sharedCounters=counters, name="a", count=2, nodeName=NODE),
        slice_of(gpus(1), name="b", count=2),
    ]

    slices = solve(given(pool, claim(request())))
    capacity = solve(
        given([slice_of([device("dev-0", "much")])], claim(request(capacity={"requests": {"memory": "1Gi"}})))
    )

    assert isinstance(slices, Fault)
    assert (slices.reason.code, slices.is_local) == ("malformed-slice", True)
    assert isinstance(capacity, Fault)
    assert (capacity.reason.code, capacity.is_local) == ("malformed-quantity", True)
    assert "much" in slices.reason.message
    assert "much" in capacity.reason.message


def test_claim_is_a_fault_when_its_requests_are_more_devices_than_a_claim_may_have() -> None:
    """A claim has 32 devices at most, over all its requests; the devices for more are there."""
    outcome = solve(given([slice_of(gpus(40))], claim(request("a", count=20), request("b", count=20))))

    assert isinstance(outcome, Fault)
    assert outcome.reason.code == "claim-too-large"


def test_alternative_of_fewer_devices_is_taken_when_the_first_is_more_than_a_claim_may_have() -> None:
    """Too many devices rule out an alternative, not the request."""
    either = {
        "name": "b",
        "firstAvailable": [
            {"name": "many", "deviceClassName": "gpu", "count": 20},
            {"name": "few", "deviceClassName": "gpu", "count": 2},
        ],
    }

    outcome = solve(given([slice_of(gpus(40))], claim(request("a", count=20), either)))

    assert isinstance(outcome, Allocated)
    assert [result.request for result in outcome.results[0].devices.results[20:]] == ["b/few", "b/few"]


def test_first_alternative_is_given_up_when_it_leaves_too_little_room_for_the_next_request() -> None:
    """What is too large is found behind the devices of a request already taken: other devices of it
    cannot help, another alternative can.
    """
    either = {
        "name": "a",
        "firstAvailable": [
            {"name": "many", "deviceClassName": "gpu", "count": 20},
            {"name": "few", "deviceClassName": "gpu", "count": 2},
        ],
    }

    outcome = solve(given([slice_of(gpus(40))], claim(either, request("b", count=20))))

    assert isinstance(outcome, Allocated)
    assert [result.request for result in outcome.results[0].devices.results] == ["a/few"] * 2 + ["b"] * 20


@pytest.mark.parametrize(
    ("policy", "asked", "consumed"),
    [
        ({"default": "10", "validRange": {"min": "10"}}, "25", "25"),
        ({"default": "10", "validRange": {"min": "10"}}, "5", "10"),
        ({"default": "10", "validRange": {"min": "10", "step": "10"}}, "25", "30"),
        ({"default": "10", "validRange": {"min": "10", "max": "20"}}, "25", None),
        ({"default": "10", "validRange": {"min": "10", "step": "0"}}, "25", None),
        ({"default": "10", "validRange": {"max": "20"}}, "15", "15"),
    ],
)
def test_share_is_what_the_policy_of_a_capacity_makes_of_it(
    policy: dict[str, Any], asked: str, consumed: str | None
) -> None:
    """An amount is rounded up to what may be asked for.

    Without a step any amount of the range may, and none with a step of nothing.
    """
    shared = device(
        "dev-0", allowMultipleAllocations=True, capacity={"memory": {"value": "100", "requestPolicy": policy}}
    )

    outcome = solve(given([slice_of([shared])], claim(request(capacity={"requests": {"memory": asked}}))))

    if consumed is None:
        assert isinstance(outcome, NoFit)
    else:
        assert isinstance(outcome, Allocated)
        assert [str(amount) for amount in outcome.results[0].devices.results[0].consumed_capacity.values()] == [
            consumed
        ]


@pytest.mark.parametrize(("mode", "fits"), [(Mode.COMPATIBLE, True), (Mode.CORRECTED, False)])
def test_counters_of_pools_of_one_name_are_told_apart_when_corrected(
    mode: Mode, fits: bool
) -> None:  # a table of cases
    """Upstream keeps one account for the pools of one name, whosever they are, and counts nothing
    that the first of them has not.
    """

    def pool(driver: str, counter: str) -> list[Slice]:
        draws = [{"counterSet": counter, "counters": {"memory": {"value": "4"}}}]
        counters = [{"name": counter, "counters": {"memory": {"value": "4"}}}]
        parts = [device(f"{driver}-{index}", consumesCounters=draws) for index in range(2)]
        return [
            slice_of([], driver=driver, sharedCounters=counters, name=f"{driver}-a", count=2, nodeName=NODE),
            slice_of(parts, driver=driver, name=f"{driver}-b", count=2),
        ]

    slices = [*pool("gpu", "g"), *pool("nic", "n")]

    outcome = solve(given(slices, claim(request("a"), request("b", device_class="nic", count=2)), mode=mode))

    assert isinstance(outcome, Allocated) is fits


def test_constraint_is_broken_when_an_attribute_has_no_value() -> None:
    """An attribute without a value of a known type matches nothing, not even its like."""
    blank = [{"name": f"dev-{index}", "attributes": {"model": {}}} for index in range(2)]

    outcome = solve(
        given(
            [slice_of(blank)],
            claim(request(count=2), constraints=[{"requests": [], "matchAttribute": "gpu.example.com/model"}]),
            classes={"gpu": DeviceClassSpec()},
        )
    )

    assert isinstance(outcome, NoFit)


def test_explain_nodes_tells_a_nodes_own_fault_beside_the_others() -> None:
    """A fault of one node stands among the reasons of the others, and a node on which it fits has
    none.
    """
    local = Fault(Reason(code="malformed-slice", message="node a: much"), 0, is_local=True)
    full = NoFit((Reason(code="too-few-devices", message="node c: found 0"),), 1)

    reason, reasons = explain_nodes(("a", "b", "c"), [local, Allocated((), 1), full])

    assert reason == "DoesNotFit"
    assert [each_reason.code for each_reason in reasons] == ["malformed-slice", "too-few-devices"]


def test_summary_is_empty_when_there_are_no_reasons() -> None:
    """A search that nobody reads gives none."""
    assert summarize([]) == ""


def test_device_shows_only_attributes_of_a_known_kind() -> None:
    """An attribute of a kind from a newer API is not there.

    A list of versions is a list of versions.
    """
    attributes = {"new": Attribute(), "vers": Attribute(versions=("1.0.0",)), "d.io/n": Attribute(int_=1)}

    facts = facts_of(
        "gpu.example.com", SliceDevice(name="dev-0", attributes=attributes, capacity={"memory": Capacity(value="1Gi")})
    )

    assert sorted(facts.attributes) == ["d.io", "gpu.example.com"]
    assert list(facts.attributes["gpu.example.com"]) == ["vers"]


@pytest.mark.parametrize("expression", [f"{MODEL} == 'a'", f"{MODEL}"], ids=["fails-on-some", "no-verdict"])
def test_search_ends_in_a_fault_when_a_selector_fails_on_a_device_that_it_meets(expression: str) -> None:
    """A selector that cannot be evaluated on a device that was looked at ends the claim, however
    clever the search is.
    """
    slices = [slice_of([device("dev-0"), device("dev-1", attributes={"model": "a"})])]
    situation = given(slices, claim(request(where=[expression])))

    clever, plain = allocate(situation, COMPILER), allocate(situation, COMPILER, is_clever=False)

    assert isinstance(clever, Fault)
    assert isinstance(plain, Fault)
    assert clever.reason == plain.reason


@pytest.mark.parametrize(
    "expression", [f"{MODEL} == 'a'", "device.driver == "], ids=["fails-on-one", "does-not-compile"]
)
def test_bits_leave_a_claim_to_the_search_when_a_selector_has_no_verdict(expression: str) -> None:
    """Only a search can tell whether it would meet the device on which the selector fails."""
    node = Node(NODE, {})
    slices = [slice_of([device("dev-0", attributes={"model": "a"}), device("dev-1")])]
    table = NodeTable(node, gather_pools(slices, node, ALL), Numbers())
    asked, plain = claim(request(where=[expression])), claim(request())
    classes = given(slices, asked).classes

    assert make_bitset_plan(table, [asked.spec], classes, COMPILER) is None
    assert make_bitset_plan(table, [plain.spec], classes, COMPILER) is not None


def test_bits_leave_a_claim_to_the_search_when_a_device_takes_counters_by_shares() -> None:
    """What is taken of a shared device does not show in the devices in use."""
    node = Node(NODE, {})
    uses = [{"counterSet": "card", "counters": {"slots": {"value": "1"}}}]
    devices = [
        device("whole", consumesCounters=uses),
        device("shared", memory="4", allowMultipleAllocations=True, consumesCounters=uses),
    ]
    counters = [{"name": "card", "counters": {"slots": {"value": "1"}}}]
    slices = [slice_of(devices, name="a", count=2), slice_of([], name="b", count=2, sharedCounters=counters)]
    table = NodeTable(node, gather_pools(slices, node, ALL), Numbers())
    asked = claim(request(where=["device.allowMultipleAllocations == false"]))

    plan = make_bitset_plan(table, [asked.spec], given(slices, asked).classes, COMPILER, Mode.CORRECTED)

    assert plan is None


def _situation(**changes: Any) -> AllocationInput:
    """Two claims hold a device each of three; the third has a taint."""
    tainted = {**device("dev-2", attributes={"model": "b"}), "taints": [{"key": "k", "effect": "NoSchedule"}]}
    situation = given(
        [slice_of([*gpus(2, model=["a", "b"]), tainted])], claim(request(count=changes.pop("count", 1), **changes))
    )
    holders = {
        DeviceId("gpu.example.com", NODE, "dev-0"): "claim a/x",
        DeviceId("gpu.example.com", NODE, "dev-1"): "claim a/y",
    }
    return replace(situation, usage=Usage(holders))


def test_advice_names_one_holder_when_one_going_is_enough() -> None:
    """Of several holders only those that have to go are named."""
    advice = [reason for reason in would_fit(_situation(), solve) if reason.facts["change"] == "free"]

    assert [reason.facts["holders"] for reason in advice] == [("claim a/y",)]


def test_advice_names_no_holder_when_all_of_them_going_does_not_help() -> None:
    """Devices that are not there cannot be let go of."""
    assert [reason.facts["change"] for reason in would_fit(_situation(count=4), solve)] == []


def test_advice_does_not_offer_tolerance_when_the_request_bears_all_taints() -> None:
    """What a request says already is no change."""
    situation = _situation(count=3, tolerations=[{"operator": "Exists"}])

    assert "tolerations" not in [reason.facts["change"] for reason in would_fit(situation, solve)]


def test_advice_names_nobody_when_only_shares_of_a_device_stand_in_the_way() -> None:
    """Shares have no holder that could be named.

    That the device would fit without them is no advice.
    """
    shared = device("dev-0", "10Gi", allowMultipleAllocations=True)
    situation = given([slice_of([shared])], claim(request(capacity={"requests": {"memory": "8Gi"}})))
    consumed = {DeviceId("gpu.example.com", NODE, "dev-0"): {"memory": Quantity.parse("4Gi")}}

    advice = would_fit(replace(situation, usage=Usage(consumed=consumed)), solve)

    assert isinstance(solve(replace(situation, usage=Usage(consumed=consumed))), NoFit)
    assert [reason.facts["change"] for reason in advice] == []


def test_advice_leaves_out_constraints_and_selectors_that_are_not_in_the_way() -> None:
    """Of two constraints and two selectors only those are named without which the claim fits."""
    same, other = (
        {"requests": [], "matchAttribute": "gpu.example.com/model"},
        {"requests": [], "matchAttribute": "gpu.example.com/site"},
    )
    slices = [slice_of(gpus(2, model=["a", "b"], site=["x", "x"]))]
    constrained = given(slices, claim(request(count=2), constraints=[same, other]))
    selected = given(slices, claim(request(where=[f"{MODEL} == 'c'", "device.driver != ''"])))

    constraints = [
        reason.facts["constraint"] for reason in would_fit(constrained, solve) if reason.facts["change"] == "constraint"
    ]
    selectors = [
        reason.facts["selector"] for reason in would_fit(selected, solve) if reason.facts["change"] == "selector"
    ]

    assert constraints == [0]
    assert selectors == [0]


def test_advice_ends_when_there_is_enough_of_it() -> None:
    """A person reads three pieces.

    That it would fit without the selector as well is not looked for.
    """
    tainted = {**device("dev-2", attributes={"model": "a"}), "taints": [{"key": "k", "effect": "NoSchedule"}]}
    free = [device("dev-3", attributes={"model": "a"}), device("dev-4", attributes={"model": "b"})]
    situation = given(
        [slice_of([*gpus(2, model=["a", "a"]), tainted, *free])], claim(request(count=2, where=[f"{MODEL} == 'a'"]))
    )
    holders = {DeviceId("gpu.example.com", NODE, f"dev-{index}"): f"claim a/{index}" for index in range(2)}

    advice = would_fit(replace(situation, usage=Usage(holders)), solve)

    assert [reason.facts["change"] for reason in advice] == ["free", "count", "tolerations"]
