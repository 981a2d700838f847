"""Devices that pods get by a claim only: what planning by count leaves alone, and what is said of
it.
"""

from __future__ import annotations

import pytest
from msgspec import structs

from support.alignment_nodes import container, dgx, holding, owner, pod
from support.partitioned_cards import SHARED_NIC, card, counters_of
from topobus.engine.alignment.planning.node_view import with_ledger
from topobus.engine.alignment.planning.placement import place, plan
from topobus.engine.ledger import transitions
from topobus.values.device import Device
from topobus.values.health import DeviceHealth, HealthState
from topobus.values.ledger import Ledger
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import ContainerRequest, DeviceRequest, PodRequest
from topobus.values.view import NodeView


def _view(*gpus: Device) -> NodeView:
    return structs.replace(
        dgx(), devices={"gpu": (*card(), *gpus), "nic": (SHARED_NIC,)}, counter_sets={"gpu": counters_of("gpu-0")}
    )


def _named(device_class: str, *names: str, by_share: bool = False, name: str = "p") -> PodRequest:
    devices = (DeviceRequest(device_class=device_class, count=len(names), names=names, by_share=by_share),)
    return PodRequest(owner=owner(name), containers=(ContainerRequest(name="main", devices=devices),))


def _codes(outcome: Placement | Refusal) -> list[str]:
    assert isinstance(outcome, Refusal)
    return [reason.code for reason in outcome.reasons]


def test_place_chooses_what_excludes_nobody_when_devices_are_asked_for_by_count() -> None:
    """The plain GPU is chosen, and of the card and its partitions
    nothing, however many are wanted.
    """
    plain = Device(name="gpu-9", device_class="gpu")

    placed = place(_view(plain), pod("p", container(gpu=1)))
    refused = place(_view(plain), pod("p", container(gpu=2)))

    assert isinstance(placed, Placement)
    assert placed.containers[0].devices == {"gpu": ("gpu-9",)}
    assert _codes(refused) == ["not-enough-devices", "claims-only"]
    assert isinstance(refused, Refusal)
    assert (
        refused.reasons[1].message
        == "4 devices of class gpu are shared, or exclude each other: ask for them by a ResourceClaim"
    )


@pytest.mark.parametrize(
    ("held", "wanted", "codes"),
    [
        pytest.param(("gpu-0",), ("gpu-0-part-b",), ["counter-short"], id="a part of a held card"),
        pytest.param(("gpu-0-part-a",), ("gpu-0",), ["counter-short"], id="a card with a held part"),
        pytest.param(
            (), ("gpu-0-part-a", "gpu-0-part-b", "gpu-0-part-c"), ["counter-short"], id="too many parts at once"
        ),
        pytest.param((), ("gpu-0", "gpu-0-part-a"), ["counter-short"], id="a card and its part at once"),
    ],
)
def test_place_refuses_named_devices_when_a_counter_is_short(
    held: tuple[str, ...], wanted: tuple[str, ...], codes: list[str]
) -> None:
    """The reason names the counter, what there is, and who uses it."""
    view = holding(_view(), "other", gpu=held) if held else _view()

    assert _codes(place(view, _named("gpu", *wanted))) == codes


def test_place_takes_named_parts_when_they_fit() -> None:
    """Parts of 4 and 3 of 7 slices."""
    placed = place(_view(), _named("gpu", "gpu-0-part-a", "gpu-0-part-b"))

    assert isinstance(placed, Placement)
    assert placed.containers[0].devices == {"gpu": ("gpu-0-part-a", "gpu-0-part-b")}


def test_place_gives_a_share_beside_shares_and_not_beside_the_whole() -> None:
    """Held by share it may be shared once more.

    Held whole it may not, and the whole may not be had beside a share.
    """
    held = holding(_view(), "other", nic=("nic-0",))
    by_share = structs.replace(held, shared_devices={"nic": ("nic-0",)})

    assert isinstance(place(by_share, _named("nic", "nic-0", by_share=True)), Placement)
    assert _codes(place(held, _named("nic", "nic-0", by_share=True))) == ["device-held"]
    assert _codes(place(by_share, _named("nic", "nic-0"))) == ["device-held"]


def test_place_refuses_a_share_when_the_device_is_not_shared_or_not_well() -> None:
    """A share of a device that is given whole, and of one that is sick, each by its reason."""
    sick = structs.replace(SHARED_NIC, health=DeviceHealth(state=HealthState.UNHEALTHY))
    view = structs.replace(dgx(), devices={"nic": (sick, Device(name="nic-1", device_class="nic"))})

    assert _codes(place(view, _named("nic", "nic-0", by_share=True))) == ["device-unhealthy"]
    assert _codes(place(view, _named("nic", "nic-1", by_share=True))) == ["not-shared"]


def test_plan_refuses_a_share_as_place_does() -> None:
    """Who tries many requests learns the request's own fault, too."""
    view = structs.replace(dgx(), devices={"nic": (Device(name="nic-1", device_class="nic"),)})
    request = _named("nic", "nic-1", by_share=True)

    assert plan(view, request) == place(view, request)


def test_owner_of_a_share_is_placed_already_when_it_asks_again() -> None:
    """Each of two owners with a share of one device holds it, whichever of them the view names."""
    ledger = Ledger(node="demo-node")
    for name in ("a", "b"):
        request = _named("nic", "nic-0", by_share=True, name=name)
        placed = place(with_ledger(_view(), ledger), request)
        assert isinstance(placed, Placement)
        ledger = transitions.reserve(ledger, op_id=name, request=request, placement=placed, decision_id=name).ledger

    view = with_ledger(_view(), ledger)

    assert view.shared_devices == {"nic": ("nic-0",)}
    for name in ("a", "b"):
        assert _codes(place(view, _named("nic", "nic-0", by_share=True, name=name))) == ["already-placed"]
