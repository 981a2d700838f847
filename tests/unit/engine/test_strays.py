"""Devices on NUMA nodes that their machine lacks."""

from __future__ import annotations

from msgspec import structs

from support.alignment_nodes import dgx_facts
from topobus.engine.health.strays import stray_devices, without_strays
from topobus.values.device import Device, Inventory
from topobus.values.health import DeviceHealth, HealthState
from topobus.values.idset import NodeSet


def _inventory(*devices: Device) -> Inventory:
    return Inventory(node="demo-node", device_class="gpu", generation=1, devices=devices)


def test_strays_are_unknown_and_their_neighbours_are_as_they_were() -> None:
    """Only the device that names a missing node is kept from everybody.

    It stays listed and says why.
    """
    machine, _ = dgx_facts()
    good, silent = Device(name="a", device_class="gpu", numa_nodes=NodeSet(1)), Device(name="b", device_class="gpu")
    stray = Device(name="c", device_class="gpu", numa_nodes=NodeSet(1, 2))

    read = without_strays(_inventory(good, silent, stray), machine)

    assert read.devices[:2] == (good, silent)
    assert (read.devices[2].name, read.devices[2].health.state) == ("c", HealthState.UNKNOWN)
    worst = read.devices[2].health.worst
    assert worst is not None
    assert (worst.reason, worst.message) == (
        "node-missing",
        "c reports NUMA nodes 1-2, but machine demo-node has 0-1",
    )
    assert stray_devices(read, machine) == (read.devices[2],)


def test_a_sick_stray_stays_sick() -> None:
    """Evidence of a fault is not covered up by a doubt about the place."""
    machine, _ = dgx_facts()
    sick = Device(name="c", device_class="gpu", numa_nodes=NodeSet(9), health=DeviceHealth(state=HealthState.UNHEALTHY))

    assert without_strays(_inventory(sick), machine).devices[0].health.state is HealthState.UNHEALTHY


def test_nothing_is_a_stray_when_the_machine_tells_no_nodes() -> None:
    """A machine without NUMA information cannot contradict a device."""
    machine, _ = dgx_facts()
    inventory = _inventory(Device(name="c", device_class="gpu", numa_nodes=NodeSet(9)))

    assert without_strays(inventory, structs.replace(machine, numa_nodes=())) is inventory
