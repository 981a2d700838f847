"""Memory: which CPUs reach best what is no CPU's own, by the firmware's tables as the kernel read
them; which card it comes from; and pages that the kernel gives up.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import addressof, c_char
from pathlib import Path

import pytest

from topobus.values.idset import CpuSet, NodeSet
from vm.kernel import PCI, number, sh
from vm.node import Node

_NODES, _CXL = Path("/sys/devices/system/node"), Path("/sys/bus/cxl/devices")
_CXL_MEMORY, _CXL_BYTES = 0x0502, 512 << 20


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
    (device,) = _CXL.glob("mem*")
    place = device.resolve().parent
    (function,) = (each for each in (await node.machine()).pci_devices if each.class_code >> 8 == _CXL_MEMORY)
    assert (str(function.address), function.numa_node) == (place.name, number(PCI / place.name / "numa_node"))


@contextmanager
def cxl_region() -> Iterator[None]:
    """Make memory of what the CXL device has, as `cxl create-region` does; the kernel puts it
    online as a NUMA node, and afterwards it is the device's again.
    """
    sh(
        f"""
        set -e
        modprobe -a cxl_mem dax_cxl kmem
        cd /sys/bus/cxl/devices
        echo region0 > decoder0.0/create_ram_region
        echo 256 > region0/interleave_granularity
        echo 1 > region0/interleave_ways
        echo ram > decoder2.0/mode
        echo {_CXL_BYTES} > decoder2.0/dpa_size
        echo {_CXL_BYTES} > region0/size
        echo decoder2.0 > region0/target0
        echo 1 > region0/commit
        echo region0 > /sys/bus/cxl/drivers/cxl_region/bind
        """
    )
    yield
    sh(
        """
        set -e
        for state in /sys/devices/system/node/node3/memory[0-9]*/state; do echo offline > $state; done
        echo dax0.0 > /sys/bus/dax/drivers/kmem/unbind
        cd /sys/bus/cxl/devices
        echo region0 > /sys/bus/cxl/drivers/cxl_region/unbind
        echo 0 > region0/commit
        echo region0 > decoder0.0/delete_region
        echo 0 > decoder2.0/dpa_size
        """
    )


async def test_memory_of_a_cxl_region_is_a_node_while_the_region_is_there(node: Node) -> None:
    """It comes and goes while discovery runs.

    The kernel knows no CPUs that are nearest: no initiator, and one distance to all others.
    """
    sh("modprobe cxl_acpi")
    if not (_CXL / "decoder0.0/create_ram_region").exists():
        pytest.skip("this kernel makes no region of ordinary memory (Linux 6.3 does)")
    before = await node.machine()
    assert 3 not in before.node_set
    with cxl_region():
        machine = await node.machine(lambda machine: 3 in machine.node_set)
        (made,) = (each for each in machine.numa_nodes if each.id == 3)
        online = int((_NODES / "node3/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
        distances = (_NODES / "node3/distance").read_text().split()

    assert (made.memory_bytes, made.cpus, made.near_cpus) == (online, CpuSet(), CpuSet())
    assert [str(distance) for distance in machine.distances[-1]] == distances == ["20", "20", "20", "10"]
    after = await node.machine(lambda machine: 3 not in machine.node_set)
    assert after.numa_nodes == before.numa_nodes


def lost_pages() -> dict[int, int]:
    """Give the kernel's count of pages that it has given up, by NUMA node."""
    return {
        int(place.parents[1].name.removeprefix("node")): number(place)
        for place in _NODES.glob("node[0-9]*/memory_failure/total")
    }


async def test_page_that_the_kernel_gives_up_is_the_health_of_its_nodes_cpus(node: Node) -> None:
    """A page of this process, which never uses it again: the CPUs of its NUMA node are degraded,
    and the others are not.
    """
    before = lost_pages()
    if not before:
        pytest.skip("this kernel counts no pages that it gives up (Linux 6.3 does)")
    await node.start("cpu")
    online = len(CpuSet.parse(Path("/sys/devices/system/cpu/online").read_text().strip()))
    well = await node.inventory("cpu", lambda inventory: sum(each.is_fit for each in inventory.devices) == online)
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page[0] = 1
    # As an operator does for a page that is broken.
    Path("/sys/devices/system/memory/hard_offline_page").write_text(hex(physical_address(page)))
    after = lost_pages()
    (hit,) = (numa_node for numa_node in after if after[numa_node] != before[numa_node])
    seen = await node.inventory("cpu", lambda inventory: any(each.health.conditions for each in inventory.devices))
    sick = {each.name: each.health.conditions for each in seen.devices if each.health.conditions}

    assert after[hit] == before[hit] + 1
    assert sick.keys() == {each.name for each in well.devices if each.numa_nodes == NodeSet(hit)}
    assert {
        (each.reason, each.state.value, each.evidence["path"], each.evidence["value"])
        for conditions in sick.values()
        for each in conditions
    } == {
        (
            "memory-pages-lost",
            "degraded",
            f"sys/devices/system/node/node{hit}/memory_failure/total",
            str(after[hit]),
        )
    }
    await node.inventory("cpu", lambda inventory: all(not each.health.conditions for each in inventory.devices))
    node.kill("cpu")


def physical_address(page: mmap.mmap) -> int:
    """Find where in the machine's memory a page of this process is."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as entries:
        entries.seek(addressof(c_char.from_buffer(page)) // mmap.PAGESIZE * 8)
        (entry,) = struct.unpack("Q", entries.read(8))
    # Documentation/admin-guide/mm/pagemap.rst: the lower 55 bits are the number of the page.
    return (int(entry) & (1 << 55) - 1) * mmap.PAGESIZE
