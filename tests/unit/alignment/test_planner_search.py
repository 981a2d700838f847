"""Promises of the planner's search, each by a pod that only that part of it can place."""

from __future__ import annotations

import pytest
from msgspec import structs

from support.alignment_nodes import container, pod
from support.outcome_text import explain_text
from support.placement_checker import fits, mistakes
from topobus.engine.alignment.planning.placement import place
from topobus.engine.alignment.planning.unit_sharing import share
from topobus.values.device import Device
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import ContainerKind, PodRequest, Policy
from topobus.values.view import AlignmentOptions, CoreView, CpuOptions, NodeView, PlanMode


def node(cpus: int = 4, *, mode: PlanMode = PlanMode.CORRECTED, **devices: dict[str, NodeSet]) -> NodeView:
    """Two NUMA nodes with so many CPUs each, and devices by class and
    name with their NUMA nodes.
    """
    return NodeView(
        node="small",
        numa_nodes=NodeSet(0, 1),
        cores=tuple(CoreView(cpus=CpuSet(index), numa_node=index // cpus, socket=0, l3=0) for index in range(2 * cpus)),
        devices={
            name: tuple(Device(name=key, device_class=name, numa_nodes=where) for key, where in sorted(units.items()))
            for name, units in devices.items()
        },
        options=AlignmentOptions(policy=Policy.SINGLE_NUMA_NODE, mode=mode),
    )


# An FPGA pins a container to node 0, a NIC to node 1; one GPU serves both
# nodes and comes first by name.
PINS = {
    "fpga": {"fpga-0": NodeSet(0)},
    "nic": {"nic-0": NodeSet(1)},
    "gpu": {"gpu-both": NodeSet(0, 1), "gpu-zero": NodeSet(0)},
}
CASES: dict[str, tuple[NodeView, NodeView, PodRequest]] = {
    # 1 and 2 on the first node leave no room for 3 beside 2: the search
    # must go back over two choices.
    "goes-back": (
        node(),
        node(mode=PlanMode.COMPATIBLE),
        pod("p", *(container(f"c{place_}", cpus=cpus) for place_, cpus in enumerate((1, 2, 2, 3)))),
    ),
    # The best GPU for the first container is the only one for the second.
    "leaves-the-best": (
        node(**PINS),
        node(mode=PlanMode.COMPATIBLE, **PINS),
        pod("p", container("zero", fpga=1, gpu=1), container("one", nic=1, gpu=1)),
    ),
    # The sidecar stays while the init container runs, but no app container wants
    # what the init container needs.
    "sidecar-and-init": (
        node(**PINS),
        node(mode=PlanMode.COMPATIBLE, **PINS),
        pod(
            "p",
            container("stays", kind=ContainerKind.SIDECAR, fpga=1, gpu=1),
            container("before", kind=ContainerKind.INIT, nic=1, gpu=1),
            container("main", cpus=1),
        ),
    ),
}
# The first takes both CPUs of node 0 and three of node 1 by itself; the second
# can have its CPU on node 0 alone.
UNEQUAL = structs.replace(
    node(**PINS),
    cores=tuple(CoreView(cpus=CpuSet(index), numa_node=int(index > 1), socket=0, l3=0) for index in range(6)),
    options=AlignmentOptions(policy=Policy.RESTRICTED, mode=PlanMode.CORRECTED),
)
CASES["shares-cpus"] = (
    UNEQUAL,
    structs.replace(UNEQUAL, options=AlignmentOptions(policy=Policy.RESTRICTED, mode=PlanMode.COMPATIBLE)),
    pod("p", container("wide", cpus=5), container("narrow", cpus=1, fpga=1)),
)


@pytest.mark.parametrize("case", CASES)
def test_planner_finds_the_way_when_kubelets_order_does_not(case: str) -> None:
    """Kubelet's order refuses; the planner's placement is right."""
    corrected, compatible, request = CASES[case]

    outcome = place(corrected, request)

    assert isinstance(place(compatible, request), Refusal)
    assert isinstance(outcome, Placement), explain_text(outcome)
    assert mistakes(corrected, request, outcome) == []


def test_planner_proves_that_there_is_no_way_when_packing_is_impossible() -> None:
    """Three times 3 and once 5 do not fit two nodes of 7, though 14 CPUs are free: 3 and 3 leave 1,
    3 and 5 are 8.
    """
    view = node(7)
    request = pod("p", *(container(f"c{place_}", cpus=cpus) for place_, cpus in enumerate((3, 3, 3, 5))))

    outcome = place(view, request)

    assert not fits(view, request)
    assert isinstance(outcome, Refusal)
    assert outcome.reasons[-1].code == "no-other-way"


@pytest.mark.parametrize(
    ("available", "demands", "wanted"),
    [
        pytest.param(0b1111, [(0b1111, 2), (0b0011, 2)], True, id="moves-aside"),
        pytest.param(0b0111, [(0b0011, 1), (0b0110, 1), (0b0101, 1)], True, id="ring"),
        pytest.param(0b0111, [(0b0011, 2), (0b0110, 2)], False, id="too-few-together"),
        pytest.param(0b1111, [(0b0001, 1), (0b0001, 1), (0b1110, 1)], False, id="one-for-two"),
        pytest.param(0, [], True, id="nobody"),
        pytest.param(0b1, [(0, 0)], True, id="wants-nothing"),
    ],
)
def test_share_gives_everybody_enough_exactly_when_that_can_be_done(
    available: int, demands: list[tuple[int, int]], wanted: bool
) -> None:
    """Takers move aside for each other; units of a kind are never given twice."""
    shares = share(available, demands)

    assert (shares is not None) == wanted
    for (allowed, count), portion in zip(demands, shares or [], strict=False):
        assert sum(portion.values()) == count
        assert all(kind & allowed == kind for kind in portion)
    kinds = {kind for portion in shares or [] for kind in portion}
    assert all(sum(portion.get(kind, 0) for portion in shares or []) <= kind.bit_count() for kind in kinds)


@pytest.mark.parametrize(
    ("first", "second"), [(ContainerKind.APP, ContainerKind.APP), (ContainerKind.SIDECAR, ContainerKind.INIT)]
)
def test_planner_proves_that_there_is_no_way_when_free_cpus_make_no_whole_cores(
    first: ContainerKind, second: ContainerKind
) -> None:
    """Six CPUs are free, and two of them have a reserved sibling: what wants whole cores gets four
    at most, whichever way they are shared.
    """
    options = AlignmentOptions(policy=Policy.BEST_EFFORT, mode=PlanMode.CORRECTED, cpu=CpuOptions(full_pcpus_only=True))
    cores = tuple(CoreView(cpus=CpuSet(2 * index, 2 * index + 1), numa_node=0, socket=0, l3=0) for index in range(4))
    view = NodeView(node="small", numa_nodes=NodeSet(0), cores=cores, reserved_cpus=CpuSet(0, 2), options=options)

    outcome = place(view, pod("p", container("first", kind=first, cpus=4), container("second", kind=second, cpus=2)))
    alone = place(view, pod("p", container("first", kind=first, cpus=4)))

    assert isinstance(alone, Placement), explain_text(alone)
    assert isinstance(outcome, Refusal)
    assert [reason.code for reason in outcome.reasons] == ["smt-alignment", "no-other-way"], explain_text(outcome)
