"""What makes a machine a new one, and how a change is said."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from topobus.discovery.rules.changes import describe_changes, machine_to_publish
from topobus.values.idset import CpuSet
from topobus.values.machine import Cpu, HugepagePool, Machine, NumaNode, PciDevice, PciLink
from topobus.values.pci import PciAddress

GPU = PciDevice(
    address=PciAddress.parse("0000:3b:00.0"),
    vendor=0x10DE,
    device=0x2330,
    link=PciLink(speed_gts=32.0, width=16, max_speed_gts=32.0, max_width=16),
)
MACHINE = Machine(
    node="n",
    generation=7,
    boot_id="one",
    numa_nodes=(
        NumaNode(
            id=0,
            cpus=CpuSet(0, 1),
            memory_bytes=1 << 30,
            hugepages=(HugepagePool(page_bytes=1 << 21, total=8, free=8),),
        ),
    ),
    cpus=(Cpu(id=0, online=True, core=0), Cpu(id=1, online=True, core=0)),
    pci_devices=(GPU,),
)
NODE = MACHINE.numa_nodes[0]


def with_pci(*devices: PciDevice) -> Machine:
    """The machine with other PCI functions."""
    return replace(MACHINE, pci_devices=devices)


CHANGES = {
    "cpu-offline": (replace(MACHINE, cpus=(MACHINE.cpus[0], Cpu(id=1, online=False))), "cpus-offline 1"),
    "cpu-moved": (replace(MACHINE, cpus=(MACHINE.cpus[0], Cpu(id=1, online=True, core=1))), "cpus-changed 1"),
    "device-gone": (with_pci(), "pci-gone 0000:3b:00.0"),
    "device-new": (with_pci(GPU, replace(GPU, address=PciAddress.parse("0000:3c:00.0"))), "pci-new 0000:3c:00.0"),
    "driver-bound": (with_pci(replace(GPU, driver="vfio-pci")), "pci-changed 0000:3b:00.0 (none -> driver)"),
    "link-narrower": (
        with_pci(replace(GPU, link=PciLink(speed_gts=32.0, width=8, max_speed_gts=32.0, max_width=16))),
        "pci-changed 0000:3b:00.0 (none -> link)",
    ),
    "memory": (replace(MACHINE, numa_nodes=(replace(NODE, memory_bytes=2),)), f"memory-changed node0 ({1 << 30} -> 2)"),
    "pages": (
        replace(MACHINE, numa_nodes=(replace(NODE, hugepages=(HugepagePool(page_bytes=1 << 21, total=9, free=8),)),)),
        "hugepages-changed node0 ({2097152: 8} -> {2097152: 9})",
    ),
    "node-new": (replace(MACHINE, numa_nodes=(NODE, NumaNode(id=8, cpus=CpuSet(), memory_bytes=1))), "numa-new node8"),
    "distances": (replace(MACHINE, distances=((10,),)), "distances-changed numa"),
    "reboot": (replace(MACHINE, boot_id="two"), "booted machine (one -> two)"),
    "warning": (replace(MACHINE, warnings=("odd",)), "warning-new odd"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_describe_changes_names_the_difference_when_one_thing_changed(name: str) -> None:
    """Each kind of change is said by one code with what it is about."""
    after, wanted = CHANGES[name]

    assert [str(change) for change in describe_changes(MACHINE, after)] == [wanted]


@pytest.mark.parametrize("name", CHANGES)
def test_machine_to_publish_goes_on_counting_when_something_changed(name: str) -> None:
    """A change makes the next generation, whatever number the reader put in."""
    new = machine_to_publish(MACHINE, replace(CHANGES[name][0], generation=1))

    assert new is not None
    assert new.generation == 8


QUIET = {
    "generation": replace(MACHINE, generation=1),
    "free-pages": replace(
        MACHINE, numa_nodes=(replace(NODE, hugepages=(HugepagePool(page_bytes=1 << 21, total=8, free=0),)),)
    ),
    "link-asleep": with_pci(replace(GPU, link=PciLink(speed_gts=2.5, width=16, max_speed_gts=32.0, max_width=16))),
}


@pytest.mark.parametrize("name", QUIET)
def test_machine_to_publish_is_none_when_only_restless_values_moved(name: str) -> None:
    """Values that move by themselves (free pages, a sleeping link) publish nothing and are not
    told.
    """
    assert machine_to_publish(MACHINE, QUIET[name]) is None
    assert describe_changes(MACHINE, QUIET[name]) == ()


def test_machine_to_publish_begins_at_one_when_nothing_is_stored() -> None:
    """The first machine of a node is generation 1."""
    first = machine_to_publish(None, MACHINE)

    assert first is not None
    assert first.generation == 1
