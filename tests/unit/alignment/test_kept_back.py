"""Devices that an operator keeps back: nobody new gets them, by number, by name or by share, and
the reason is the operator's.
"""

from __future__ import annotations

import pytest
from msgspec import structs

from support.alignment_nodes import container, dgx, holding, owner, pod
from support.partitioned_cards import SHARED_NIC
from topobus.engine.alignment.planning.placement import place
from topobus.values.device import Device
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState, RecoveryAction
from topobus.values.maintenance import DeviceVerb, Maintenance
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest, Policy
from topobus.values.view import NodeView

KEPT_BACK = Maintenance(verb=DeviceVerb.MAINTAIN, why="fan", who="ada")
SICK = DeviceHealth(
    state=HealthState.UNHEALTHY,
    conditions=(Condition(dimension=Dimension.LINK, state=HealthState.UNHEALTHY, reason="fell-off-bus"),),
)


def _named(device_class: str, name: str, *, by_share: bool = False) -> PodRequest:
    wanted = DeviceRequest(device_class=device_class, count=1, names=(name,), by_share=by_share)
    return PodRequest(owner=owner("p"), containers=(ContainerRequest(name="main", devices=(wanted,)),))


def test_place_takes_another_device_than_the_one_that_is_kept_back() -> None:
    """Two of a class, one kept back: one is placed, two are refused."""
    gpus = (Device(name="gpu-0", device_class="gpu", maintenance=KEPT_BACK), Device(name="gpu-1", device_class="gpu"))
    view = structs.replace(dgx(), devices={"gpu": gpus})

    placed = place(view, pod("p", container(gpu=1)))

    assert isinstance(placed, Placement)
    assert placed.containers[0].devices == {"gpu": ("gpu-1",)}
    assert isinstance(place(view, pod("p", container(gpu=2))), Refusal)


@pytest.mark.parametrize("by_share", [False, True], ids=["whole", "share"])
def test_place_names_the_operator_when_a_named_device_is_kept_back(by_share: bool) -> None:
    """Whole and by share: the reason says who keeps it back, and why."""
    view = structs.replace(dgx(), devices={"nic": (structs.replace(SHARED_NIC, maintenance=KEPT_BACK),)})

    refused = place(view, _named("nic", "nic-0", by_share=by_share))

    assert isinstance(refused, Refusal)
    assert [reason.code for reason in refused.reasons] == ["device-kept-back"]
    assert refused.reasons[0].message.removeprefix("container 'main': ") == "nic-0 is under maintenance by ada: fan"


@pytest.mark.parametrize(
    ("device", "why"),
    [
        pytest.param(
            Device(name="gpu-0", device_class="gpu", maintenance=KEPT_BACK),
            "under maintenance by ada: fan",
            id="maintained",
        ),
        pytest.param(
            Device(name="gpu-0", device_class="gpu", maintenance=structs.replace(KEPT_BACK, verb=DeviceVerb.EXCLUDE)),
            "excluded by ada: fan",
            id="excluded",
        ),
        pytest.param(Device(name="gpu-0", device_class="gpu", health=SICK), "unhealthy: fell-off-bus", id="sick"),
        pytest.param(
            Device(name="gpu-0", device_class="gpu", health=DeviceHealth(state=HealthState.UNKNOWN)),
            "unknown",
            id="unknown",
        ),
        pytest.param(Device(name="gpu-0", device_class="gpu", is_spare=True), "a spare", id="spare"),
        pytest.param(Device(name="gpu-0", device_class="gpu"), "", id="well"),
    ],
)
def test_device_says_why_nobody_new_gets_it(device: Device, why: str) -> None:
    """The operator's word comes before the device's health.

    A device that may be had says nothing.
    """
    assert device.why_not == why
    assert device.is_allocatable is (why == "")
    assert device.is_excluded is why.startswith("excluded")


def test_only_maintain_and_exclude_last() -> None:
    """What stands until it is taken back, and what is done once."""
    assert [verb.value for verb in DeviceVerb if verb.is_lasting] == ["maintain", "exclude"]


def test_operator_is_named_in_sentences() -> None:
    """A decision of an operator's reads as a sentence."""
    assert str(Owner(kind=OwnerKind.OPERATOR, name="ada", uid="gpu/gpu-0")) == "operator ada"


_RECOVERS = DeviceHealth(
    state=HealthState.RECOVERING,
    conditions=(
        Condition(
            dimension=Dimension.LINK,
            state=HealthState.RECOVERING,
            reason="fell-off-bus",
            since="2026-11-28T08:05:01Z",
            until="2026-11-28T08:05:31Z",
        ),
    ),
)
_REPLACE = Condition(dimension=Dimension.LINK, state=HealthState.UNHEALTHY, reason="ecc", action=RecoveryAction.REPLACE)


def _four_on_a_node(**changed: Device) -> NodeView:
    """Four GPUs on NUMA node 0 and four on node 1 under single-numa-node, those of node 1 held.

    Some of node 0 changed.
    """
    view = holding(dgx(policy=Policy.SINGLE_NUMA_NODE), "other", gpu=("gpu-4", "gpu-5", "gpu-6", "gpu-7"))
    gpus = tuple(changed.get(device.name.replace("-", "_"), device) for device in view.devices["gpu"])
    return structs.replace(view, devices={**view.devices, "gpu": gpus})


def _gpu(place: int, **fields: object) -> Device:
    return structs.replace(dgx().devices["gpu"][place], **fields)


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        pytest.param(
            {"gpu_1": _gpu(1, health=_RECOVERS)},
            [
                (
                    "wait",
                    "gpu-1 is recovering (fell-off-bus) since 2026-11-28T08:05:01Z, and is given out again "
                    "at 2026-11-28T08:05:31Z "
                    "unless it gets sick before; it would fit with it",
                )
            ],
            id="recovering",
        ),
        pytest.param(
            {"gpu_1": _gpu(1, maintenance=KEPT_BACK)},
            [("return", "gpu-1 is under maintenance by ada: fan; it would fit with it: `topobus device return gpu-1`")],
            id="kept-back",
        ),
        pytest.param(
            {"gpu_1": _gpu(1, health=DeviceHealth(state=HealthState.UNHEALTHY, conditions=(_REPLACE,)))},
            [("repair", "gpu-1 is unhealthy: ecc; it would fit with it: replace")],
            id="broken",
        ),
        pytest.param(
            {"gpu_1": _gpu(1, health=SICK), "gpu_2": _gpu(2, health=DeviceHealth(state=HealthState.RECOVERING))},
            [
                ("repair", "gpu-2 is recovering; it would fit with it"),
                ("repair", "gpu-1 is unhealthy: fell-off-bus; it would fit with it"),
            ],
            id="two-that-are-both-needed",
        ),
    ],
)
def test_place_says_what_brings_devices_back_when_it_would_fit_with_them(
    changed: dict[str, Device], wanted: list[tuple[str, str]]
) -> None:
    """Nobody holds what is missing: time, the operator's word or a repair would help, and which is
    said of which device.
    """
    refused = place(_four_on_a_node(**changed), pod("p", container(gpu=4)))

    assert isinstance(refused, Refusal)
    assert [(reason.code, reason.message) for reason in refused.to_free if reason.code != "free-owner"] == wanted


def test_place_names_the_device_that_comes_back_by_itself_alone_when_one_is_enough() -> None:
    """Three of four are wanted, and two are out: the one that recovers is enough, so nobody needs
    to repair the other.
    """
    view = _four_on_a_node(gpu_1=_gpu(1, health=SICK), gpu_2=_gpu(2, health=_RECOVERS))

    refused = place(view, pod("p", container(gpu=3)))

    assert isinstance(refused, Refusal)
    assert [reason.facts["device"] for reason in refused.to_free if reason.code != "free-owner"] == ["gpu-2"]


def test_place_counts_each_device_once_when_one_is_held_and_sick() -> None:
    """Eight devices: three held, of which one is sick, leave five."""
    view = holding(dgx(), "other", gpu=("gpu-0", "gpu-1", "gpu-2"))
    gpus = tuple(
        structs.replace(device, health=SICK) if device.name == "gpu-0" else device for device in view.devices["gpu"]
    )

    refused = place(structs.replace(view, devices={**view.devices, "gpu": gpus}), pod("p", container(gpu=9)))

    assert isinstance(refused, Refusal)
    (reason,) = [reason for reason in refused.reasons if reason.code == "not-enough-devices"]
    assert reason.message.endswith("wants 9 gpu; of 8 on this node 5 can be had (3 held, 0 not healthy)")
    assert not [advice for advice in refused.to_free if advice.code in ("wait", "return", "repair")]


def test_place_names_the_devices_that_are_out_when_there_are_too_few() -> None:
    """Who keeps a device back and why stands beside the number."""
    view = _four_on_a_node(gpu_1=_gpu(1, maintenance=KEPT_BACK))

    refused = place(view, pod("p", container(gpu=8)))

    assert isinstance(refused, Refusal)
    (reason,) = [reason for reason in refused.reasons if reason.code == "not-enough-devices"]
    assert reason.message.endswith(
        "(4 held, 0 not healthy, 1 withheld by an operator): gpu-1 under maintenance by ada: fan"
    )


def test_place_names_the_devices_that_are_out_beside_what_is_free_on_each_node() -> None:
    """Five are free, and no NUMA node has four of them: whose fault it is stands in the table of
    the nodes.
    """
    view = holding(dgx(policy=Policy.SINGLE_NUMA_NODE), "other", gpu=("gpu-4", "gpu-5"))
    gpus = tuple(_gpu(1, health=_RECOVERS) if device.name == "gpu-1" else device for device in view.devices["gpu"])

    refused = place(structs.replace(view, devices={**view.devices, "gpu": gpus}), pod("p", container(gpu=4)))

    assert isinstance(refused, Refusal)
    (table,) = [reason.message for reason in refused.reasons if reason.code == "resource-nodes"]
    assert table.endswith("(node 0: 3 of 4 free; node 1: 2 of 4 free; gpu-1 recovering: fell-off-bus)")


def test_place_says_both_when_a_device_is_held_and_kept_back() -> None:
    """All eight are wanted, and one is somebody's and under maintenance: its holder has to go, and
    the operator to return it.
    """
    view = holding(dgx(), "other", gpu=("gpu-0",))
    gpus = tuple(
        structs.replace(device, maintenance=KEPT_BACK) if device.name == "gpu-0" else device
        for device in view.devices["gpu"]
    )

    refused = place(structs.replace(view, devices={**view.devices, "gpu": gpus}), pod("p", container(gpu=8)))

    assert isinstance(refused, Refusal)
    assert [(reason.code, reason.facts.get("device") or reason.facts["owner"]) for reason in refused.to_free] == [
        ("free-owner", owner("other").key),
        ("return", "gpu-0"),
    ]


def test_place_names_no_way_out_when_even_all_devices_are_too_few() -> None:
    """Nine of eight: neither the holder nor the operator stands in the way."""
    view = holding(dgx(), "other", gpu=("gpu-0",))
    gpus = tuple(
        structs.replace(device, maintenance=KEPT_BACK) if device.name == "gpu-0" else device
        for device in view.devices["gpu"]
    )

    refused = place(structs.replace(view, devices={**view.devices, "gpu": gpus}), pod("p", container(gpu=9)))

    assert isinstance(refused, Refusal)
    assert refused.to_free == ()


def test_place_gives_a_spare_to_a_claim_that_names_it_alone() -> None:
    """A pod that asks by number gets another, and is refused with the spare as the way out; a claim
    that was allocated the spare in the moment before has it.
    """
    gpus = (_gpu(0, is_spare=True), _gpu(1))
    view = structs.replace(dgx(), devices={"gpu": gpus})

    placed = place(view, pod("p", container(gpu=1)))
    refused = place(view, pod("p", container(gpu=2)))
    claim = place(view, _named("gpu", "gpu-0"))

    assert isinstance(placed, Placement)
    assert placed.containers[0].devices == {"gpu": ("gpu-1",)}
    assert isinstance(refused, Refusal)
    assert refused.reasons[0].message.endswith("1 can be had (0 held, 0 not healthy, 1 spare): gpu-0 a spare")
    assert [(reason.code, reason.message) for reason in refused.to_free] == [
        (
            "device-is-spare",
            "gpu-0 is a spare; it would fit with it: set a smaller `spares.count` of the gpu service",
        )
    ]
    assert isinstance(claim, Placement)
    assert claim.containers[0].devices == {"gpu": ("gpu-0",)}
