"""Placements on a node with pools: each resource is planned by itself, and who holds what is told
by class.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from support.alignment_nodes import container, dgx, holding, owner, pod
from topobus.engine.alignment.planning.placement import place, plan, prefer
from topobus.engine.alignment.planning.resource_pools import class_of_resource
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest
from topobus.values.view import NodeView, PlanMode


def pooled(*names: str, pool: str = "gpu-h100") -> NodeView:
    """The demo machine with these GPUs in a pool."""
    view = dgx()
    gpus = tuple(
        structs.replace(device, pool=pool) if device.name in names else device for device in view.devices["gpu"]
    )
    return structs.replace(view, devices={**view.devices, "gpu": gpus})


def wish(device_class: str, count: int) -> ContainerRequest:
    """A container that asks for so many of a class or pool."""
    return ContainerRequest(name="main", devices=(DeviceRequest(device_class=device_class, count=count),))


@pytest.mark.parametrize(
    ("resource", "count", "allowed"),
    [
        pytest.param("gpu-h100", 2, {"gpu-1", "gpu-6", "gpu-7"}, id="pool"),
        pytest.param("gpu", 3, {"gpu-0", "gpu-2", "gpu-3", "gpu-4", "gpu-5"}, id="the-rest"),
    ],
)
def test_place_takes_only_the_resources_own_devices(resource: str, count: int, allowed: set[str]) -> None:
    """A pool's name gets a pool's devices, the class's name what no pool has.

    The answer says which by class.
    """
    outcome = place(pooled("gpu-1", "gpu-6", "gpu-7"), pod("a", wish(resource, count)))

    assert isinstance(outcome, Placement)
    assert list(outcome.containers[0].devices) == ["gpu"]
    assert len(outcome.containers[0].devices["gpu"]) == count
    assert set(outcome.containers[0].devices["gpu"]) <= allowed
    assert [hint.resource for hint in outcome.containers[0].hints] == [resource]


def test_place_aligns_a_pool_with_another_class_when_both_are_asked_for() -> None:
    """Pools have NUMA nodes and switches as classes have: the pair under one switch wins."""
    both = ContainerRequest(
        name="main",
        devices=(DeviceRequest(device_class="gpu-h100", count=1), DeviceRequest(device_class="nic", count=1)),
    )
    outcome = place(holding(pooled("gpu-1", "gpu-6"), "x", nic=("nic-0", "nic-1", "nic-2", "nic-3")), pod("a", both))

    assert isinstance(outcome, Placement)
    assert outcome.containers[0].devices == {"gpu": ("gpu-6",), "nic": ("nic-6",)}


def test_place_joins_the_devices_of_two_resources_of_one_class_in_one_container() -> None:
    """A container may ask for both; its holding is one list of the class."""
    outcome = place(pooled("gpu-7"), pod("a", container(gpu=1, **{"gpu-h100": 1})))

    assert isinstance(outcome, Placement)
    assert outcome.containers[0].devices["gpu"][1] == "gpu-7"


@pytest.mark.parametrize("mode", list(PlanMode))
def test_place_refuses_with_the_resource_and_who_is_in_the_way_when_a_pool_is_empty(mode: PlanMode) -> None:
    """The refusal speaks of the pool, and names the pod that would have to go."""
    view = holding(pooled("gpu-1", "gpu-6"), "busy", gpu=("gpu-1",))
    view = structs.replace(view, options=structs.replace(view.options, mode=mode))
    outcome = place(view, pod("a", wish("gpu-h100", 2)))

    assert isinstance(outcome, Refusal)
    (reason,) = outcome.reasons
    assert (reason.code, reason.facts["resource"], reason.facts["exists"], reason.facts["free"]) == (
        "not-enough-devices",
        "gpu-h100",
        2,
        1,
    )
    assert "wants 2 gpu-h100; of 2 on this node 1 can be had" in reason.message
    assert [each_reason.facts["owner"] for each_reason in outcome.to_free] == [owner("busy").key]


def test_place_refuses_a_pool_that_is_not_here_as_an_unknown_class() -> None:
    """The reason lists the resources that this node has."""
    outcome = place(pooled("gpu-1"), pod("a", wish("gpu-a100", 1)))

    assert isinstance(outcome, Refusal)
    assert outcome.reasons[0].code == "unknown-class"
    assert "gpu, gpu-h100, nic" in outcome.reasons[0].message


def test_place_takes_named_devices_of_any_pool_when_a_claim_names_them() -> None:
    """A claim's devices are of the class, wherever the operator has put them."""
    claim = Owner(kind=OwnerKind.CLAIM, name="c", uid="u")
    names = ("gpu-0", "gpu-1", "gpu-6")
    wanted = ContainerRequest(name="", devices=(DeviceRequest(device_class="gpu", count=3, names=names),))
    outcome = place(pooled("gpu-1", "gpu-6"), PodRequest(owner=claim, containers=(wanted,)))

    assert isinstance(outcome, Placement)
    assert outcome.containers[0].devices == {"gpu": names}


def test_place_lets_a_class_keep_its_name_when_a_pool_is_called_like_it() -> None:
    """A class that somebody's plugin brings is there already, so the pool of that name is none."""
    view = pooled("gpu-1", pool="nic")
    outcome = place(view, pod("a", container(nic=8, gpu=8)))

    assert isinstance(outcome, Placement)
    assert class_of_resource(view, "nic") == "nic"


def test_prefer_chooses_among_what_kubelet_offers_when_it_is_a_pool() -> None:
    """The resource's list is the pool already; the choice is made by class."""
    chosen, _ = prefer(pooled("gpu-1", "gpu-6", "gpu-7"), "gpu", ["gpu-1", "gpu-6", "gpu-7"], [], 2)

    assert chosen == ("gpu-6", "gpu-7")


@given(
    in_pool=st.sets(st.integers(0, 7)),
    held=st.sets(st.integers(0, 7)),
    from_pool=st.integers(0, 8),
    from_rest=st.integers(0, 8),
)
def test_place_admits_exactly_what_both_resources_can_give(
    in_pool: set[int], held: set[int], from_pool: int, from_rest: int
) -> None:
    """With and without the search for what to free: never a device of the other resource, never a
    held one, and never a refusal for nothing.
    """
    view = holding(pooled(*(f"gpu-{index}" for index in in_pool)), "x", gpu=tuple(f"gpu-{index}" for index in held))
    wishes = tuple(
        DeviceRequest(device_class=name, count=count)
        for name, count in (("gpu-h100", from_pool), ("gpu", from_rest))
        if count
    )
    request = pod("a", ContainerRequest(name="main", devices=wishes))
    outcome = place(view, request)

    fits = from_pool <= len(in_pool - held) and from_rest <= len(set(range(8)) - in_pool - held)
    assert isinstance(outcome, Placement) is fits
    assert (plan(view, request) == outcome) or not fits
    if isinstance(outcome, Placement):
        given_ = {int(device.removeprefix("gpu-")) for device in outcome.containers[0].devices.get("gpu", ())}
        assert (len(given_ & in_pool), len(given_ - in_pool), given_ & held) == (from_pool, from_rest, set())
