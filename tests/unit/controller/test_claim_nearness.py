"""Claims that ask for policy or locality: where their devices are looked for, and what they are
told.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.explanations import explain_nodes
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import (
    Allocated,
    Fault,
    GaveUp,
    NoFit,
    Outcome,
)
from topobus.engine.claims.lifecycle import owner_of, placement_request, read_claim
from topobus.engine.claims.objects import Claim
from topobus.engine.scheduling.aligned_allocation import AlignedClaims, allocate_near, read_alignment_request
from topobus.formats.kubernetes.alignment_request import AlignmentRequest
from topobus.formats.kubernetes.resource import ClaimSpec, DeviceClassSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.device import Link, LinkClass
from topobus.values.errors import ContractError
from topobus.values.outcome import Reason
from topobus.values.request import Locality, LocalityLevel, Policy, Scope
from unit.controller.nearness import COMPILER, NODE, claim, entry, names, state

GPU_AND_NIC = {"gpu": 1, "nic": 1}


def solve(there: StandaloneState, *wanted: ApiObject, step_budget: int = 10_000) -> Outcome:
    """Allocate these claims together."""
    specs = [(Claim(api_object), read_claim(api_object)) for api_object in wanted]
    wished = [AlignedClaims(asked, read_alignment_request(spec, "claim")) for asked, spec in specs]
    return allocate_near(there.input_for(NODE, specs), wished, there.view_of(NODE), COMPILER, step_budget=step_budget)


# On the demo node gpu-N and nic-N lie under switch N // 2 and on NUMA node N // 4.
@pytest.mark.parametrize(
    ("wanted", "fields", "held", "expected"),
    [
        pytest.param(
            GPU_AND_NIC, {"locality": "hard:switch"}, {"gpu": ("gpu-0", "gpu-1")}, ["gpu-2", "nic-2"], id="hard-switch"
        ),
        pytest.param(
            GPU_AND_NIC, {"locality": "soft:switch"}, {"gpu": ("gpu-0", "gpu-1")}, ["gpu-2", "nic-2"], id="soft-switch"
        ),
        pytest.param(
            {"gpu": 1, "nic": 2},
            {"locality": "hard:numa, soft:switch"},
            {"nic": ("nic-0", "nic-1", "nic-2", "nic-3", "nic-4", "nic-6")},
            ["gpu-4", "nic-5", "nic-7"],
            id="soft-switch-given-up-inside-hard-numa",
        ),
        pytest.param(
            {"gpu": 5},
            {"locality": "soft:numa"},
            {},
            ["gpu-0", "gpu-1", "gpu-2", "gpu-3", "gpu-4"],
            id="soft-numa-given-up",
        ),
        pytest.param(
            {"gpu": 2},
            {"policy": "single-numa-node"},
            {"gpu": ("gpu-0", "gpu-1", "gpu-2")},
            ["gpu-4", "gpu-5"],
            id="single-numa",
        ),
        pytest.param(
            {"gpu": 2},
            {"policy": "restricted"},
            {"gpu": ("gpu-0", "gpu-1", "gpu-2")},
            ["gpu-4", "gpu-5"],
            id="restricted",
        ),
        pytest.param(
            {"gpu": 5},
            {"policy": "restricted"},
            {},
            ["gpu-0", "gpu-1", "gpu-2", "gpu-3", "gpu-4"],
            id="restricted-wider",
        ),
        pytest.param(
            {"gpu": 2}, {"policy": "none"}, {"gpu": ("gpu-0", "gpu-1", "gpu-2")}, ["gpu-3", "gpu-4"], id="policy-none"
        ),
        pytest.param(
            GPU_AND_NIC,
            {"policy": "single-numa-node", "locality": "hard:switch"},
            {"gpu": ("gpu-0", "gpu-1", "gpu-2", "gpu-3")},
            ["gpu-4", "nic-4"],
            id="policy-and-switch",
        ),
        pytest.param(
            {"gpu": 2},
            {"locality": "hard:socket"},
            {"gpu": ("gpu-0", "gpu-1", "gpu-2")},
            ["gpu-4", "gpu-5"],
            id="hard-socket",
        ),
        pytest.param(
            {"gpu": 2}, {"locality": "hard:l3"}, {"gpu": ("gpu-0", "gpu-1", "gpu-2")}, ["gpu-4", "gpu-5"], id="hard-l3"
        ),
    ],
)
def test_claim_gets_devices_of_the_first_place_that_has_all(
    wanted: dict[str, int], fields: dict[str, str], held: dict[str, tuple[str, ...]], expected: list[str]
) -> None:
    """Without any matchAttribute the devices lie within one place of the level asked, the first
    that has them.

    Soft wishes are given up.
    """
    (devices,) = names(solve(state(**held), claim(wanted, entry(**fields))))

    assert devices == expected


def test_cpus_come_from_the_numa_node_of_the_device_when_claim_wants_both_near() -> None:
    """CPUs are devices of a claim like others: hard:numa holds for them, too."""
    held = {"gpu": ("gpu-0", "gpu-1", "gpu-2", "gpu-3")}

    (devices,) = names(solve(state(**held), claim({"gpu": 1, "cpu": 2}, entry(locality="hard:numa"))))

    cpus = [int(name.removeprefix("cpu-")) % 112 for name in devices[1:]]
    assert devices[0] == "gpu-4"
    assert all(56 <= cpu < 112 for cpu in cpus)


def test_claim_is_told_the_nearest_place_first_when_no_place_has_all() -> None:
    """The first reason names what was wished and what the nearest place lacks.

    The others follow, without the request's name again.
    """
    outcome = solve(state(gpu=("gpu-0",)), claim({"gpu": 5}, entry(locality="hard:numa")))

    assert isinstance(outcome, NoFit)
    assert [(reason.code, reason.message) for reason in outcome.reasons] == [
        (
            "locality-not-met",
            "node demo-node: nothing holds all of it by hard:numa; nearest of 2 places: "
            "NUMA node 1: request gpu wants 5 devices of class gpu.topobus.dev, found 4 of 4",
        ),
        ("domain-misses", "NUMA node 0: found 3 of 4 (1 device: held by pod default/taker)"),
    ]


def test_places_that_lack_the_same_are_told_once_when_a_machine_has_many() -> None:
    """Three of four switches have one of two GPUs left: they are named together, and the line stays
    short.
    """
    outcome = solve(
        state(gpu=("gpu-0", "gpu-2", "gpu-3", "gpu-5", "gpu-6")), claim({"gpu": 2}, entry(locality="hard:switch"))
    )

    assert isinstance(outcome, NoFit)
    assert [reason.message for reason in outcome.reasons] == [
        "node demo-node: nothing holds all of it by hard:switch; nearest of 4 places: switch 0000:00:00.0, "
        "switch 0000:20:00.0, switch 0000:30:00.0: "
        "request gpu wants 2 devices of class gpu.topobus.dev, found 1 of 2 (1 device: held by pod default/taker)",
        "switch 0000:10:00.0: found 0 of 2 (2 devices: held by pod default/taker)",
    ]
    assert len(summarize(outcome.reasons)) < 340


def test_nearest_node_is_told_first_when_no_node_serves_a_claim() -> None:
    """Three nodes: the second lacks one device and the first four.

    Of the third's places the nearest lacks two.
    """
    far, near = (
        NoFit(
            (
                Reason(
                    code="too-few-devices",
                    message=f"node {node}: found {granted} of 8",
                    facts={"wanted": 8, "found": granted},
                ),
            ),
            1,
        )
        for node, granted in (("n1", 4), ("n2", 7))
    )

    placed = NoFit(
        (Reason(code="locality-not-met", message="node n3: nothing holds all of it", facts={"lacking": 2}),), 1
    )

    _, reasons = explain_nodes(["n1", "n2", "n3"], [far, near, placed])

    assert [reason.message for reason in reasons] == [
        "node n2: found 7 of 8",
        "node n3: nothing holds all of it",
        "node n1: found 4 of 8",
    ]


def test_claim_is_told_what_the_engine_objects_when_policy_restricted_cannot_be_kept() -> None:
    """Two GPUs that are free on two NUMA nodes only, though each node has more: restricted turns
    that away, as for a pod.
    """
    held = ("gpu-0", "gpu-1", "gpu-2", "gpu-4", "gpu-5", "gpu-6")

    strict = solve(state(gpu=held), claim({"gpu": 2, "nic": 1}, entry(policy="restricted")))
    lenient = solve(state(gpu=held), claim({"gpu": 2, "nic": 1}, entry(policy="best-effort")))

    assert isinstance(strict, NoFit)
    assert strict.reasons[0].facts["domains"] == ("NUMA node 0", "NUMA node 1", "the whole node")
    assert "restricted" in strict.reasons[-1].message
    assert names(lenient)[0][:2] == ["gpu-3", "gpu-7"]


def test_each_claim_of_a_pod_keeps_its_own_wish_when_they_are_served_together() -> None:
    """Two claims with hard:switch may lie under two switches.

    A third without wishes takes what is left first.
    """
    near = [claim({"gpu": 2, "nic": 2}, entry(locality="hard:switch"), name=name) for name in ("a", "b")]

    devices = names(solve(state(), *near, claim({"gpu": 1}, name="plain")))

    assert devices == [["gpu-0", "gpu-1", "nic-0", "nic-1"], ["gpu-2", "gpu-3", "nic-2", "nic-3"], ["gpu-4"]]


def test_search_is_the_ordinary_one_when_nothing_is_wished() -> None:
    """A claim without wishes gets the very answer of the search without them."""
    there = state(gpu=("gpu-1",))
    api_object = claim({"gpu": 3, "nic": 2}, {"opaque": {"driver": "topobus.dev", "parameters": {"kind": "Sharing"}}})

    outcome = solve(there, api_object)

    assert outcome == allocate(there.input_for(NODE, [(Claim(api_object), read_claim(api_object))]), COMPILER)


def test_search_gives_up_when_its_budget_is_spent() -> None:
    """A budget that runs out in a place is never told as "does not fit"."""
    assert isinstance(solve(state(), claim({"gpu": 4}, entry(locality="hard:numa")), step_budget=1), GaveUp)


def test_locality_is_unknown_when_node_has_published_no_machine() -> None:
    """Devices without a machine are in no place that anybody knows."""
    there = state()
    there.drop_machine(NODE)

    outcome = solve(there, claim({"gpu": 1}, entry(locality="hard:numa")))

    assert isinstance(outcome, NoFit)
    assert outcome.reasons[0].code == "locality-unknown"


def test_node_without_a_machine_is_told_last() -> None:
    """Beside nodes that run no Topobus at all, the one that matters is what a reader sees first,
    whatever the names.
    """
    nothing = NoFit(
        (Reason(code="locality-unknown", message="node a: it has published no machine", facts={"node": "a"}),), 0
    )
    near = solve(state(), claim({"gpu": 2}, entry(locality="hard:link")))

    _, reasons = explain_nodes(["a", NODE], [nothing, near])

    assert [reason.code for reason in reasons][-1] == "locality-unknown"
    assert len(reasons) == 2


def test_nothing_is_tried_when_no_device_tells_of_links() -> None:
    """hard:link without links is refused by name."""
    outcome = solve(state(), claim({"gpu": 2}, entry(locality="hard:link")))

    assert isinstance(outcome, NoFit)
    assert "hard:link cannot be kept" in outcome.reasons[0].message


def test_linked_devices_are_given_when_claim_asks_for_link() -> None:
    """hard:link binds the class whose devices report links, and no other."""
    there = state()
    linked = [f"gpu-{index}" for index in (3, 5, 6)]
    gpus = there.inventories[NODE, "gpu"]
    devices = tuple(
        msgspec.structs.replace(
            device, links=tuple(Link(peer=peer, kind=LinkClass.FABRIC) for peer in linked if peer != device.name)
        )
        if device.name in linked
        else device
        for device in gpus.devices
    )
    there.put_inventory(msgspec.structs.replace(gpus, devices=devices))

    (allocated,) = names(solve(there, claim({"gpu": 3, "nic": 1}, entry(locality="hard:link"))))

    assert allocated == ["gpu-3", "gpu-5", "gpu-6", "nic-0"]


def test_search_ends_when_nobody_waits_for_it_any_more() -> None:
    """An abandoned search stops before the next place and claims no result."""
    there, api_object = state(), claim({"gpu": 1}, entry(locality="hard:numa"))
    spec = read_claim(api_object)
    wished = [AlignedClaims(Claim(api_object), read_alignment_request(spec, "claim"))]

    outcome = allocate_near(
        there.input_for(NODE, [(Claim(api_object), spec)]),
        wished,
        there.view_of(NODE),
        COMPILER,
        is_abandoned=lambda: True,
    )

    assert outcome == GaveUp(0)


def test_search_gives_up_when_there_are_more_places_than_it_may_try() -> None:
    """Five claims, each with its own of four switches or the whole: places left untried are no
    refusal.
    """
    many = [claim({"fpga": 3}, entry(locality="soft:switch"), name=f"c{index}") for index in range(5)]

    assert isinstance(solve(state(), *many), GaveUp)


def test_fault_of_a_claim_stays_a_fault_when_it_has_wishes() -> None:
    """An unknown class is wrong whatever the place."""
    assert isinstance(solve(state(), claim({"tpu": 1}, entry(locality="hard:numa"))), Fault)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        pytest.param(
            [entry(locality="hard:nmua")], ("config[0].opaque", "parameters.locality", "'nmua'", "numa"), id="level"
        ),
        pytest.param([entry(policy="strict")], ("config[0].opaque", "parameters.policy is 'strict'"), id="policy"),
        pytest.param([entry(scope=3)], ("parameters.scope is 3", "wanted text"), id="not-text"),
        pytest.param(
            [entry(kind="Alignment")], ("parameters.kind is 'Alignment'", "wanted 'AlignmentParameters'"), id="kind"
        ),
        pytest.param([entry(localty="hard:numa")], ("localty", "locality"), id="misspelt"),
        pytest.param([entry(apiVersion="v1")], ("parameters.apiVersion is 'v1'",), id="version"),
        pytest.param(
            [{"opaque": {"driver": "topobus.dev", "parameters": 3}}],
            ("parameters is 3", "wanted an object"),
            id="no-object",
        ),
        pytest.param([{"opaque": {"driver": "topobus.dev"}}], ("parameters is None", "wanted an object"), id="nothing"),
        pytest.param([entry(), entry()], ("config[1]", "wanted one", "config[0]"), id="twice"),
        pytest.param(
            [{**entry(), "requests": ["gpu"]}], ("config[0].requests is gpu", "wanted none"), id="for-a-request"
        ),
    ],
)
def test_wishes_are_refused_with_their_path_when_nobody_can_read_them(
    config: list[dict[str, Any]], parts: tuple[str, ...]
) -> None:
    """What is wrong is named: the path, what is there, what is wanted."""
    spec = read_as(claim({"gpu": 1}, *config).spec, ClaimSpec, where="claim")

    with pytest.raises(ContractError) as caught:
        read_alignment_request(spec, "claim default/c")

    assert [part for part in ("claim default/c: spec.devices.", *parts) if part not in str(caught.value)] == []


def test_wishes_are_read_for_our_driver_and_not_for_others() -> None:
    """Parameters of other drivers are theirs, and those of other kinds are for device services."""
    numa = AlignmentRequest(locality=(Locality(level=LocalityLevel.NUMA),))

    def read(*config: dict[str, Any]) -> AlignmentRequest | None:
        return read_alignment_request(read_claim(claim({"gpu": 1}, *config)), "claim")

    assert read(entry(kind="Sharing"), entry(locality="hard:numa")) == numa
    assert read(entry("gpu.example.com", locality="hard:numa"), entry(kind="Sharing")) is None
    assert read(entry("gpu.topobus.dev", locality="hard:numa")) is None
    assert read(entry()) is None


@pytest.mark.parametrize(
    ("own", "classes", "wanted"),
    [
        pytest.param([], {"gpu.topobus.dev": "hard:numa"}, "hard:numa", id="the-class-wishes"),
        pytest.param(["soft:switch"], {"gpu.topobus.dev": "hard:numa"}, "soft:switch", id="the-claim-wins"),
        pytest.param([None], {"gpu.topobus.dev": "hard:numa"}, None, id="the-claim-wishes-for-nothing"),
        pytest.param(
            [], {"gpu.topobus.dev": "hard:numa", "nic.topobus.dev": "hard:numa"}, "hard:numa", id="classes-agree"
        ),
        pytest.param([], {"other.topobus.dev": "hard:numa"}, None, id="a-class-that-is-not-asked-for"),
    ],
)
def test_classes_wish_for_a_claim_that_wishes_nothing(
    own: list[str | None], classes: dict[str, str], wanted: str | None
) -> None:
    """A claim's own word wins, also when it says that it wishes nothing.

    Else what the classes of its requests wish.
    """
    spec = read_claim(claim(GPU_AND_NIC, *(entry(**({"locality": locality} if locality else {})) for locality in own)))

    alignment_request = read_alignment_request(spec, "claim c", _classes(classes))

    assert (str(alignment_request.locality[0]) if alignment_request is not None else None) == wanted


def test_classes_are_refused_when_they_wish_different_things() -> None:
    """Two classes that disagree are named, and where to say which it is to be."""
    spec = read_claim(claim(GPU_AND_NIC))

    with pytest.raises(ContractError, match=r"classes gpu.topobus.dev and nic.topobus.dev wish different alignments"):
        read_alignment_request(
            spec, "claim c", _classes({"gpu.topobus.dev": "hard:numa", "nic.topobus.dev": "hard:switch"})
        )


def _classes(localities: dict[str, str]) -> dict[str, DeviceClassSpec]:
    return {
        name: read_as({"config": [entry(locality=locality)]}, DeviceClassSpec, where=name)
        for name, locality in localities.items()
    }


def test_node_is_asked_for_policy_scope_and_locality_when_claim_wishes_for_them() -> None:
    """The node's topology verifies what was wished; without wishes the request is as ever."""
    api_object = claim(GPU_AND_NIC, entry(policy="restricted", scope="pod", locality="hard:switch"))
    outcome = solve(state(), api_object)
    assert isinstance(outcome, Allocated)

    asked = placement_request(
        api_object, outcome.results[0], NODE, read_alignment_request(read_claim(api_object), "claim")
    )
    plain = placement_request(api_object, outcome.results[0], NODE)

    assert asked is not None
    assert plain is not None
    assert (asked.policy, asked.scope, asked.locality) == (
        Policy.RESTRICTED,
        Scope.POD,
        (Locality(level=LocalityLevel.SWITCH),),
    )
    assert asked == msgspec.structs.replace(plain, policy=asked.policy, scope=asked.scope, locality=asked.locality)
    assert (plain.policy, plain.scope, plain.locality, plain.owner) == (Policy.NONE, None, (), owner_of(api_object))
