"""Replicas as kubelet is told of them, what its choice means, and what
a slice shows beside them.
"""

from __future__ import annotations

import pytest
from msgspec import structs

from support.shared_devices import GIB, RESOURCE, shared_gpus
from topobus.gateway.cluster.rules.slices import pool_devices
from topobus.gateway.device_plugins.rules.device_ids import with_kubelet_ids
from topobus.gateway.device_plugins.rules.list_entry import ListEntry
from topobus.gateway.device_plugins.rules.lists import plugin_lists
from topobus.gateway.device_plugins.rules.replicas import ShareHolders, chosen_of, fault_of_many, prefer_replicas
from topobus.values.device import Device, Inventory
from topobus.values.device_sharing import HeldShare
from topobus.values.request import Owner, OwnerKind
from topobus.values.shares import replica_share

OWN = "topobus.dev/gpu"
(GPU,) = shared_gpus("gpu-0")
CLAIM = Owner(kind=OwnerKind.CLAIM, name="training", uid="u-1")


def plugin(resource: str = RESOURCE, uid: str = "h") -> Owner:
    """An owner behind kubelet's device plugin."""
    return Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name=resource, uid=uid)


def inventory(*devices: Device) -> Inventory:
    """An inventory of GPUs."""
    return Inventory(node="n1", device_class="gpu", generation=1, devices=devices)


def listed(
    *devices: Device, holders: dict[str, Owner] | None = None, sharers: ShareHolders | None = None
) -> dict[str, dict[str, tuple[bool, bool]]]:
    """The lists of the class: resource to id to whether it is healthy, and held."""
    lists = plugin_lists("gpu", OWN, inventory(*devices), holders or {}, sharers=sharers or {})
    return {
        resource: {entry.id: (entry.is_healthy, entry.is_held) for entry in entries}
        for resource, entries in lists.items()
        if entries
    }


def test_a_shared_device_is_listed_by_replicas_alone() -> None:
    """Its own resource has them all; the class's has nothing of it."""
    assert listed(GPU) == {RESOURCE: {f"gpu-0::{number}": (True, False) for number in range(4)}}


def test_held_replicas_keep_their_health_and_claims_take_from_the_free_ones() -> None:
    """A claim of a half leaves one replica beside one that a pod has."""
    sharers = {
        "gpu-0": ((plugin(), replica_share(GPU, [2])), (CLAIM, HeldShare(amounts={"memory": 40 * GIB, "shares": 1})))
    }

    shown = listed(GPU, holders={"gpu-0": plugin()}, sharers=sharers)

    assert shown == {
        RESOURCE: {
            "gpu-0::0": (True, False),
            "gpu-0::1": (False, False),
            "gpu-0::2": (True, True),
            "gpu-0::3": (False, False),
        }
    }


def test_no_replica_is_free_while_somebody_has_the_whole_device() -> None:
    """Whoever had it before it was shared keeps it, under the id by which kubelet knows it."""
    none_free = {f"gpu-0::{number}": (False, False) for number in range(4)}

    assert listed(GPU, holders={"gpu-0": CLAIM}) == {RESOURCE: none_free}
    assert listed(GPU, holders={"gpu-0": plugin(OWN)}) == {OWN: {"gpu-0": (True, True)}, RESOURCE: none_free}


def test_held_replicas_stay_listed_when_the_device_is_not_shared_any_more() -> None:
    """A container's replica does not vanish; the whole device is nobody's until it is let go."""
    whole = structs.replace(GPU, sharing=None, allows_multiple=False, pool="")

    shown = listed(whole, holders={"gpu-0": plugin()}, sharers={"gpu-0": ((plugin(), replica_share(GPU, [1])),)})

    assert shown == {OWN: {"gpu-0": (False, True)}, RESOURCE: {"gpu-0::1": (True, True)}}


def test_held_replicas_stay_listed_when_the_device_or_the_number_is_gone() -> None:
    """A replica that a container has never leaves kubelet's list."""
    (fewer,) = shared_gpus("gpu-0", replicas=2)
    sharers = {"gpu-0": ((plugin(), replica_share(GPU, [3])),)}

    assert listed(fewer, holders={"gpu-0": plugin()}, sharers=sharers)[RESOURCE]["gpu-0::3"] == (False, True)
    assert listed(holders={"gpu-0": plugin()}, sharers=sharers) == {RESOURCE: {"gpu-0::3": (False, True)}}


def test_replicas_are_named_by_their_devices_uuid_where_the_resource_is() -> None:
    """As NVIDIA's device plugin names them."""
    (entry,) = with_kubelet_ids((ListEntry(id="gpu-0::1", is_healthy=True),), {"gpu-0": GPU}, "uuid")

    assert entry.wire_id == "GPU-00000000::1"


def test_kubelets_choice_is_worth_what_its_replicas_are() -> None:
    """Two replicas of one device are two quarters of it."""
    chosen = chosen_of(["gpu-0::3", "gpu-0::1"], inventory(GPU))

    assert chosen.devices == ("gpu-0",)
    assert chosen.shares == {"gpu-0": HeldShare(amounts={"memory": 40 * GIB, "shares": 2}, replicas=(1, 3))}


def test_many_replicas_are_refused_unless_the_operator_says_otherwise() -> None:
    """The reason names the container's wish and the way out."""
    (lenient,) = shared_gpus("gpu-0", refuses_many=False)
    names = ["gpu-0::0", "gpu-0::1"]

    assert "a container asks for 2 shares (gpu-0::0, gpu-0::1), wanted 1" in fault_of_many(
        RESOURCE, names, inventory(GPU)
    )
    assert fault_of_many(RESOURCE, names, inventory(lenient)) == ""


@pytest.mark.parametrize(
    ("policy", "available", "size", "chosen"),
    [
        ("spread", ["gpu-0::1", "gpu-0::2", "gpu-1::0", "gpu-1::1", "gpu-1::2"], 1, ("gpu-1::0",)),
        (
            "spread",
            ["gpu-0::1", "gpu-0::2", "gpu-1::0", "gpu-1::1", "gpu-1::2"],
            3,
            ("gpu-0::1", "gpu-1::0", "gpu-1::1"),
        ),
        ("pack", ["gpu-0::1", "gpu-0::2", "gpu-1::0", "gpu-1::1", "gpu-1::2"], 1, ("gpu-0::1",)),
        ("pack", ["gpu-0::1", "gpu-0::2", "gpu-1::0", "gpu-1::1", "gpu-1::2"], 3, ("gpu-0::1", "gpu-0::2", "gpu-1::0")),
        ("spread", ["gpu-0::10", "gpu-0::9"], 1, ("gpu-0::9",)),
        ("spread", ["gpu-0::0"], 4, ("gpu-0::0",)),
    ],
)
def test_prefer_replicas_spreads_or_packs(
    policy: str, available: list[str], size: int, chosen: tuple[str, ...]
) -> None:
    """Each next replica is of the device with the fewest in use, or the most."""
    devices = shared_gpus("gpu-0", "gpu-1", policy="pack" if policy == "pack" else "spread")

    assert prefer_replicas(available, [], size, inventory(*devices)) == chosen


def test_prefer_replicas_keeps_what_must_be_included() -> None:
    """Kubelet's own wish comes first."""
    assert prefer_replicas(["gpu-0::0", "gpu-0::1", "gpu-0::2"], ["gpu-0::2"], 2, inventory(GPU)) == (
        "gpu-0::0",
        "gpu-0::2",
    )


@pytest.mark.parametrize(
    ("replicas", "memory", "taints"),
    [((), "80Gi", 0), ((0,), "60Gi", 0), ((0, 1, 2), "20Gi", 0), ((0, 1, 2, 3), "80Gi", 1)],
)
def test_a_slice_shows_what_pods_leave_of_a_shared_device(replicas: tuple[int, ...], memory: str, taints: int) -> None:
    """A scheduler that counts claims counts on no more than is left.

    Where no share is left the device is tainted, as a whole one is.
    """
    holders = {"gpu-0": plugin()} if replicas else {}
    sharers = (
        {"gpu-0": ((plugin(), replica_share(GPU, replicas)), (CLAIM, HeldShare(amounts={"memory": GIB})))}
        if replicas
        else {}
    )

    (shown,) = pool_devices(inventory(GPU), holders, sharers=sharers)

    assert shown.capacity["memory"].value == memory
    assert len(shown.taints) == taints
