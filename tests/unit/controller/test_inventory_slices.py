"""Inventories as slices: names, attributes, capacities and taints as
kube-scheduler would see them.
"""

from __future__ import annotations

import pytest

from topobus.controller.state.inventory_slices import devices_of_class, holders_from_ledger, slices_of_pool
from topobus.engine.allocation.pools import PoolState, Slice, gather_pools
from topobus.engine.allocation.values import ALL_GATES, DeviceId, Node
from topobus.formats.kubernetes.limits import check_slice
from topobus.formats.kubernetes.resource import Attribute
from topobus.values.counters import CounterSet, CounterUse
from topobus.values.device import Device, Inventory
from topobus.values.health import DeviceHealth, HealthState
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind

GPU = Device(
    name="gpu-0000-17-00-0",
    device_class="gpu",
    model="NVIDIA H100",
    numa_nodes=NodeSet(1),
    pci=PciAddress.parse("0000:17:00.0"),
    pcie_root="pci0000:16",
    attributes={"driverVersion": "570.86.15", "firmwareVersion": "v7", "ecc": True, "odd name!": 3, "huge": 1 << 70},
    capacity={"memory": 80 << 30},
)


def _inventory(*devices: Device, device_class: str = "gpu", counter_sets: tuple[CounterSet, ...] = ()) -> Inventory:
    return Inventory(node="n1", device_class=device_class, generation=7, devices=devices, counter_sets=counter_sets)


def _slices(*inventories: Inventory, pool: str = "n1") -> tuple[Slice, ...]:
    return slices_of_pool(pool, [devices_of_class(inventory) for inventory in inventories])


def test_slices_carry_the_standard_attributes_when_the_device_has_them() -> None:
    """pcieRoot, pciBusID and numaNode stand under Kubernetes' domain.

    The driver's own names stand bare, made legal.
    """
    (resource_slice,) = _slices(_inventory(GPU))

    assert (
        resource_slice.spec.driver,
        resource_slice.spec.pool.name,
        resource_slice.spec.pool.generation,
        resource_slice.spec.node_name,
    ) == ("topobus.dev", "n1", 7, "n1")
    assert resource_slice.spec.devices[0].attributes == {
        "resource.kubernetes.io/pcieRoot": Attribute(string="pci0000:16"),
        "resource.kubernetes.io/pciBusID": Attribute(string="0000:17:00.0"),
        "resource.kubernetes.io/numaNode": Attribute(int_=1),
        "class": Attribute(string="gpu"),
        "model": Attribute(string="NVIDIA H100"),
        "driverVersion": Attribute(version="570.86.15"),
        "ecc": Attribute(bool_=True),
        "firmwareVersion": Attribute(string="v7"),
        "odd_name_": Attribute(int_=3),
    }
    assert resource_slice.spec.devices[0].capacity["memory"].value == "80Gi"
    assert check_slice(resource_slice.spec) == []


def test_slices_leave_out_the_numa_node_when_the_machine_does_not_tell() -> None:
    """Unknown is absent, never 0; several nodes are a list."""
    unknown, several = (
        _slices(_inventory(Device(name="gpu-d", device_class="gpu", numa_nodes=nodes)))[0].spec.devices[0].attributes
        for nodes in (None, NodeSet(0, 1))
    )

    assert "resource.kubernetes.io/numaNode" not in unknown
    assert several["resource.kubernetes.io/numaNode"] == Attribute(ints=(0, 1))


def test_slices_taint_a_device_when_it_is_sick() -> None:
    """Evidence of a fault evicts, silence only keeps new claims away,
    and less speed does neither.
    """
    taints = {
        state: _slices(_inventory(Device(name="gpu-d", device_class="gpu", health=DeviceHealth(state=state))))[0]
        .spec.devices[0]
        .taints
        for state in HealthState
    }

    assert {state: [taint.effect for taint in found_taints] for state, found_taints in taints.items()} == {
        HealthState.HEALTHY: [],
        HealthState.DEGRADED: [],
        HealthState.UNHEALTHY: ["NoExecute"],
        HealthState.RECOVERING: ["NoSchedule"],
        HealthState.UNKNOWN: ["NoSchedule"],
    }


def test_slices_are_cut_when_there_are_many_devices() -> None:
    """More devices than a slice takes make more slices of one complete
    pool, and every limit holds.
    """
    devices = tuple(Device(name=f"cpu-{index}", device_class="cpu", cpu=index) for index in range(224))

    slices = _slices(_inventory(*devices, device_class="cpu"), pool="n1/cpu")

    assert [len(resource_slice.spec.devices) for resource_slice in slices] == [64, 64, 64, 32]
    assert {resource_slice.spec.pool.resource_slice_count for resource_slice in slices} == {4}
    assert [resource_slice.name for resource_slice in slices] == [f"n1/cpu/00{index}" for index in range(4)]
    assert {resource_slice.spec.node_name for resource_slice in slices} == {"n1"}
    assert [problem for resource_slice in slices for problem in check_slice(resource_slice.spec)] == []


def test_holders_name_devices_and_cpus_when_the_ledger_has_them() -> None:
    """Exclusive CPUs are held under their device names."""
    owner = Owner(kind=OwnerKind.POD, name="p", uid="u")
    allocation = Allocation(
        owner=owner, holdings=(Holding(container="c", devices={"gpu": ("gpu-0",)}, cpus=CpuSet(3)),)
    )
    ledger = Ledger(node="n1", allocations={owner.key: allocation})

    held = holders_from_ledger(ledger, [Device(name="cpu-3", device_class="cpu", cpu=3)])

    assert held == {
        DeviceId("topobus.dev", "n1", "gpu-0"): owner,
        DeviceId("topobus.dev", "n1/cpu", "cpu-3"): owner,
    }


def test_slices_of_a_pool_have_all_of_its_classes_and_one_class_each() -> None:
    """The pool is complete with all classes of the node, and its counters are behind all devices."""
    part = Device(
        name="gpu-1", device_class="gpu", consumes=(CounterUse(counter_set="gpu-1", counter="slices", amount=1),)
    )
    card = CounterSet(name="gpu-1", counters={"slices": 7})
    nic = _inventory(Device(name="nic-0", device_class="nic"), device_class="nic")

    slices = _slices(_inventory(GPU, part, counter_sets=(card,)), nic)

    assert [(each.name, [device.name for device in each.spec.devices]) for each in slices] == [
        ("n1/000", ["gpu-0000-17-00-0", "gpu-1"]),
        ("n1/001", ["nic-0"]),
        ("n1/f00", []),
    ]
    assert [counters.name for counters in slices[-1].spec.shared_counters] == ["gpu-1"]
    assert {(each.spec.pool.generation, each.spec.pool.resource_slice_count) for each in slices} == {(14, 3)}


@pytest.mark.parametrize(
    ("device", "counter_set"),
    [
        pytest.param("nic-0", "gpu-1", id="a device named like one of another class"),
        pytest.param("gpu-nvidia--0", "gpu-1", id="a device named like another vendor's"),
        pytest.param("gpu-0000-17-00-0", "gpu-1", id="a device of the name of another"),
        pytest.param("gpu-1", "nic-1", id="counters named like those of another class"),
        pytest.param("gpu-1", "gpu-2", id="a device that takes from no counter of its class"),
    ],
)
def test_slices_leave_out_what_would_break_the_pool_of_all_classes(device: str, counter_set: str) -> None:
    """A faulty driver takes no devices of other classes with it."""
    faulty = Device(
        name=device, device_class="gpu", consumes=(CounterUse(counter_set="gpu-1", counter="slices", amount=1),)
    )
    card = CounterSet(name=counter_set, counters={"slices": 7})
    nic = _inventory(Device(name="nic-0", device_class="nic"), device_class="nic")

    slices = _slices(_inventory(GPU, faulty, counter_sets=(card,)), nic)
    (pool,) = gather_pools(slices, Node("n1"), ALL_GATES)

    assert (pool.state, [candidate.id.device for candidate in pool.candidates]) == (
        PoolState.READY,
        ["gpu-0000-17-00-0", "nic-0"],
    )
