"""Devices that an operator keeps back: nobody new gets them, by number, by name or by share, and the reason is the operator's."""

from __future__ import annotations

import pytest
from msgspec import structs

from support.alignment_nodes import container, dgx, owner, pod
from support.partitioned_cards import SHARED_NIC
from topobus.domain.alignment.planning.placement import place
from topobus.domain.device import Device
from topobus.domain.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.domain.maintenance import DeviceVerb, Maintenance
from topobus.domain.outcome import Placement, Refusal
from topobus.domain.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest

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
        pytest.param(Device(name="gpu-0", device_class="gpu", maintenance=KEPT_BACK), "under maintenance by ada: fan", id="maintained"),
        pytest.param(
            Device(name="gpu-0", device_class="gpu", maintenance=structs.replace(KEPT_BACK, verb=DeviceVerb.EXCLUDE)),
            "excluded by ada: fan",
            id="excluded",
        ),
        pytest.param(Device(name="gpu-0", device_class="gpu", health=SICK), "unhealthy: fell-off-bus", id="sick"),
        pytest.param(Device(name="gpu-0", device_class="gpu", health=DeviceHealth(state=HealthState.UNKNOWN)), "unknown", id="unknown"),
        pytest.param(Device(name="gpu-0", device_class="gpu"), "", id="well"),
    ],
)
def test_device_says_why_nobody_new_gets_it(device: Device, why: str) -> None:
    """The operator's word comes before the device's health; a device that may be had says nothing."""
    assert device.why_not == why
    assert device.is_allocatable is (why == "")
    assert device.is_excluded is why.startswith("excluded")


def test_only_maintain_and_exclude_last() -> None:
    """What stands until it is taken back, and what is done once."""
    assert [verb.value for verb in DeviceVerb if verb.is_lasting] == ["maintain", "exclude"]


def test_operator_is_named_in_sentences() -> None:
    """A decision of an operator's reads as a sentence."""
    assert str(Owner(kind=OwnerKind.OPERATOR, name="ada", uid="gpu/gpu-0")) == "operator ada"
