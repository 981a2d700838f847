"""Promises of locality asked for by a pod: hard ones are kept or refused by name, soft ones are
kept where that can be had.
"""

from __future__ import annotations

import pytest
from msgspec import structs

from support.alignment_nodes import container, dgx, holding, pod
from support.outcome_text import explain_text
from topobus.engine.alignment.planning.placement import place
from topobus.values.device import Link, LinkClass
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import ContainerPlacement, Placement, Refusal
from topobus.values.request import (
    ContainerKind,
    ContainerRequest,
    DeviceRequest,
    Locality,
    LocalityLevel,
    Owner,
    OwnerKind,
    PodRequest,
    Policy,
    Scope,
)
from topobus.values.view import AlignmentOptions, CoreView, NodeView, PlanMode

MODES = pytest.mark.parametrize("mode", list(PlanMode))


def asking(
    wish: str, *containers: ContainerRequest, policy: Policy | None = None, scope: Scope | None = None
) -> PodRequest:
    """A pod with localities such as `hard:switch soft:numa`."""
    locality = tuple(
        Locality(level=LocalityLevel(level), is_hard=strength == "hard")
        for strength, _, level in (word.partition(":") for word in wish.split())
    )
    return structs.replace(pod("asking", *containers, policy=policy, scope=scope), locality=locality)


def node(mode: PlanMode, view: NodeView | None = None, **options: object) -> NodeView:
    """The demo machine, or another view, in a mode."""
    base = view if view is not None else dgx()
    return structs.replace(base, options=structs.replace(base.options, mode=mode, **options))


def placed(outcome: Placement | Refusal) -> tuple[ContainerPlacement, ...]:
    """The containers of a placement; a refusal fails the test with its text."""
    assert isinstance(outcome, Placement), explain_text(outcome)
    return outcome.containers


def refused(outcome: Placement | Refusal) -> Refusal:
    """A refusal; a placement fails the test with its text."""
    assert isinstance(outcome, Refusal), explain_text(outcome)
    return outcome


def linked(view: NodeView, *groups: tuple[int, ...]) -> NodeView:
    """The same node with the GPUs of each group linked pairwise."""
    peers = {
        index: [other for group in groups if index in group for other in group if other != index] for index in range(8)
    }
    gpus = tuple(
        structs.replace(
            device,
            links=tuple(
                Link(peer=f"gpu-{peer}", kind=LinkClass.FABRIC, bandwidth_gbps=400.0) for peer in peers[place_]
            ),
        )
        for place_, device in enumerate(view.devices["gpu"])
    )
    return structs.replace(view, devices={**view.devices, "gpu": gpus})


@MODES
def test_locality_takes_the_switch_that_has_all_when_it_is_hard(mode: PlanMode) -> None:
    """Two GPUs, two NICs and CPUs come from one switch and its NUMA node, though GPUs alone could
    be had nearer the front.
    """
    view = holding(dgx(), "busy", nic=("nic-0", "nic-2"), gpu=("gpu-4",))

    (container_placement,) = placed(
        place(node(mode, view), asking("hard:switch", container(cpus=8, gpu=2, nic=2), policy=Policy.RESTRICTED))
    )

    assert container_placement.devices == {"gpu": ("gpu-6", "gpu-7"), "nic": ("nic-6", "nic-7")}
    assert container_placement.numa_nodes == NodeSet(1)
    assert [reason.facts["domain"] for reason in container_placement.reasons if reason.code == "locality-met"] == [
        "switch 0000:30:00.0"
    ]


@MODES
def test_locality_refuses_and_names_what_is_missing_when_no_switch_has_all(mode: PlanMode) -> None:
    """Three GPUs are never under one switch: the nearest miss and what it lacks are named.

    Nobody is blamed.
    """
    outcome = refused(place(node(mode), asking("hard:switch", container(gpu=3, nic=1))))

    (reason,) = [each_reason for each_reason in outcome.reasons if each_reason.code == "locality-not-met"]
    assert (reason.facts["locality"], reason.facts["missing"]) == ("hard:switch", ("1 gpu",))
    assert "1 gpu missing there" in reason.message
    assert outcome.to_free == ()


@MODES
def test_locality_names_whose_devices_to_free_when_they_stand_in_the_way(mode: PlanMode) -> None:
    """When every pair is broken, the owner whose going would mend one is named."""
    view = dgx()
    for switch in range(4):
        view = holding(view, f"one-{switch}", gpu=(f"gpu-{2 * switch}",))

    outcome = refused(place(node(mode, view), asking("hard:switch", container(gpu=2))))

    assert [reason.code for reason in outcome.reasons] == ["locality-not-met"]
    assert len(outcome.to_free) == 1


@MODES
def test_locality_is_kept_where_it_can_be_had_when_it_is_soft(mode: PlanMode) -> None:
    """A soft wish decides between places, and is told of when it had to be given up."""
    view = holding(dgx(), "busy", gpu=("gpu-0", "gpu-2"))

    (kept,) = placed(place(node(mode, view), asking("soft:switch", container(gpu=2))))
    (given_up,) = placed(place(node(mode, view), asking("soft:switch", container(gpu=3))))

    assert kept.devices == {"gpu": ("gpu-4", "gpu-5")}
    assert [reason.facts["missed"] for reason in given_up.reasons if reason.code == "locality-missed"] == [
        ("soft:switch",)
    ]


@MODES
def test_locality_prefers_the_broken_domain_when_one_device_is_asked_for(mode: PlanMode) -> None:
    """One GPU is taken where one is missing already, so that whole switches stay whole."""
    view = holding(dgx(), "busy", gpu=("gpu-2",))

    (container_placement,) = placed(
        place(node(mode, view), asking("hard:switch", container(gpu=1), policy=Policy.SINGLE_NUMA_NODE))
    )

    assert container_placement.devices == {"gpu": ("gpu-3",)}


@MODES
@pytest.mark.parametrize(
    ("level", "cpus", "gpus"),
    [("numa", 112, 4), ("socket", 112, 4), ("l3", 112, 4)],
    ids=lambda value: str(value),
)
def test_locality_holds_cpus_and_devices_together_when_they_just_fit(
    mode: PlanMode, level: str, cpus: int, gpus: int
) -> None:
    """All of a NUMA node, socket or L3 can be had at once, one more CPU cannot.

    Without the wish both would do.
    """
    view = node(mode)
    fits = asking(f"hard:{level}", container(cpus=cpus, gpu=gpus))
    too_wide = asking(f"hard:{level}", container(cpus=cpus + 1, gpu=gpus))

    (container_placement,) = placed(place(view, fits))
    reasons = refused(place(view, too_wide)).reasons

    assert len(container_placement.numa_nodes) == 1
    assert [reason.facts["missing"] for reason in reasons if reason.code == "locality-not-met"] == [("1 cpu",)]
    assert isinstance(place(view, structs.replace(too_wide, locality=())), Placement)


@MODES
def test_locality_keeps_linked_devices_together_when_asked_for_links(mode: PlanMode) -> None:
    """GPUs come from one group that is linked pairwise, also when it lies across sockets.

    NICs, which report no links, come from anywhere.
    """
    view = linked(dgx(), (0, 4, 5), (1, 2), (3, 6, 7))

    (three,) = placed(
        place(node(mode, holding(view, "busy", gpu=("gpu-0",))), asking("hard:link", container(gpu=3, nic=1)))
    )
    outcome = refused(place(node(mode, view), asking("hard:link", container(gpu=4))))

    assert three.devices["gpu"] == ("gpu-3", "gpu-6", "gpu-7")
    assert outcome.reasons[-1].facts["missing"] == ("1 gpu",)


@MODES
def test_locality_says_that_nothing_is_known_when_the_machine_tells_no_links(mode: PlanMode) -> None:
    """Where no GPU reports a link, a hard wish for links cannot be kept,
    and the refusal says why.
    """
    outcome = refused(place(node(mode), asking("hard:link", container(gpu=2))))

    assert [reason.code for reason in outcome.reasons] == ["locality-not-met"]
    assert "this node reports no such domain" in outcome.reasons[0].message


@MODES
def test_locality_binds_each_container_or_the_pod_when_the_scope_says_so(mode: PlanMode) -> None:
    """With scope container two containers may have a switch each; with scope pod they share one, or
    are refused.
    """
    containers = (container("a", gpu=2), container("b", gpu=1))

    apart = placed(place(node(mode), asking("hard:switch", *containers)))
    together = refused(place(node(mode), asking("hard:switch", *containers, scope=Scope.POD)))

    assert len({name for container_placement in apart for name in container_placement.devices["gpu"]}) == 3
    assert [reason.facts["missing"] for reason in together.reasons if reason.code == "locality-not-met"] == [("1 gpu",)]


@MODES
def test_locality_of_several_levels_is_kept_together_when_both_are_asked_for(mode: PlanMode) -> None:
    """A hard socket and a soft switch: the switch where it can be had, at least the socket."""
    view = holding(dgx(), "busy", gpu=("gpu-0",))

    (both,) = placed(place(node(mode, view), asking("hard:socket soft:switch", container(gpu=2))))
    (container_placement,) = placed(place(node(mode, view), asking("hard:socket soft:switch", container(gpu=4))))

    assert both.devices == {"gpu": ("gpu-2", "gpu-3")}
    assert container_placement.devices == {"gpu": ("gpu-4", "gpu-5", "gpu-6", "gpu-7")}
    assert [reason.facts["missed"] for reason in container_placement.reasons if reason.code == "locality-missed"] == [
        ("soft:switch",)
    ]


def test_locality_is_found_when_only_another_order_of_containers_keeps_it() -> None:
    """The first container would take the only whole switch.

    Mode corrected leaves it to the second.
    """
    view = holding(dgx(), "busy", gpu=("gpu-3", "gpu-4", "gpu-5", "gpu-6", "gpu-7"), nic=("nic-1",))
    request = asking(
        "hard:switch", container("small", gpu=1, nic=1), container("pair", gpu=2), policy=Policy.RESTRICTED
    )

    refusal = refused(place(node(PlanMode.COMPATIBLE, view), request))
    small, pair = placed(place(node(PlanMode.CORRECTED, view), request))

    assert refusal.reasons[-1].code == "fits-in-corrected-mode"
    assert (small.devices["gpu"], pair.devices["gpu"]) == (("gpu-2",), ("gpu-0", "gpu-1"))


@MODES
def test_locality_is_nothing_to_a_container_that_wants_nothing(mode: PlanMode) -> None:
    """A container without devices and exclusive CPUs is placed whatever the pod asks for."""
    outcome = placed(place(node(mode), asking("hard:link", container("idle"), container("cpus", cpus=2))))

    assert [len(container_placement.cpus) for container_placement in outcome] == [0, 2]


@MODES
def test_request_is_refused_when_the_node_forbids_what_it_asks_for_itself(mode: PlanMode) -> None:
    """A node that allows no policy but its own says which wish it forbids.

    Asking for what the node has anyway is no such wish.
    """
    view = node(mode, allow_request_policy=False)
    own = pod("own", container(gpu=1), policy=Policy.BEST_EFFORT)

    outcome = refused(place(view, asking("soft:numa", container(gpu=1), policy=Policy.NONE, scope=Scope.POD)))

    assert [(reason.code, reason.facts["what"]) for reason in outcome.reasons] == [
        ("policy-forbidden", "policy"),
        ("policy-forbidden", "scope"),
        ("policy-forbidden", "locality"),
    ]
    assert isinstance(place(view, own), Placement)


@MODES
def test_claim_is_refused_when_the_node_forbids_its_wishes_and_not_without_any(mode: PlanMode) -> None:
    """A claim's devices are chosen already.

    Policy none, its plain form, asks for nothing, while a locality of
    its own is a wish like a pod's.
    """
    view = node(mode, allow_request_policy=False)
    owner = Owner(kind=OwnerKind.CLAIM, name="c", uid="uid-c")
    chosen = ContainerRequest(name="", devices=(DeviceRequest(device_class="gpu", count=1, names=("gpu-0",)),))
    plain = PodRequest(owner=owner, containers=(chosen,), policy=Policy.NONE)

    outcome = refused(place(view, structs.replace(plain, locality=(Locality(level=LocalityLevel.NUMA),))))

    assert [(reason.code, reason.facts["what"]) for reason in outcome.reasons] == [("policy-forbidden", "locality")]
    assert isinstance(place(view, plain), Placement)
    assert isinstance(place(view, structs.replace(plain, policy=None)), Placement)


def small(
    *,
    gpus: str,
    cpus: int = 8,
    mode: PlanMode = PlanMode.CORRECTED,
    steps: int = 2000,
    policy: Policy = Policy.SINGLE_NUMA_NODE,
) -> NodeView:
    """Two NUMA nodes with so many CPUs each, and one GPU on each node named in `gpus`."""
    view = dgx()
    return structs.replace(
        view,
        cores=tuple(
            CoreView(cpus=CpuSet(index), numa_node=index // cpus, socket=index // cpus, l3=index // cpus)
            for index in range(2 * cpus)
        ),
        devices={
            "gpu": tuple(
                structs.replace(view.devices["gpu"][place_], numa_nodes=NodeSet(int(where)), pcie_switch=None)
                for place_, where in enumerate(gpus)
            )
        },
        options=AlignmentOptions(policy=policy, mode=mode, search_steps=steps),
    )


# The first container may go anywhere and takes node 0, where the only GPU is.
BLOCKED = pod("blocked", container("any", cpus=6), container("gpu", cpus=6, gpu=1))
# kubelet issue 123816: the init container pins what it leaves, so the big
# container cannot go to the free node.
PINNED = pod("pinned", container("prepare", cpus=2, kind=ContainerKind.INIT), container("big", cpus=8))


def test_planner_refuses_as_kubelet_does_when_the_mode_is_compatible() -> None:
    """Kubelet's order refuses, says which container found no room, and that mode corrected would
    place the pod.
    """
    outcome = refused(place(small(gpus="0", mode=PlanMode.COMPATIBLE), BLOCKED))

    codes = [reason.code for reason in outcome.reasons]
    assert "policy-not-met" in codes
    assert codes[-1] == "fits-in-corrected-mode"
    assert outcome.reasons[0].facts["container"] == "gpu"
    # What the pod's first container took is not free any more.
    assert "node 0: 2 of 8 free; node 1: 8 of 8 free" in next(
        reason.message for reason in outcome.reasons if reason.facts.get("resource") == "cpu"
    )


def test_planner_moves_the_first_container_aside_when_the_second_needs_its_node() -> None:
    """The container that may go anywhere leaves the node with the only GPU to the one that needs
    it.

    The answer says that it was searched for.
    """
    any_, gpu = placed(place(small(gpus="0"), BLOCKED))

    assert (any_.numa_nodes, gpu.numa_nodes) == (NodeSet(1), NodeSet(0))
    assert {reason.code for reason in gpu.reasons} >= {"aligned", "searched"}


def test_planner_does_not_pin_a_pod_to_its_init_container_when_the_mode_is_corrected() -> None:
    """A big container gets a whole node though the init container ran on another.

    In mode compatible kubelet's defect is kept.
    """
    view = small(gpus="0", cpus=8)
    busy = structs.replace(view, held_cpus={"pod/default/other/1": CpuSet(0)})

    prepare, big = placed(place(busy, PINNED))
    kept = refused(
        place(structs.replace(busy, options=structs.replace(busy.options, mode=PlanMode.COMPATIBLE)), PINNED)
    )

    assert len(prepare.cpus) == 2
    assert big.numa_nodes == NodeSet(1)
    assert "policy-not-met" in [reason.code for reason in kept.reasons]


@pytest.mark.parametrize("request_", [BLOCKED, PINNED], ids=["blocked", "pinned"])
def test_planner_gives_up_or_answers_alike_at_every_budget(request_: PodRequest) -> None:
    """A budget that ends anywhere in the search makes it say so; one that suffices changes nothing."""
    busy = {"pod/default/other/1": CpuSet(0)} if request_ is PINNED else {}
    full = place(structs.replace(small(gpus="0"), held_cpus=busy), request_)
    limited = [structs.replace(small(gpus="0", steps=steps), held_cpus=busy) for steps in range(1, 40)]
    outcomes = [place(view, request_) for view in limited]
    gave_up = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]

    assert isinstance(full, Placement)
    assert gave_up
    assert outcomes[: len(gave_up)] == gave_up, "a larger budget gave up where a smaller one had an answer"
    assert all(outcome == full for outcome in outcomes[len(gave_up) :])
    assert {reason.code for outcome in gave_up for reason in outcome.reasons} == {"gave-up"}


def test_planner_says_that_it_gave_up_when_the_budget_is_spent() -> None:
    """Without steps nothing is known, and nothing else is said: one reason, its budget, and the
    container that kubelet's order stops at.
    """
    outcome = refused(place(small(gpus="0", steps=1), BLOCKED))

    (reason,) = outcome.reasons
    assert (reason.code, reason.facts["budget"], reason.facts["container"]) == ("gave-up", 1, "gpu")
    assert "not fit" not in explain_text(outcome)


def test_planner_says_that_there_is_no_other_way_when_it_has_tried_all() -> None:
    """When everything was tried, the reasons are those of kubelet's order, and that nothing else
    would do.
    """
    outcome = refused(
        place(
            small(gpus="0"), pod("two", container("a", cpus=6, gpu=1), container("b", cpus=6), container("c", cpus=6))
        )
    )

    assert [reason.code for reason in outcome.reasons][-1] == "no-other-way"


@MODES
def test_place_never_chooses_what_a_container_only_looks_at(mode: PlanMode) -> None:
    """A device that is looked at is not held, so the one that is held must be another.

    Wanting one both ways is a fault.
    """
    looks = DeviceRequest(device_class="gpu", count=1, names=("gpu-0",), is_shared=True)
    takes = DeviceRequest(device_class="gpu", count=1)
    names = DeviceRequest(device_class="gpu", count=1, names=("gpu-0",))

    (container_placement,) = placed(place(node(mode), pod("p", ContainerRequest(name="main", devices=(takes, looks)))))
    outcome = refused(place(node(mode), pod("p", ContainerRequest(name="main", devices=(names, looks)))))

    assert container_placement.devices == {"gpu": ("gpu-0", "gpu-1")}
    assert [reason.facts["devices"] for reason in container_placement.reasons if reason.code == "devices-chosen"] == [
        ("gpu-1",)
    ]
    assert [reason.code for reason in outcome.reasons] == ["duplicate-device"]


def test_planner_gives_up_on_a_pod_of_hundreds_of_containers() -> None:
    """Nobody writes such a pod but a fuzzer.

    The answer is honest and quick, and no stack overflows.
    """
    many = [container(f"c{number}", cpus=number % 2) for number in range(200)]
    view = node(PlanMode.CORRECTED, dgx(policy=Policy.SINGLE_NUMA_NODE))

    outcome = refused(
        place(view, pod("many", *many, container("near", cpus=10, fpga=1), container("too", cpus=4, fpga=1)))
    )

    assert [reason.code for reason in outcome.reasons] == ["gave-up"]
