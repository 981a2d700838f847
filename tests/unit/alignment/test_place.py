"""Promises of `place`: whole pods, exact devices, stable reasons, and
what would have to be freed.
"""

from __future__ import annotations

import pytest
from msgspec import structs

from support.alignment_nodes import container, dgx, holding, owner, pod
from support.outcome_text import explain_text
from topobus.engine.alignment.planning.node_view import with_ledger
from topobus.engine.alignment.planning.placement import place
from topobus.engine.ledger import transitions
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Ledger
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import (
    ContainerKind,
    ContainerRequest,
    DeviceRequest,
    Owner,
    OwnerKind,
    PodRequest,
    Policy,
    Scope,
)
from topobus.values.view import AlignmentOptions, CpuOptions, NodeView
from unit.alignment.outcomes import codes, placed

TRAINER = pod("trainer", container(cpus=16, gpu=2, nic=2))


def sick(view: NodeView, device_class: str, *names: str) -> NodeView:
    """The same node with these devices unhealthy."""
    health = DeviceHealth(
        state=HealthState.UNHEALTHY,
        conditions=(Condition(dimension=Dimension.LINK, state=HealthState.UNHEALTHY, reason="fell-off-bus"),),
    )
    devices = tuple(
        structs.replace(device, health=health) if device.name in names else device
        for device in view.devices[device_class]
    )
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
    """GPUs are taken where NICs are still free under the same switch, though other GPUs come first
    by name.
    """
    view = holding(dgx(), "busy", nic=("nic-0", "nic-1"))

    (container_placement,) = placed(place(view, TRAINER))

    assert container_placement.devices == {"gpu": ("gpu-2", "gpu-3"), "nic": ("nic-2", "nic-3")}


def test_place_takes_a_broken_pair_when_one_gpu_is_asked_for() -> None:
    """A single GPU comes from a switch that has lost one already, so that pairs stay whole."""
    view = holding(dgx(), "busy", gpu=("gpu-2",))

    (container_placement,) = placed(place(view, pod("small", container(gpu=1))))

    assert container_placement.devices == {"gpu": ("gpu-3",)}


def test_place_names_what_to_free_when_no_node_has_all() -> None:
    """FPGAs only on node 0 and free GPUs only on node 1: the owner on node 0 is named, with what it
    holds where.
    """
    (container_placement,) = placed(place(dgx(), TRAINER))
    view = holding(dgx(), "trainer", cpus=str(container_placement.cpus), **container_placement.devices)

    outcome = place(view, pod("second", container(gpu=4, fpga=1), policy=Policy.SINGLE_NUMA_NODE))

    assert codes(outcome) == ["no-common-numa-node", "policy-not-met", "resource-nodes", "resource-nodes", "relax"]
    assert isinstance(outcome, Refusal)
    assert outcome.reasons[-1].facts["resources"] == ("fpga",)
    (free,) = outcome.to_free
    assert (free.facts["owner"], free.facts["devices"], free.facts["numa_nodes"]) == (
        owner("trainer").key,
        ("gpu-0", "gpu-1"),
        "0",
    )
    assert "pod default/trainer holds gpu-0, gpu-1 on NUMA node 0" in explain_text(outcome)


def test_place_names_the_fewest_owners_when_several_stand_in_the_way() -> None:
    """Of all sets of owners that would do, the smallest is named, and of those the one that holds
    least.
    """
    view = holding(dgx(), "big", gpu=("gpu-0", "gpu-1", "gpu-2"))
    view = holding(view, "small-a", gpu=("gpu-4",))
    view = holding(view, "small-b", gpu=("gpu-5",))

    outcome = place(view, pod("wanting", container(gpu=4), policy=Policy.SINGLE_NUMA_NODE))

    assert isinstance(outcome, Refusal)
    assert [reason.facts["owner"] for reason in outcome.to_free] == [owner("big").key]


def test_place_names_devices_on_nodes_that_the_machine_lacks() -> None:
    """A device that names a NUMA node which does not exist is in no hint.

    The refusal says so instead of crashing.
    """
    view = dgx()
    fpgas = tuple(structs.replace(device, numa_nodes=NodeSet(7)) for device in view.devices["fpga"])

    outcome = place(
        structs.replace(view, devices={**view.devices, "fpga": fpgas}),
        pod("p", container(fpga=1), policy=Policy.RESTRICTED),
    )

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


@pytest.mark.parametrize(
    ("device_class", "said"),
    [
        ("gpus", "offers class 'gpus'; did you mean gpu? there are cpu, fpga, gpu, nic"),
        ("tpu", "offers class 'tpu'; there are cpu, fpga, gpu, nic"),
    ],
)
def test_place_names_the_class_that_is_meant_when_one_is_misspelt(device_class: str, said: str) -> None:
    """A misspelt class is refused with the one that is like it, and with all that there are."""
    outcome = place(dgx(), pod("x", container(**{device_class: 1})))

    assert isinstance(outcome, Refusal)
    assert outcome.reasons[0].message.endswith(said)


def named(
    device_class: str, *names: str, count: int | None = None, is_shared: bool = False, kind: OwnerKind = OwnerKind.CLAIM
) -> PodRequest:
    """A claim of exactly these devices."""
    wanted = DeviceRequest(
        device_class=device_class, count=len(names) if count is None else count, names=names, is_shared=is_shared
    )
    return PodRequest(
        owner=Owner(kind=kind, name="claim", uid="c1"), containers=(ContainerRequest(name="", devices=(wanted,)),)
    )


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
    """A claim's devices are taken as named, across nodes too, whatever the node's policy: DRA is no
    hint provider.
    """
    (container_placement,) = placed(place(dgx(policy=Policy.SINGLE_NUMA_NODE), named("gpu", "gpu-1", "gpu-6")))

    assert container_placement.devices == {"gpu": ("gpu-1", "gpu-6")}
    assert container_placement.numa_nodes == NodeSet(0, 1)


def test_place_holds_nothing_back_when_a_device_is_shared() -> None:
    """Admin access sees a held and sick device without taking it."""
    view = holding(sick(dgx(), "gpu", "gpu-1"), "other", gpu=("gpu-1",))

    (container_placement,) = placed(place(view, named("gpu", "gpu-1", is_shared=True)))

    assert container_placement.devices == {"gpu": ("gpu-1",)}


def test_place_reuses_what_init_containers_held_when_app_containers_come() -> None:
    """An app container takes the CPUs and devices of the init container before it.

    A sidecar's stay its own.
    """
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
    """Scope pod merges once: containers that would fit on different nodes stay together, or are
    refused together.
    """
    containers = (container("a", gpu=2), container("b", gpu=2))
    view = holding(dgx(), "busy", gpu=("gpu-0",))

    together = placed(place(view, pod("p", *containers, policy=Policy.SINGLE_NUMA_NODE, scope=Scope.POD)))
    refused = place(
        holding(view, "more", gpu=("gpu-4",)), pod("p", *containers, policy=Policy.SINGLE_NUMA_NODE, scope=Scope.POD)
    )

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
    step = transitions.reserve(
        Ledger(node="demo-node"), op_id="op-1", request=nothing, placement=outcome, decision_id="d-1"
    )

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


def test_place_refuses_machines_above_the_limit_when_the_operator_set_one() -> None:
    """max-allowable-numa-nodes refuses aligned pods on larger machines,
    and only where it is set.
    """
    view = structs.replace(dgx(), numa_nodes=NodeSet.of(range(10)), distances=())
    limited = structs.replace(view, options=AlignmentOptions(max_allowable_numa_nodes=8))

    assert codes(place(limited, TRAINER)) == ["too-many-numa-nodes"]
    assert isinstance(place(limited, structs.replace(TRAINER, policy=Policy.NONE)), Placement)
    assert isinstance(place(view, TRAINER), Placement)


def test_place_names_the_pods_own_sidecar_when_it_has_what_is_missing() -> None:
    """What a sidecar keeps is not held by others, and no device of it is sick: the refusal says who
    has it.
    """
    view = holding(dgx(), "other", gpu=("gpu-0", "gpu-1", "gpu-2", "gpu-3", "gpu-4", "gpu-5"))
    sidecar = container("proxy", gpu=1, cpus=2, kind=ContainerKind.SIDECAR)

    devices = place(
        view,
        pod(
            "p",
            container("early", gpu=1, kind=ContainerKind.INIT),
            sidecar,
            container("late", gpu=2, kind=ContainerKind.INIT),
        ),
    )
    cpus = place(view, pod("p", sidecar, container("main", cpus=10_000)))

    assert isinstance(devices, Refusal)
    assert (
        "of 8 on this node 1 can be had (6 held, 0 not healthy, 1 with container 'proxy' of this pod)"
        in devices.reasons[0].message
    )
    assert devices.reasons[0].facts["own"] == 1
    assert isinstance(cpus, Refusal)
    assert "2 with container 'proxy' of this pod)" in cpus.reasons[0].message
