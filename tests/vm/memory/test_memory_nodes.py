"""Memory that is no CPU's own: which CPUs reach it best, by the firmware's tables as the kernel
read them, and which card it comes from.
"""

from __future__ import annotations

from pathlib import Path

from topobus.values.idset import CpuSet
from vm.kernel import PCI, number
from vm.node import Node

_NODES = Path("/sys/devices/system/node")
_CXL_MEMORY = 0x0502


async def test_node_without_cpus_is_near_those_that_the_firmware_names(node: Node) -> None:
    """HMAT gives one best initiator to the node of memory alone.

    The kernel's link to it is what counts.
    """
    machine = await node.machine()
    (memory_only,) = (each for each in machine.numa_nodes if not each.cpus and each.memory_bytes)
    (best,) = (_NODES / f"node{memory_only.id}/access1/initiators").glob("node[0-9]*")
    assert memory_only.near_cpus == CpuSet.parse((best / "cpulist").read_text().strip())
    assert {each.id: each.near_cpus for each in machine.numa_nodes if each.cpus} == {
        each.id: each.cpus for each in machine.numa_nodes if each.cpus
    }


async def test_cxl_memory_device_is_a_function_of_its_node(node: Node) -> None:
    """The kernel has it on its bus of CXL devices, as a memory device of one PCI function."""
    (device,) = Path("/sys/bus/cxl/devices").glob("mem*")
    place = device.resolve().parent
    (function,) = (each for each in (await node.machine()).pci_devices if each.class_code >> 8 == _CXL_MEMORY)
    assert (str(function.address), function.numa_node) == (place.name, number(PCI / place.name / "numa_node"))
