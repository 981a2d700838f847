"""Laws of the planner: what kubelet's order admits stays as it is, whatever else it finds is right,
and it finds something whenever there is something.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from support.alignment_nodes import container, pod
from support.laws import examples
from support.outcome_text import explain_text
from support.placement_checker import fits, mistakes
from topobus.engine.alignment.planning.placement import place
from topobus.values.device import Device
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import Placement, Refusal
from topobus.values.pci import PciAddress
from topobus.values.request import ContainerKind, Locality, LocalityLevel, PodRequest, Policy, Scope
from topobus.values.view import AlignmentOptions, CoreView, NodeView, NumaMemory, PlanMode


def in_mode(view: NodeView, mode: PlanMode, *, steps: int = 2000) -> NodeView:
    """The same node in another mode."""
    return structs.replace(view, options=structs.replace(view.options, mode=mode, search_steps=steps))


@st.composite
def small_nodes(draw: st.DrawFn) -> NodeView:
    """Two or three NUMA nodes with up to four CPUs each, and up to four GPUs and three NICs, some
    on two nodes, some on none that is known.
    """
    count = draw(st.integers(2, 3))
    sizes = [draw(st.sampled_from([0, 2, 3, 4, 4])) for _ in range(count)]
    cores: list[CoreView] = []
    for node, size in enumerate(sizes):
        cores += [
            CoreView(cpus=CpuSet(len(cores) + index), numa_node=node, socket=node, l3=node) for index in range(size)
        ]
    where = st.sampled_from(
        [*(NodeSet(node) for node in range(count)), *(NodeSet(node) for node in range(count)), NodeSet(0, 1), None]
    )
    switch = st.sampled_from([PciAddress(0, 1, 0, 0), PciAddress(0, 2, 0, 0), None])
    devices = {
        device_class: tuple(
            Device(
                name=f"{device_class}-{index}",
                device_class=device_class,
                numa_nodes=draw(where),
                pcie_switch=draw(switch),
            )
            for index in range(draw(st.integers(most - 2, most)))
        )
        for device_class, most in (("gpu", 4), ("nic", 4))
    }
    held = draw(st.sampled_from([CpuSet(), CpuSet(), CpuSet(0)])) if cores else CpuSet()
    return NodeView(
        node="small",
        numa_nodes=NodeSet.of(range(count)),
        cores=tuple(cores),
        devices=devices,
        held_cpus={"pod/default/other/1": held} if held else {},
        options=AlignmentOptions(
            policy=draw(st.sampled_from([Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE, Policy.BEST_EFFORT]))
        ),
    )


@st.composite
def small_pods(draw: st.DrawFn) -> PodRequest:
    """Two to four containers of all kinds that want a little of each."""
    containers = []
    for place_ in range(draw(st.integers(2, 4))):
        amounts = {name: count for name in ("gpu", "nic") if (count := draw(st.sampled_from([0, 0, 1, 1, 2])))}
        kind = draw(st.sampled_from([ContainerKind.APP, ContainerKind.APP, ContainerKind.INIT, ContainerKind.SIDECAR]))
        containers.append(container(f"c{place_}", kind=kind, cpus=draw(st.sampled_from([0, 1, 1, 2, 3])), **amounts))
    return pod("asked", *containers, scope=draw(st.sampled_from([Scope.CONTAINER, Scope.CONTAINER, Scope.POD])))


@settings(max_examples=examples(400), deadline=None)
@given(small_nodes(), small_pods())
def test_planner_finds_a_placement_exactly_when_trying_everything_does(view: NodeView, request: PodRequest) -> None:
    """On small machines the planner places a pod if and only if some placement is right, and the
    one it gives is.
    """
    outcome = place(in_mode(view, PlanMode.CORRECTED), request)

    if isinstance(outcome, Placement):
        assert mistakes(view, request, outcome) == []
    else:
        assert [reason.code for reason in outcome.reasons] == ["gave-up"] or not fits(view, request), explain_text(
            outcome
        )


@settings(max_examples=examples(250), deadline=None)
@given(small_nodes(), small_pods(), st.sampled_from([LocalityLevel.SWITCH, LocalityLevel.NUMA]))
def test_planner_keeps_hard_localities_exactly_when_that_can_be_done(
    view: NodeView, request: PodRequest, level: LocalityLevel
) -> None:
    """With a hard locality, too, a pod is placed if and only if there is a right placement.

    A soft one never turns anybody away.
    """
    hard = structs.replace(request, locality=(Locality(level=level),))
    soft = structs.replace(request, locality=(Locality(level=level, is_hard=False),))
    outcome = place(in_mode(view, PlanMode.CORRECTED), hard)
    softly = place(in_mode(view, PlanMode.CORRECTED), soft)

    if isinstance(outcome, Placement):
        assert mistakes(view, hard, outcome) == []
        assert isinstance(softly, Placement)
    else:
        assert [reason.code for reason in outcome.reasons] == ["gave-up"] or not fits(view, hard), explain_text(outcome)
    if isinstance(softly, Placement):
        assert mistakes(view, request, softly) == []
    else:
        assert [reason.code for reason in softly.reasons] == ["gave-up"] or not fits(view, request), explain_text(
            softly
        )


@settings(max_examples=examples(200), deadline=None)
@given(small_nodes(), small_pods())
def test_planner_leaves_alone_what_kubelets_order_admits(view: NodeView, request: PodRequest) -> None:
    """Mode corrected never refuses, nor places otherwise, what mode compatible admits."""
    compatible = place(in_mode(view, PlanMode.COMPATIBLE), request)
    corrected = place(in_mode(view, PlanMode.CORRECTED), request)

    assert not isinstance(compatible, Placement) or corrected == compatible
    assert place(in_mode(view, PlanMode.CORRECTED), request) == corrected


@settings(max_examples=examples(150), deadline=None)
@given(small_nodes(), small_pods(), st.integers(0, 6))
def test_planner_never_says_that_a_pod_does_not_fit_when_it_gave_up(
    view: NodeView, request: PodRequest, steps: int
) -> None:
    """With a tiny budget the answer is a right placement, a proved refusal, or `gave-up` and
    nothing else.
    """
    outcome = place(in_mode(view, PlanMode.CORRECTED, steps=steps), request)

    if isinstance(outcome, Refusal) and outcome.reasons[0].code == "gave-up":
        assert len(outcome.reasons) == 1
        assert "not known" in outcome.reasons[0].message
    elif isinstance(outcome, Refusal):
        assert not fits(view, request)
    else:
        assert mistakes(view, request, outcome) == []


@settings(max_examples=examples(150), deadline=None)
@given(small_nodes(), small_pods())
def test_planner_tells_of_itself_when_kubelets_order_refuses(view: NodeView, request: PodRequest) -> None:
    """A refusal of mode compatible says that mode corrected would place
    the pod only when it does.
    """
    compatible = place(in_mode(view, PlanMode.COMPATIBLE), request)

    if isinstance(compatible, Refusal) and "fits-in-corrected-mode" in [reason.code for reason in compatible.reasons]:
        assert isinstance(place(in_mode(view, PlanMode.CORRECTED), request), Placement)


@settings(max_examples=examples(150), deadline=None)
@given(small_nodes(), small_pods(), st.data())
def test_planner_shares_memory_rightly_when_it_is_aligned(
    view: NodeView, request: PodRequest, data: st.DataObject
) -> None:
    """With memory aligned, too, mode corrected admits what compatible does, and no node gives more
    than it has.
    """
    memory = tuple(
        NumaMemory(id=node, allocatable={"memory": data.draw(st.sampled_from([0, 6, 10]))}) for node in view.numa_nodes
    )
    view = structs.replace(view, memory=memory, options=structs.replace(view.options, aligns_memory=True))
    amounts = st.sampled_from([0, 2, 4, 6, 12])
    request = structs.replace(
        request,
        containers=tuple(
            structs.replace(container_request, memory_bytes=data.draw(amounts))
            for container_request in request.containers
        ),
    )
    outcome = place(in_mode(view, PlanMode.CORRECTED), request)

    if not isinstance(outcome, Placement):
        assert isinstance(place(in_mode(view, PlanMode.COMPATIBLE), request), Refusal)
        return
    staying = {
        container_request.name
        for container_request in request.containers
        if container_request.kind is not ContainerKind.INIT
    }
    given_ = [
        share
        for container_placement in outcome.containers
        if container_placement.name in staying
        for block in container_placement.memory
        for share in block.shares
    ]
    for node in view.memory:
        assert sum(size for where, size in given_ if where == node.id) <= node.allocatable["memory"]


@st.composite
def solvable(draw: st.DrawFn) -> tuple[NodeView, PodRequest]:
    """A node and a pod that was cut out of it: each container wants what lies on one NUMA node and
    is free then.
    """
    view = structs.replace(
        draw(small_nodes()),
        options=AlignmentOptions(policy=draw(st.sampled_from([Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE]))),
    )
    held = {cpu for cpus in view.held_cpus.values() for cpu in cpus}
    staying: set[str] = set()
    containers = []
    for number in range(draw(st.integers(2, 4))):
        node = draw(st.sampled_from(sorted(view.numa_nodes)))
        kind = (
            draw(st.sampled_from([ContainerKind.APP, ContainerKind.APP, ContainerKind.INIT, ContainerKind.SIDECAR]))
            if number < 2
            else ContainerKind.APP
        )
        homes = {
            "cpu": [str(cpu) for core in view.cores for cpu in core.cpus if core.numa_node == node and cpu not in held],
            **{
                name: [device.name for device in devices if device.numa_nodes and node in device.numa_nodes]
                for name, devices in view.devices.items()
            },
        }
        taken = {
            name: draw(st.lists(st.sampled_from(units), unique=True, max_size=3)) if units else []
            for name, units in homes.items()
        }
        taken = {name: [unit for unit in units if f"{name}/{unit}" not in staying] for name, units in taken.items()}
        if kind is not ContainerKind.INIT:
            staying |= {f"{name}/{unit}" for name, units in taken.items() for unit in units}
        wanted = {name: len(units) for name, units in taken.items() if units and name != "cpu"}
        containers.append(container(f"c{number}", kind=kind, cpus=len(taken["cpu"]), **wanted))
    # The order in which apps are written is not the one in which they were cut out; what starts
    # before the apps keeps its order.
    apps = draw(
        st.permutations(
            [container_request for container_request in containers if container_request.kind is ContainerKind.APP]
        )
    )
    return view, pod(
        "asked",
        *(container_request for container_request in containers if container_request.kind is not ContainerKind.APP),
        *apps,
    )


@settings(max_examples=examples(300), deadline=None)
@given(solvable())
def test_planner_places_a_pod_that_was_cut_out_of_the_node(both: tuple[NodeView, PodRequest]) -> None:
    """A pod that is known to fit is placed, rightly, within the default budget."""
    view, request = both
    outcome = place(in_mode(view, PlanMode.CORRECTED), request)

    assert isinstance(outcome, Placement), explain_text(outcome)
    assert mistakes(view, request, outcome) == []
