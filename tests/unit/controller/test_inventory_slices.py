"""Inventories as slices: names, attributes, capacities and taints as
kube-scheduler would see them.
"""

from __future__ import annotations

from topobus.controller.state.inventory_slices import holders_from_ledger, slices_from_inventory
from topobus.engine.allocation.values import DeviceId
from topobus.formats.kubernetes.limits import check_slice
from topobus.formats.kubernetes.resource import Attribute
from topobus.values.device import Device, Inventory, class_of_driver
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


def _inventory(*devices: Device) -> Inventory:
    return Inventory(node="n1", device_class="gpu", generation=7, devices=devices)


def test_slices_carry_the_standard_attributes_when_the_device_has_them() -> None:
    """pcieRoot, pciBusID and numaNode stand under Kubernetes' domain.

    The driver's own names stand bare, made legal.
    """
    (resource_slice,) = slices_from_inventory(_inventory(GPU))

    assert (
        resource_slice.spec.driver,
        resource_slice.spec.pool.name,
        resource_slice.spec.pool.generation,
        resource_slice.spec.node_name,
    ) == ("gpu.topobus.dev", "n1", 7, "n1")
    assert resource_slice.spec.devices[0].attributes == {
        "resource.kubernetes.io/pcieRoot": Attribute(string="pci0000:16"),
        "resource.kubernetes.io/pciBusID": Attribute(string="0000:17:00.0"),
        "resource.kubernetes.io/numaNode": Attribute(int_=1),
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
        slices_from_inventory(_inventory(Device(name="d", device_class="gpu", numa_nodes=nodes)))[0]
        .spec.devices[0]
        .attributes
        for nodes in (None, NodeSet(0, 1))
    )

    assert "resource.kubernetes.io/numaNode" not in unknown
    assert several["resource.kubernetes.io/numaNode"] == Attribute(ints=(0, 1))


def test_slices_taint_a_device_when_it_is_sick() -> None:
    """Evidence of a fault evicts, silence only keeps new claims away,
    and less speed does neither.
    """
    taints = {
        state: slices_from_inventory(
            _inventory(Device(name="d", device_class="gpu", health=DeviceHealth(state=state)))
        )[0]
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

    slices = slices_from_inventory(_inventory(*devices))

    assert [len(resource_slice.spec.devices) for resource_slice in slices] == [64, 64, 64, 32]
    assert {resource_slice.spec.pool.resource_slice_count for resource_slice in slices} == {4}
    assert sorted(resource_slice.name for resource_slice in slices) == [
        resource_slice.name for resource_slice in slices
    ]
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
        DeviceId("gpu.topobus.dev", "n1", "gpu-0"): owner,
        DeviceId("cpu.topobus.dev", "n1", "cpu-3"): owner,
    }


def test_class_of_driver_knows_only_our_drivers() -> None:
    """A foreign driver's devices are not our nodes' to hold."""
    assert class_of_driver("nic.topobus.dev") == "nic"
    assert class_of_driver("gpu.nvidia.com") is None
    assert class_of_driver(".topobus.dev") is None
