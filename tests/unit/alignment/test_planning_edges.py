"""Planning at its edges: CPUs by name, reserved and offline CPUs, nodes without NUMA, claims that
nobody uses, and more owners than can be tried.
"""

from __future__ import annotations

import pytest
from msgspec import structs

from support.alignment_nodes import container, dgx, dgx_facts, holding, owner, pod
from topobus.engine.alignment.merge.dispatch import merge_hints
from topobus.engine.alignment.planning import container_admission, locality_domains, node_availability, refusal_reasons
from topobus.engine.alignment.planning.claim_alignment import join_claims
from topobus.engine.alignment.planning.container_admission import Aligned, align, fill
from topobus.engine.alignment.planning.demands import read_demands
from topobus.engine.alignment.planning.node_availability import NodeAvailability
from topobus.engine.alignment.planning.node_view import node_view, with_devices
from topobus.engine.alignment.planning.placement import place
from topobus.engine.alignment.planning.refusal_reasons import Conflict
from topobus.engine.alignment.planning.resource_pools import view_by_resource
from topobus.values.device import Link, LinkClass
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import HugepagePool
from topobus.values.outcome import Placement, Reason, Refusal
from topobus.values.request import (
    ClaimUse,
    ContainerRequest,
    DeviceRequest,
    Locality,
    LocalityLevel,
    PodRequest,
    Policy,
)
from topobus.values.view import AlignmentOptions, CoreView, CpuOptions, NodeView


def _named(*names: str, is_shared: bool = False) -> ContainerRequest:
    return ContainerRequest(
        name="main", devices=(DeviceRequest(device_class="cpu", count=len(names), names=names, is_shared=is_shared),)
    )


def _reasons(view: NodeView, *containers: ContainerRequest) -> list[Reason]:
    outcome = place(view, pod("trainer", *containers))
    assert isinstance(outcome, Refusal), outcome
    return list(outcome.reasons)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("cpu-1", "device-unhealthy"),
        ("cpu-2", "cpu-reserved"),
        ("cpu-3", "device-held"),
        ("cpu-999", "unknown-device"),
        ("x", "unknown-device"),
    ],
)
def test_cpu_asked_for_by_name_is_refused_with_what_is_the_matter(name: str, code: str) -> None:
    """A CPU that is sick, reserved, held or not there is told by name."""
    view = holding(structs.replace(dgx(), unhealthy_cpus=CpuSet(1), reserved_cpus=CpuSet(2)), "other", cpus="3")

    reasons = _reasons(view, _named(name))

    assert code in [reason.code for reason in reasons]
    assert any(reason.facts.get("device") == name for reason in reasons)


def test_cpu_that_is_only_looked_at_is_not_taken() -> None:
    """Whoever shares a look at a CPU holds none."""
    outcome = place(dgx(), pod("trainer", _named("cpu-1", is_shared=True)))

    assert isinstance(outcome, Placement)
    assert outcome.containers[0].cpus == CpuSet()


def test_whole_cores_are_counted_without_those_of_reserved_cpus() -> None:
    """With full-pcpus-only a core whose sibling is reserved is no whole core.

    That is told with numbers.
    """
    options = AlignmentOptions(cpu=CpuOptions(full_pcpus_only=True))
    view = structs.replace(dgx(), options=options, reserved_cpus=CpuSet(0, 1))

    fits = place(view, pod("trainer", container(cpus=220)))
    (reason, *_) = _reasons(view, container(cpus=222))

    assert isinstance(fits, Placement)
    assert reason.code == "smt-alignment"
    assert "leaves 220 CPUs outside the cores with reserved CPUs, wanted 222" in reason.message


def test_negative_memory_is_refused_with_its_kind() -> None:
    """A request that no kubelet would make is told, not planned."""
    (reason, *_) = _reasons(dgx(), ContainerRequest(name="main", hugepages={"hugepages-2Mi": -1}))

    assert reason.code == "count-zero"
    assert reason.facts["resource"] == "hugepages-2Mi"


def test_refusal_is_given_when_cpus_cannot_be_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubelet's rules may find no assignment though CPUs are free: the pod is refused, nothing is
    taken.
    """
    monkeypatch.setattr(node_availability, "assign_cpus", lambda *_: None)

    assert "not-enough-cpus" in [reason.code for reason in _reasons(dgx(), container(cpus=2))]


def test_claim_is_aligned_with_nothing_when_no_container_uses_it() -> None:
    """With scope container each container is aligned for itself, and an unused claim is part of
    none.
    """
    request = structs.replace(pod("trainer", container(gpu=1)), claims=(ClaimUse(owner_key="claim/x"),))
    view = dgx()

    joined_view, joined = join_claims(view, request)

    assert joined.containers == request.containers
    assert joined_view.held_devices == view.held_devices


def test_view_leaves_out_offline_cpus_and_names_odd_pages() -> None:
    """An offline CPU is on no core; a page size that no binary unit divides is written in bytes."""
    machine, inventories = dgx_facts()
    cpus = (structs.replace(machine.cpus[0], online=False), *machine.cpus[1:])
    first = structs.replace(machine.numa_nodes[0], hugepages=(HugepagePool(page_bytes=1000, total=3, free=3),))
    machine = structs.replace(machine, cpus=cpus, numa_nodes=(first, *machine.numa_nodes[1:]))

    view = node_view(machine, inventories, None, AlignmentOptions(), CpuSet())

    assert 0 not in CpuSet.of(cpu for core in view.cores for cpu in core.cpus)
    assert view.memory[0].allocatable["hugepages-1000"] == 3000


def test_devices_that_are_given_besides_stay_with_their_holder_when_they_are_held() -> None:
    """CPUs are given by their device names; a name that is none is left out."""
    view = with_devices(
        holding(dgx(), "other", gpu=("gpu-0",)), "claim/x", {"gpu": ("gpu-0", "gpu-1"), "cpu": ("cpu-4", "x")}
    )

    assert view.held_devices["gpu"] == {"gpu-0": owner("other").key, "gpu-1": "claim/x"}
    assert view.held_cpus["claim/x"] == CpuSet(4)


def test_pool_is_as_silent_as_its_class() -> None:
    """Whoever asks for a pool of a silent service is told since when it is silent."""
    gpus = tuple(structs.replace(device, pool="gpu-h100") for device in dgx().devices["gpu"])
    view = structs.replace(
        dgx(), devices={**dgx().devices, "gpu": gpus}, unheard_classes={"gpu": "2026-01-01T00:00:00Z"}
    )

    assert view_by_resource(view).unheard_classes["gpu-h100"] == "2026-01-01T00:00:00Z"


@pytest.mark.parametrize("budget", [1000, 1, 0])
def test_refusal_names_owners_that_would_have_to_go_when_not_all_sets_can_be_tried(
    monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """Few tries find owners that suffice, and none of them is more than needed."""
    monkeypatch.setattr(refusal_reasons, "_FREE_BUDGET", budget)
    view = dgx()
    for name, gpus in (
        ("a", ("gpu-0", "gpu-1", "gpu-2")),
        ("b", ("gpu-3", "gpu-4")),
        ("c", ("gpu-5", "gpu-6", "gpu-7")),
    ):
        view = holding(view, name, gpu=gpus)

    outcome = place(view, pod("trainer", container(gpu=5)))

    assert isinstance(outcome, Refusal)
    assert {str(reason.facts["owner"]) for reason in outcome.to_free} in (
        {owner("a").key, owner("b").key},
        {owner("b").key, owner("c").key},
    )


def _local(level: LocalityLevel, **devices: int) -> PodRequest:
    return structs.replace(pod("trainer", container(cpus=2, **devices)), locality=(Locality(level=level),))


def test_pod_lies_on_the_one_node_when_no_cpu_tells_its_node() -> None:
    """A machine without NUMA is one node, with all its CPUs."""
    cores = tuple(CoreView(cpus=CpuSet(cpu)) for cpu in range(4))
    view = NodeView(node="n", numa_nodes=NodeSet(0), cores=cores)

    outcome = place(view, _local(LocalityLevel.NUMA))

    assert isinstance(outcome, Placement)
    assert len(outcome.containers[0].cpus) == 2


def test_pod_is_refused_when_it_wants_one_cache_and_no_cpu_has_one() -> None:
    """What a CPU stands under without an L3 cache of its own is no cache."""
    cores = tuple(CoreView(cpus=CpuSet(cpu), numa_node=0, socket=0) for cpu in range(4))
    view = NodeView(node="n", numa_nodes=NodeSet(0), cores=cores)

    assert isinstance(place(view, _local(LocalityLevel.L3)), Refusal)


def test_pod_gets_linked_devices_when_others_are_only_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link of another kind than the fabric, or to a device that is not there, is none; and few
    groups are looked at where they would be too many.
    """
    links = {"gpu-4": (Link(peer="gpu-5"),), "gpu-0": (Link(peer="gpu-1", kind=LinkClass.SWITCH), Link(peer="gone"))}
    gpus = tuple(structs.replace(device, links=links.get(device.name, ())) for device in dgx().devices["gpu"])
    view = structs.replace(dgx(), devices={**dgx().devices, "gpu": gpus})
    request = _local(LocalityLevel.LINK, gpu=2)

    outcome = place(view, request)
    monkeypatch.setattr(locality_domains, "_MOST", 0)
    unseen = place(view, request)

    assert isinstance(outcome, Placement)
    assert outcome.containers[0].devices["gpu"] == ("gpu-4", "gpu-5")
    assert isinstance(unseen, Refusal)


def test_placement_says_so_when_its_alignment_is_not_proved_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """On very large machines the merge may end before it has proved its answer.

    Whoever reads the decision sees that.
    """
    monkeypatch.setattr(
        container_admission,
        "merge_hints",
        lambda *given, **options: structs.replace(merge_hints(*given, **options), is_exact=False),
    )

    outcome = place(dgx(), pod("trainer", container(gpu=1)))

    assert isinstance(outcome, Placement)
    assert outcome.containers[0].reasons[0].facts["is_exact"] is False


def test_container_gets_nothing_when_what_it_demands_is_gone_after_its_alignment() -> None:
    """A container is filled from what is free at that moment: what an alignment was made for may
    have gone to another one.
    """
    demands = read_demands(pod("trainer", container(gpu=8)))
    assert not isinstance(demands, Refusal)
    available = NodeAvailability(dgx())
    aligned = align(available, demands[0], Policy.BEST_EFFORT, is_pod=False)
    assert isinstance(aligned, Aligned)

    conflict = fill(NodeAvailability(holding(dgx(), "other", gpu=("gpu-0",))), demands[0], aligned)

    assert isinstance(conflict, Conflict)
    assert [reason.code for reason in conflict.reasons] == ["not-enough-devices"]
