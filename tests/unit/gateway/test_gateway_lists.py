"""Promises of what kubelet is told: complete, sorted, and never without a device that somebody
holds.
"""

from __future__ import annotations

import pytest
from msgspec import structs

from topobus.gateway.device_plugins.rules.holdings import idle_allocations
from topobus.gateway.device_plugins.rules.list_entry import ListEntry
from topobus.gateway.device_plugins.rules.lists import (
    DraHealth,
    HealthEntry,
    first_that_fit,
    health_list,
    holders_of,
    plugin_lists,
    sharers_of,
)
from topobus.gateway.device_plugins.rules.replicas import share_holders
from topobus.values.device import Device, Inventory
from topobus.values.device_sharing import HeldShare
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.request import Owner, OwnerKind

CLAIM = Owner(kind=OwnerKind.CLAIM, name="training", uid="u-1")
RESOURCE = "topobus.dev/gpu"
PLUGIN = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name=RESOURCE, uid="h-1")
POOL = "topobus.dev/gpu-h100"
POOL_PLUGIN = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name=POOL, uid="h-2")


def gpu(name: str, nodes: NodeSet | None = None, state: HealthState = HealthState.HEALTHY) -> Device:
    """A GPU in a state of health."""
    conditions = (
        ()
        if state is HealthState.HEALTHY
        else (Condition(dimension=Dimension.MEMORY, state=state, reason="ecc", message="row 7"),)
    )
    return Device(
        name=name, device_class="gpu", numa_nodes=nodes, health=DeviceHealth(state=state, conditions=conditions)
    )


def inventory(*devices: Device) -> Inventory:
    """An inventory of GPUs."""
    return Inventory(node="n1", device_class="gpu", generation=1, devices=devices)


def ledger(owner: Owner, *holdings: Holding) -> Ledger:
    """A ledger with one owner."""
    return Ledger(node="n1", allocations={owner.key: Allocation(owner=owner, holdings=holdings)})


def plugin_list(
    shown: Inventory | None, holders: dict[str, Owner], previous: tuple[ListEntry, ...] = ()
) -> tuple[ListEntry, ...]:
    """The list of the class's own resource, where there is no other."""
    (entries,) = plugin_lists("gpu", RESOURCE, shown, holders, previous={RESOURCE: previous}).values()
    return entries


@pytest.mark.parametrize(
    ("state", "is_healthy"),
    [
        (HealthState.HEALTHY, True),
        (HealthState.DEGRADED, True),
        (HealthState.UNHEALTHY, False),
        (HealthState.UNKNOWN, False),
        (HealthState.RECOVERING, False),
    ],
)
def test_list_calls_a_device_healthy_only_when_it_may_be_handed_out(state: HealthState, *, is_healthy: bool) -> None:
    """The one bit that this API has is whether kubelet may choose the device."""
    (entry,) = plugin_list(inventory(gpu("gpu-0", state=state)), {})

    assert entry.is_healthy is is_healthy
    assert ("ecc" in entry.reason) is not is_healthy or state is HealthState.DEGRADED


def test_list_calls_a_spare_healthy_only_when_kubelet_gave_it_already() -> None:
    """Kubelet does not choose it, and reports no fault of a container that has it."""
    devices = (structs.replace(gpu("gpu-0"), is_spare=True), structs.replace(gpu("gpu-1"), is_spare=True))

    entries = plugin_list(inventory(*devices), {"gpu-1": PLUGIN})

    assert [(entry.is_healthy, entry.reason) for entry in entries] == [(False, "it is a spare"), (True, "")]


def test_list_sends_no_topology_when_the_machine_does_not_tell() -> None:
    """Unknown is no opinion, several nodes are all told, and order is by name."""
    entries = plugin_list(inventory(gpu("gpu-2"), gpu("gpu-1", NodeSet(0, 3)), gpu("gpu-0", NodeSet(0))), {})

    assert [(list_entry.id, list_entry.nodes) for list_entry in entries] == [
        ("gpu-0", (0,)),
        ("gpu-1", (0, 3)),
        ("gpu-2", None),
    ]


def test_list_keeps_a_held_device_where_it_was_when_it_left_the_inventory() -> None:
    """A vanished id would read as healthy in kubelet, so it stays, not healthy, on its NUMA node,
    until nobody holds it.
    """
    before = plugin_list(inventory(gpu("gpu-0", NodeSet(1)), gpu("gpu-1")), {"gpu-0": PLUGIN})

    held = plugin_list(inventory(gpu("gpu-1")), {"gpu-0": PLUGIN}, before)
    free = plugin_list(inventory(gpu("gpu-1")), {}, held)

    assert [(list_entry.id, list_entry.is_healthy, list_entry.nodes) for list_entry in held] == [
        ("gpu-0", False, (1,)),
        ("gpu-1", True, None),
    ]
    assert [list_entry.id for list_entry in free] == ["gpu-1"]


def test_list_hides_a_device_from_kubelet_when_another_door_gave_it_out() -> None:
    """What a claim holds is not healthy for the device plugin.

    What kubelet itself allocated keeps its real health.
    """
    entries = plugin_list(inventory(gpu("gpu-0"), gpu("gpu-1")), {"gpu-0": CLAIM, "gpu-1": PLUGIN})

    assert [list_entry.is_healthy for list_entry in entries] == [False, True]
    assert entries[0].reason == "claim default/training holds it"


def test_list_is_what_it_was_when_the_service_never_spoke() -> None:
    """No inventory and no holder is an empty list."""
    assert plugin_list(None, {}) == ()


def test_holders_name_cpus_as_devices_when_a_pod_holds_them() -> None:
    """The ledger keeps CPUs as a set; kubelet's list needs their names."""
    held = ledger(CLAIM, Holding(devices={"gpu": ("gpu-0",)}, cpus=CpuSet(2, 4)))

    assert sorted(holders_of(held, "cpu")) == ["cpu-2", "cpu-4"]
    assert holders_of(held, "gpu") == {"gpu-0": CLAIM}
    assert holders_of(None, "gpu") == {}


def test_holders_name_the_group_when_cpus_were_chosen_of_one() -> None:
    """Kubelet knows the group, the ledger its CPUs: the claim holds both,
    and of the group a share.
    """
    held = ledger(CLAIM, Holding(cpus=CpuSet(2, 4), groups={"cpu-numa-0": CpuSet(2, 4)}))

    assert sorted(holders_of(held, "cpu")) == ["cpu-2", "cpu-4", "cpu-numa-0"]
    assert share_holders(held, "cpu") == {"cpu-numa-0": ((CLAIM, HeldShare(amounts={"cpus": 2})),)}
    assert sharers_of(held) == {("cpu", "cpu-numa-0"): frozenset({CLAIM})}
    assert (holders_of(held, "gpu"), share_holders(held, "gpu")) == ({}, {})


def test_health_tells_state_and_reason_when_devices_differ() -> None:
    """Unknown stays Unknown on the DRA door, and a held device that is gone is unhealthy."""
    entries = health_list(
        inventory(gpu("gpu-0"), gpu("gpu-1", state=HealthState.UNHEALTHY), gpu("gpu-2", state=HealthState.UNKNOWN)),
        {"gpu-9": CLAIM},
    )

    assert entries == (
        HealthEntry(device="gpu-0", health=DraHealth.HEALTHY),
        HealthEntry(device="gpu-1", health=DraHealth.UNHEALTHY, message="ecc: row 7"),
        HealthEntry(device="gpu-2", health=DraHealth.UNKNOWN, message="ecc: row 7"),
        HealthEntry(device="gpu-9", health=DraHealth.UNHEALTHY, message="not in the inventory any more"),
    )


@pytest.mark.parametrize(
    ("owner", "in_use", "is_idle"),
    [
        pytest.param(PLUGIN, {}, True, id="no-pod-at-all"),
        pytest.param(PLUGIN, {"topobus.dev/gpu": frozenset({"gpu-1"})}, False, id="one-of-two-in-use"),
        pytest.param(PLUGIN, {"topobus.dev/gpu": frozenset({"gpu-7"})}, True, id="others-in-use"),
        pytest.param(PLUGIN, {"other.example/gpu": frozenset({"gpu-1"})}, True, id="same-id-of-another-resource"),
        pytest.param(CLAIM, {}, False, id="claims-are-not-kubelets"),
    ],
)
def test_allocation_is_idle_only_when_kubelet_lists_none_of_its_devices(
    owner: Owner, in_use: dict[str, frozenset[str]], *, is_idle: bool
) -> None:
    """One device in use keeps the whole allocation.

    Claims and placed pods are never judged by PodResources.
    """
    held = ledger(owner, Holding(devices={"gpu": ("gpu-0", "gpu-1")}))

    assert bool(idle_allocations(held, in_use)) is is_idle


def pooled(name: str, pool: str = "gpu-h100", node: int | None = None) -> Device:
    """A GPU in a pool."""
    return Device(name=name, device_class="gpu", pool=pool, numa_nodes=None if node is None else NodeSet(node))


def health_by_resource(lists: dict[str, tuple[ListEntry, ...]]) -> dict[str, dict[str, bool]]:
    """Resource to device to health."""
    return {
        resource: {list_entry.id: list_entry.is_healthy for list_entry in entries}
        for resource, entries in lists.items()
    }


def test_lists_show_a_device_once_when_a_pool_has_it() -> None:
    """What a pool has is not in the class's own list; what nobody's pool has is."""
    lists = plugin_lists("gpu", RESOURCE, inventory(pooled("gpu-0", node=1), gpu("gpu-1")), {})

    assert health_by_resource(lists) == {RESOURCE: {"gpu-1": True}, POOL: {"gpu-0": True}}
    assert lists[POOL][0].nodes == (1,)


def test_lists_keep_an_empty_resource_when_its_last_device_went_elsewhere() -> None:
    """A resource that kubelet knows gets an empty list, which is capacity 0, and not silence."""
    before = plugin_lists("gpu", RESOURCE, inventory(pooled("gpu-0")), {})

    assert health_by_resource(
        plugin_lists("gpu", RESOURCE, inventory(pooled("gpu-0", pool="")), {}, previous=before)
    ) == {
        RESOURCE: {"gpu-0": True},
        POOL: {},
    }


@pytest.mark.parametrize(
    ("holder", "now_in", "wanted"),
    [
        pytest.param(POOL_PLUGIN, "gpu-h100", {RESOURCE: {}, POOL: {"gpu-0": True}}, id="by-its-resource"),
        pytest.param(PLUGIN, "gpu-h100", {RESOURCE: {"gpu-0": True}, POOL: {"gpu-0": False}}, id="by-the-class-before"),
        pytest.param(POOL_PLUGIN, "", {RESOURCE: {"gpu-0": False}, POOL: {"gpu-0": True}}, id="by-a-pool-that-is-gone"),
        pytest.param(CLAIM, "gpu-h100", {RESOURCE: {}, POOL: {"gpu-0": False}}, id="by-a-claim"),
        pytest.param(None, "gpu-h100", {RESOURCE: {}, POOL: {"gpu-0": True}}, id="by-nobody"),
    ],
)
def test_lists_keep_a_device_where_it_is_held_when_it_changed_its_pool(
    holder: Owner | None, now_in: str, wanted: dict[str, dict[str, bool]]
) -> None:
    """An allocated id never leaves the list of the resource that gave it, and no other resource
    offers it meanwhile.
    """
    lists = plugin_lists(
        "gpu", RESOURCE, inventory(pooled("gpu-0", pool=now_in)), {"gpu-0": holder} if holder is not None else {}
    )

    assert health_by_resource(lists) == wanted


@pytest.mark.parametrize(
    ("holder", "resource"), [(PLUGIN, RESOURCE), (POOL_PLUGIN, POOL), (CLAIM, POOL)], ids=["own", "pool", "claim"]
)
def test_lists_keep_a_held_device_as_unhealthy_when_it_is_gone(holder: Owner, resource: str) -> None:
    """It stays with the resource that gave it; a claim's, where it was listed."""
    before = plugin_lists("gpu", RESOURCE, inventory(pooled("gpu-0", node=1)), {"gpu-0": holder})
    after = plugin_lists("gpu", RESOURCE, inventory(), {"gpu-0": holder}, previous=before)

    assert {name: entries for name, entries in health_by_resource(after).items() if entries} == {
        resource: {"gpu-0": False}
    }
    assert after[resource][0].nodes == (1,)


def test_lists_offer_nothing_of_another_prefix_when_the_operator_has_changed_it() -> None:
    """Kubelet's pods of before still have the device, under a resource that we serve no more."""
    old = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="old.dev/gpu", uid="h")

    assert health_by_resource(plugin_lists("gpu", RESOURCE, inventory(gpu("gpu-0")), {"gpu-0": old})) == {
        RESOURCE: {"gpu-0": False}
    }


def test_lists_leave_out_what_is_no_device_id() -> None:
    """The API promises names of at most 63 characters; one bad name must not spoil the others."""
    shown = inventory(gpu("gpu-0"), gpu("g" * 64), gpu("gpu 1"), gpu(""))

    assert health_by_resource(plugin_lists("gpu", RESOURCE, shown, {})) == {RESOURCE: {"gpu-0": True}}


def test_first_that_fit_keeps_held_devices_and_then_goes_by_name() -> None:
    """A list too large loses the last free ones by name, never one that somebody has."""
    entries = tuple(ListEntry(id=name, is_healthy=True, is_held=name == "d") for name in "abcd")

    assert first_that_fit(entries, [10, 10, 10, 10], 30) == (0, 1, 3)
    assert first_that_fit(entries, [10, 10, 10, 10], 40) == (0, 1, 2, 3)
    assert first_that_fit(entries, [10, 10, 10, 10], 39) == (0, 1, 3)


def test_list_keeps_a_held_device_when_it_became_a_claims_to_ask_for() -> None:
    """An allocated id must never leave kubelet's list: it stays, not healthy, with the reason.

    The others of its kind are not listed.
    """
    shared = [structs.replace(gpu(name), allows_multiple=True) for name in ("gpu-0", "gpu-1")]

    entries = plugin_list(inventory(*shared, gpu("gpu-2")), {"gpu-0": PLUGIN})

    assert [(entry.id, entry.is_healthy, entry.is_held) for entry in entries] == [
        ("gpu-0", False, True),
        ("gpu-2", True, False),
    ]
    assert entries[0].reason == "it is shared, or excludes other devices: it is given by claims only"
