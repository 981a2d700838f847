"""Promises of `place`: whole pods, exact devices, stable reasons, and what would have to be freed."""

from __future__ import annotations

import pytest
from msgspec import structs

from support.alignment_nodes import container, dgx, holding, owner, pod
from support.outcome_text import explain_text
from topobus.domain import transitions
from topobus.domain.alignment.planning.node_view import with_ledger
from topobus.domain.alignment.planning.placement import place, prefer
from topobus.domain.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.domain.hint import Hint
from topobus.domain.idset import CpuSet, NodeSet
from topobus.domain.ledger import Ledger
from topobus.domain.outcome import ContainerPlacement, MemoryBlock, Placement, Refusal
from topobus.domain.request import ContainerKind, ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest, Policy, Scope
from topobus.domain.view import AlignmentOptions, CpuOptions, NodeView, NumaMemory, PlanMode

TRAINER = pod("trainer", container(cpus=16, gpu=2, nic=2))


def placed(outcome: Placement | Refusal) -> tuple[ContainerPlacement, ...]:
    """The containers of a placement; a refusal fails the test with its text."""
    assert isinstance(outcome, Placement), explain_text(outcome)
    return outcome.containers


def codes(outcome: Placement | Refusal) -> list[str]:
    """The reason codes of a refusal."""
    assert isinstance(outcome, Refusal), explain_text(outcome)
    return [reason.code for reason in outcome.reasons]


def sick(view: NodeView, device_class: str, *names: str) -> NodeView:
    """The same node with these devices unhealthy."""
    health = DeviceHealth(
        state=HealthState.UNHEALTHY,
        conditions=(Condition(dimension=Dimension.LINK, state=HealthState.UNHEALTHY, reason="fell-off-bus"),),
    )
    devices = tuple(structs.replace(device, health=health) if device.name in names else device for device in view.devices[device_class])
    return structs.replace(view, devices={**view.devices, device_class: devices})


def test_place_puts_each_nic_under_a_gpus_switch_when_both_are_asked_for() -> None:
    """The demo pod lands on node 0, whole cores, both NICs beside both GPUs, and says so."""
    (container_placement,) = placed(place(dgx(policy=Policy.RESTRICTED), TRAINER))

    assert container_placement.alignment == Hint(NodeSet(0), preferred=True)
    assert container_placement.cpus == CpuSet.parse("0-7,112-119")
    assert container_placement.devices == {"gpu": ("gpu-0", "gpu-1"), "nic": ("nic-0", "nic-1")}
    assert [reason.code for reason in container_placement.reasons] == [
        "aligned",
        "cpus-taken",
        "devices-chosen",
        "devices-chosen",
        "same-switch",
    ]
    assert container_placement.reasons[0].facts["tied"] == ("1",)


def test_place_looks_ahead_to_free_nics_when_it_chooses_gpus() -> None:
    """GPUs are taken where NICs are still free under the same switch, though other GPUs come first by name."""
    view = holding(dgx(), "busy", nic=("nic-0", "nic-1"))

    (container_placement,) = placed(place(view, TRAINER))

    assert container_placement.devices == {"gpu": ("gpu-2", "gpu-3"), "nic": ("nic-2", "nic-3")}


def test_place_takes_a_broken_pair_when_one_gpu_is_asked_for() -> None:
    """A single GPU comes from a switch that has lost one already, so that pairs stay whole."""
    view = holding(dgx(), "busy", gpu=("gpu-2",))

    (container_placement,) = placed(place(view, pod("small", container(gpu=1))))

    assert container_placement.devices == {"gpu": ("gpu-3",)}


def test_place_names_what_to_free_when_no_node_has_all() -> None:
    """FPGAs only on node 0 and free GPUs only on node 1: the owner on node 0 is named, with what it holds where."""
    (container_placement,) = placed(place(dgx(), TRAINER))
    view = holding(dgx(), "trainer", cpus=str(container_placement.cpus), **container_placement.devices)

    outcome = place(view, pod("second", container(gpu=4, fpga=1), policy=Policy.SINGLE_NUMA_NODE))

    assert codes(outcome) == ["no-common-numa-node", "policy-not-met", "resource-nodes", "resource-nodes", "relax"]
    assert isinstance(outcome, Refusal)
    assert outcome.reasons[-1].facts["resources"] == ("fpga",)
    (free,) = outcome.to_free
    assert (free.facts["owner"], free.facts["devices"], free.facts["numa_nodes"]) == (owner("trainer").key, ("gpu-0", "gpu-1"), "0")
    assert "pod default/trainer holds gpu-0, gpu-1 on NUMA node 0" in explain_text(outcome)


def test_place_names_the_fewest_owners_when_several_stand_in_the_way() -> None:
    """Of all sets of owners that would do, the smallest is named, and of those the one that holds least."""
    view = holding(dgx(), "big", gpu=("gpu-0", "gpu-1", "gpu-2"))
    view = holding(view, "small-a", gpu=("gpu-4",))
    view = holding(view, "small-b", gpu=("gpu-5",))

    outcome = place(view, pod("wanting", container(gpu=4), policy=Policy.SINGLE_NUMA_NODE))

    assert isinstance(outcome, Refusal)
    assert [reason.facts["owner"] for reason in outcome.to_free] == [owner("big").key]


def test_place_names_devices_on_nodes_that_the_machine_lacks() -> None:
    """A device that names a NUMA node which does not exist is in no hint; the refusal says so instead of crashing."""
    view = dgx()
    fpgas = tuple(structs.replace(device, numa_nodes=NodeSet(7)) for device in view.devices["fpga"])

    outcome = place(structs.replace(view, devices={**view.devices, "fpga": fpgas}), pod("p", container(fpga=1), policy=Policy.RESTRICTED))

    assert isinstance(outcome, Refusal)
    (row,) = (reason for reason in outcome.reasons if reason.code == "resource-nodes")
    assert row.facts["free"] == ("2 on NUMA nodes that this machine lacks: fpga-0 (7), fpga-1 (7)",)


def test_place_names_nobody_to_free_when_freeing_would_not_help() -> None:
    """A request beyond the machine has nobody to blame."""
    outcome = place(holding(dgx(), "busy", gpu=("gpu-0",)), pod("huge", container(gpu=9)))

    assert codes(outcome) == ["not-enough-devices"]
    assert isinstance(outcome, Refusal)
    assert outcome.to_free == ()


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        pytest.param(pod("x", container(gpu=0)), "count-zero", id="zero-devices"),
        pytest.param(pod("x", container(gpu=-1)), "count-zero", id="negative-devices"),
        pytest.param(pod("x", container(cpus=-1)), "count-zero", id="negative-cpus"),
        pytest.param(pod("x", container(tpu=1)), "unknown-class", id="unknown-class"),
        pytest.param(pod("x", container(gpu=9)), "not-enough-devices", id="more-than-exist"),
        pytest.param(pod("x", container(cpus=225)), "not-enough-cpus", id="more-cpus-than-exist"),
        pytest.param(pod("x"), "no-containers", id="no-containers"),
        pytest.param(pod("x", container("a"), container("a")), "duplicate-container", id="duplicate-container"),
        pytest.param(pod("x", container(gpu=10**18)), "not-enough-devices", id="absurd-count"),
    ],
)
def test_place_refuses_with_a_stable_code_when_the_request_is_impossible(request_: PodRequest, code: str) -> None:
    """Impossible requests are refused by name of the fault, never a crash and never a default."""
    assert codes(place(dgx(), request_))[0] == code


def named(
    device_class: str, *names: str, count: int | None = None, is_shared: bool = False, kind: OwnerKind = OwnerKind.CLAIM
) -> PodRequest:
    """A claim of exactly these devices."""
    wanted = DeviceRequest(device_class=device_class, count=len(names) if count is None else count, names=names, is_shared=is_shared)
    return PodRequest(owner=Owner(kind=kind, name="claim", uid="c1"), containers=(ContainerRequest(name="", devices=(wanted,)),))


@pytest.mark.parametrize(
    ("claim", "code"),
    [
        pytest.param(named("gpu", "gpu-9"), "unknown-device", id="no-such-device"),
        pytest.param(named("gpu", "gpu-1"), "device-unhealthy", id="sick"),
        pytest.param(named("gpu", "gpu-2"), "device-held", id="held"),
        pytest.param(named("gpu", "gpu-3", count=2), "count-mismatch", id="count-differs"),
        pytest.param(named("gpu", "gpu-3", "gpu-3"), "duplicate-device", id="named-twice"),
        pytest.param(named("gpu", count=1, is_shared=True), "shared-needs-names", id="shared-without-names"),
        pytest.param(named("cpu", "cpu-0"), "device-held", id="cpu-held"),
        pytest.param(named("cpu", "cpu-x"), "unknown-device", id="no-cpu-name"),
        pytest.param(named("cpu", "cpu-999"), "unknown-device", id="no-such-cpu"),
    ],
)
def test_place_refuses_named_devices_when_one_cannot_be_had(claim: PodRequest, code: str) -> None:
    """Named devices are checked one by one; the reason names the device."""
    view = holding(sick(dgx(), "gpu", "gpu-1"), "other", cpus="0-3", gpu=("gpu-2",))

    assert codes(place(view, claim))[0] == code


def test_place_gives_exactly_the_named_devices_when_a_claim_has_chosen() -> None:
    """A claim's devices are taken as named, across nodes too, whatever the node's policy: DRA is no hint provider."""
    (container_placement,) = placed(place(dgx(policy=Policy.SINGLE_NUMA_NODE), named("gpu", "gpu-1", "gpu-6")))

    assert container_placement.devices == {"gpu": ("gpu-1", "gpu-6")}
    assert container_placement.numa_nodes == NodeSet(0, 1)


def test_place_holds_nothing_back_when_a_device_is_shared() -> None:
    """Admin access sees a held and sick device without taking it."""
    view = holding(sick(dgx(), "gpu", "gpu-1"), "other", gpu=("gpu-1",))

    (container_placement,) = placed(place(view, named("gpu", "gpu-1", is_shared=True)))

    assert container_placement.devices == {"gpu": ("gpu-1",)}


def test_place_reuses_what_init_containers_held_when_app_containers_come() -> None:
    """An app container takes the CPUs and devices of the init container before it; a sidecar's stay its own."""
    request = pod(
        "phased",
        container("prepare", kind=ContainerKind.INIT, cpus=4, gpu=2),
        container("proxy", kind=ContainerKind.SIDECAR, cpus=2, gpu=1),
        container("train", cpus=4, gpu=1),
    )

    prepare, proxy, train = placed(place(dgx(), request))

    assert set(proxy.devices["gpu"]) <= set(prepare.devices["gpu"])
    assert set(train.devices["gpu"]) <= set(prepare.devices["gpu"]) - set(proxy.devices["gpu"])
    assert train.cpus.isdisjoint(proxy.cpus)
    assert len(prepare.cpus | proxy.cpus | train.cpus) == 6


def test_place_keeps_nothing_when_one_container_fails() -> None:
    """All containers or none: a second container that does not fit refuses the pod."""
    outcome = place(dgx(), pod("pair", container("a", gpu=5), container("b", gpu=4)))

    assert codes(outcome) == ["not-enough-devices"]
    assert isinstance(outcome, Refusal)
    assert outcome.reasons[0].facts["container"] == "b"


def test_place_aligns_the_pod_as_a_whole_when_scope_is_pod() -> None:
    """Scope pod merges once: containers that would fit on different nodes stay together, or are refused together."""
    two = (container("a", gpu=2), container("b", gpu=2))
    view = holding(dgx(), "busy", gpu=("gpu-0",))

    together = placed(place(view, pod("p", *two, policy=Policy.SINGLE_NUMA_NODE, scope=Scope.POD)))
    refused = place(holding(view, "more", gpu=("gpu-4",)), pod("p", *two, policy=Policy.SINGLE_NUMA_NODE, scope=Scope.POD))

    assert [container_placement.numa_nodes for container_placement in together] == [NodeSet(1), NodeSet(1)]
    assert "policy-not-met" in codes(refused)


def test_place_overrides_the_nodes_policy_when_the_pod_has_its_own() -> None:
    """A pod's policy goes over the node's."""
    view = holding(dgx(policy=Policy.NONE), "busy", gpu=("gpu-0", "gpu-4"))
    wide = container(gpu=4)

    assert isinstance(place(view, pod("p", wide)), Placement)
    assert "policy-not-met" in codes(place(view, pod("p", wide, policy=Policy.SINGLE_NUMA_NODE)))


def test_place_goes_outside_the_alignment_and_says_so_when_best_effort_must() -> None:
    """best-effort takes what is aligned first, the rest elsewhere, and names the strays."""
    view = holding(dgx(), "busy", gpu=("gpu-0", "gpu-1", "gpu-4", "gpu-5"))

    (container_placement,) = placed(place(view, pod("wide", container(gpu=3))))

    assert set(container_placement.devices["gpu"]) < {"gpu-2", "gpu-3", "gpu-6", "gpu-7"}
    assert len(container_placement.devices["gpu"]) == 3


def test_place_never_hands_out_sick_or_reserved_units_when_free_ones_are_few() -> None:
    """Sick devices and CPUs, and reserved CPUs, are not free."""
    view = structs.replace(sick(dgx(), "gpu", "gpu-0"), reserved_cpus=CpuSet(0, 112), unhealthy_cpus=CpuSet(1))

    (container_placement,) = placed(place(view, pod("p", container(cpus=221, gpu=7))))

    assert container_placement.cpus == CpuSet.parse("2-111,113-223")
    assert "gpu-0" not in container_placement.devices["gpu"]


def test_place_refuses_odd_cpus_when_only_whole_cores_are_given() -> None:
    """full-pcpus-only wants a multiple of the threads a core."""
    view = structs.replace(dgx(), options=AlignmentOptions(cpu=CpuOptions(full_pcpus_only=True)))

    assert codes(place(view, pod("p", container(cpus=3)))) == ["smt-alignment"]


def test_place_refuses_when_the_owner_holds_something_already() -> None:
    """An owner is placed once; a retry is recognised by its operation id, not here."""
    view = holding(dgx(), "trainer", gpu=("gpu-0",))

    assert codes(place(view, TRAINER)) == ["already-placed"]


def test_place_refuses_when_the_owner_was_placed_and_holds_nothing() -> None:
    """A pod that asks for nothing is placed once, too: one owner, one decision."""
    nothing = pod("nothing", container())
    outcome = place(dgx(), nothing)
    assert isinstance(outcome, Placement)
    step = transitions.reserve(Ledger(node="demo-node"), op_id="op-1", request=nothing, placement=outcome, decision_id="d-1")

    assert codes(place(with_ledger(dgx(), step.ledger), nothing)) == ["already-placed"]


def test_place_records_a_silent_service_when_its_hints_did_not_come() -> None:
    """A class whose service kept silent has no opinion, and the placement says so."""
    (container_placement,) = placed(place(structs.replace(dgx(), silent_classes=("gpu",)), TRAINER))

    assert [hint.hints for hint in container_placement.hints if hint.resource == "gpu"] == [None]
    assert "no-opinion" in [reason.code for reason in container_placement.reasons]


def test_place_follows_custom_hints_when_a_service_gave_some() -> None:
    """Hints from the service itself replace those by kubelet's rules."""
    view = structs.replace(dgx(policy=Policy.RESTRICTED), custom_hints={"gpu/2": ((NodeSet(1), True),)})

    (container_placement,) = placed(place(view, TRAINER))

    assert container_placement.numa_nodes == NodeSet(1)


@pytest.mark.parametrize(
    ("available", "must", "size", "wanted"),
    [
        pytest.param(("gpu-0", "gpu-2", "gpu-3"), (), 2, {"gpu-2", "gpu-3"}, id="whole-switch"),
        pytest.param(("gpu-0", "gpu-2", "gpu-3"), ("gpu-0",), 1, {"gpu-0"}, id="must-alone"),
        pytest.param(("gpu-0", "gpu-2", "gpu-3"), ("gpu-0",), 2, {"gpu-0", "gpu-2"}, id="must-and-nearest"),
        pytest.param(("gpu-0",), (), 3, {"gpu-0"}, id="too-few"),
        pytest.param(("stranger", "gpu-4"), (), 1, {"gpu-4"}, id="strangers-last"),
        pytest.param(("stranger", "gpu-4"), ("other",), 3, {"other", "gpu-4", "stranger"}, id="strangers-count"),
        pytest.param((), (), 2, set(), id="nothing"),
        pytest.param(("gpu-6", "gpu-7", "gpu-4"), (), 2, {"gpu-4", "gpu-6"}, id="live-pods-last"),
    ],
)
def test_prefer_keeps_must_and_size_whatever_it_is_offered(
    available: tuple[str, ...], must: tuple[str, ...], size: int, wanted: set[str]
) -> None:
    """The preference is total: what must be in is in, the size is kept, what a live pod holds comes last."""
    chosen, reason = prefer(holding(dgx(), "live", gpu=("gpu-7",)), "gpu", available, must, size)

    assert set(chosen) == wanted
    assert len(chosen) == len(wanted)
    assert reason


def test_prefer_packs_cores_when_cpus_are_devices() -> None:
    """CPU devices are preferred as whole cores."""
    chosen, _ = prefer(dgx(), "cpu", ("cpu-0", "cpu-1", "cpu-113", "cpu-2"), (), 2)

    assert set(chosen) == {"cpu-1", "cpu-113"}


def test_prefer_takes_the_last_device_when_it_chooses_from_the_end() -> None:
    """Claims are given the first devices by name: one device at the plugin's door comes from the other end, also when it breaks a pair."""
    view = holding(dgx(), "claim", gpu=("gpu-0",))
    names = tuple(f"gpu-{place}" for place in range(8))

    beside_the_claim, _ = prefer(view, "gpu", names, (), 1)
    from_the_end, why = prefer(view, "gpu", names, (), 1, is_from_end=True)

    assert (beside_the_claim, from_the_end) == (("gpu-1",), ("gpu-7",))
    assert why == "the last by name, since claims are given the first"


@pytest.mark.parametrize(
    ("held", "size", "wanted"),
    [
        ((), 2, ("gpu-6", "gpu-7")),
        (("gpu-7",), 2, ("gpu-4", "gpu-5")),
        (("gpu-5", "gpu-7"), 4, ("gpu-0", "gpu-1", "gpu-2", "gpu-3")),
        ((), 4, ("gpu-4", "gpu-5", "gpu-6", "gpu-7")),
    ],
    ids=["last-pair", "last-whole-pair", "last-whole-node", "last-node"],
)
def test_prefer_aligns_first_when_it_chooses_several_from_the_end(held: tuple[str, ...], size: int, wanted: tuple[str, ...]) -> None:
    """The order decides only among sets that are equally close to each other."""
    names = tuple(f"gpu-{place}" for place in range(8))

    chosen, _ = prefer(holding(dgx(), "live", gpu=held), "gpu", names, (), size, is_from_end=True)

    assert chosen == wanted


def test_prefer_takes_what_is_withheld_when_nothing_else_is_left() -> None:
    """A device of a claim that is not prepared yet comes after every other free one, and before what a live pod holds."""
    view = holding(dgx(), "live", gpu=("gpu-5",))
    names = ("gpu-5", "gpu-6", "gpu-7")

    beside, _ = prefer(view, "gpu", names, (), 1, withheld=("gpu-7",), is_from_end=True)
    with_it, _ = prefer(view, "gpu", names, (), 2, withheld=("gpu-7",), is_from_end=True)

    assert (beside, set(with_it)) == (("gpu-6",), {"gpu-6", "gpu-7"})


def test_prefer_packs_the_last_cores_when_it_chooses_cpus_from_the_end() -> None:
    """Whole cores as ever, of the other end, and withheld ones last."""
    names = tuple(f"cpu-{cpu}" for cpu in range(224))

    first, _ = prefer(dgx(), "cpu", names, (), 2)
    last, _ = prefer(dgx(), "cpu", names, (), 2, is_from_end=True)
    beside, _ = prefer(dgx(), "cpu", names, (), 2, is_from_end=True, withheld=("cpu-223",))
    all_of_it, _ = prefer(dgx(), "cpu", ("cpu-111", "cpu-223"), (), 2, is_from_end=True, withheld=("cpu-223",))

    assert (first, set(last), set(beside)) == (("cpu-0", "cpu-112"), {"cpu-111", "cpu-223"}, {"cpu-110", "cpu-222"})
    assert set(all_of_it) == {"cpu-111", "cpu-223"}


def test_place_refuses_machines_above_the_limit_when_the_operator_set_one() -> None:
    """max-allowable-numa-nodes refuses aligned pods on larger machines, and only where it is set."""
    view = structs.replace(dgx(), numa_nodes=NodeSet.of(range(10)), distances=())
    limited = structs.replace(view, options=AlignmentOptions(max_allowable_numa_nodes=8))

    assert codes(place(limited, TRAINER)) == ["too-many-numa-nodes"]
    assert isinstance(place(limited, structs.replace(TRAINER, policy=Policy.NONE)), Placement)
    assert isinstance(place(view, TRAINER), Placement)


GIB = 1 << 30


def with_memory(*, mode: PlanMode = PlanMode.COMPATIBLE, policy: Policy = Policy.RESTRICTED) -> NodeView:
    """The demo machine with 64 GiB and 8 GiB of huge pages a node, memory aligned."""
    return structs.replace(
        dgx(),
        options=AlignmentOptions(policy=policy, aligns_memory=True, mode=mode),
        memory=tuple(NumaMemory(id=node, allocatable={"memory": 64 * GIB, "hugepages-2Mi": 8 * GIB}) for node in (0, 1)),
    )


def with_block(view: NodeView, name: str, nodes: str, **shares: int) -> NodeView:
    """The same node with memory held by the pod of that name; shares are `n0=…` in GiB."""
    block = MemoryBlock(
        kind="memory", nodes=NodeSet.parse(nodes), shares=tuple((int(node[1:]), size * GIB) for node, size in sorted(shares.items()))
    )
    return structs.replace(view, held_memory={owner(name).key: (block,)})


def hungry(name: str, gib: int, *, gpus: int = 2, hugepages: int = 0) -> PodRequest:
    """A pod of one container with memory."""
    wanted = structs.replace(container(gpu=gpus), memory_bytes=gib * GIB, hugepages={"hugepages-2Mi": hugepages * GIB} if hugepages else {})
    return pod(name, wanted)


def test_place_takes_memory_with_the_devices_when_memory_is_aligned() -> None:
    """Memory and huge pages come from the node of the GPUs, and the placement says how much of which."""
    (container_placement,) = placed(place(with_block(with_memory(), "busy", "0", n0=40), hungry("p", 32, hugepages=2)))

    assert container_placement.alignment == Hint(NodeSet(1), preferred=True)
    assert container_placement.numa_nodes == NodeSet(1)
    assert {block.kind: block.by_node for block in container_placement.memory} == {"memory": {1: 32 * GIB}, "hugepages-2Mi": {1: 2 * GIB}}


def test_place_keeps_groups_and_single_nodes_apart_when_memory_spans_nodes() -> None:
    """A node that serves a group takes no single-node block; the refusal names who holds it."""
    view = with_block(with_memory(), "wide", "0-1", n0=10, n1=10)

    outcome = place(view, hungry("p", 20))

    assert isinstance(outcome, Refusal)
    assert [reason.facts["owner"] for reason in outcome.to_free] == [owner("wide").key]


@pytest.mark.parametrize(("mode", "code"), [(PlanMode.COMPATIBLE, "not-enough-memory"), (PlanMode.CORRECTED, "no-numa-node")])
def test_place_refuses_memory_that_is_not_there(mode: PlanMode, code: str) -> None:
    """Kubelet has no opinion and fails afterwards (k/k 128708); corrected says beforehand that no node set has it."""
    assert code in codes(place(with_memory(mode=mode), hungry("p", 200)))


def test_place_lets_later_containers_reuse_the_init_containers_memory() -> None:
    """What an init container took on the same nodes is not taken again."""
    init = ContainerRequest(name="init", kind=ContainerKind.INIT, memory_bytes=48 * GIB)
    main = ContainerRequest(name="main", memory_bytes=56 * GIB)

    first, second = placed(place(with_memory(), PodRequest(owner=owner("p"), containers=(init, main))))

    assert [block.by_node for block in (*first.memory, *second.memory)] == [{0: 48 * GIB}, {0: 8 * GIB}]


def test_place_never_aligns_memory_that_may_be_exceeded() -> None:
    """Burstable memory is no matter of NUMA nodes, as in kubelet."""
    request = pod("p", structs.replace(container(gpu=1), memory_bytes=500 * GIB, is_memory_fixed=False))

    assert placed(place(with_memory(), request))[0].memory == ()


def test_place_ignores_memory_when_the_node_does_not_align_it() -> None:
    """Without the policy memory is only recorded, as with kubelet's policy None."""
    (container_placement,) = placed(place(dgx(), hungry("p", 10_000)))

    assert container_placement.memory == ()
