"""The machine that discovery publishes is the machine that the kernel shows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from topobus.values.idset import CpuSet
from vm.kernel import PCI, number, sh
from vm.node import Node

_NODES, _CPUS = Path("/sys/devices/system/node"), Path("/sys/devices/system/cpu")


@pytest.mark.short
async def test_cpus_and_distances_are_those_of_the_kernel(node: Node) -> None:
    """By lscpu and numactl."""
    machine = await node.machine()
    wanted = [
        tuple(map(int, line.split(","))) for line in sh("lscpu -p=cpu,socket,node -b").splitlines() if line[0] != "#"
    ]
    assert [(cpu.id, cpu.socket, cpu.numa_node) for cpu in machine.cpus if cpu.online] == wanted
    rows = [line.split(":")[1].split() for line in sh("numactl -H | sed '1,/^node distances/d;/^node /d'").splitlines()]
    assert [list(map(str, row)) for row in machine.distances] == rows
    assert machine.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@pytest.mark.short
async def test_numa_nodes_are_those_of_the_kernel(node: Node) -> None:
    """Their CPUs and memory. A node that has only one of the two is listed as well."""
    machine = await node.machine()
    wanted = {}
    for place in _NODES.glob("node[0-9]*"):
        kib = int((place / "meminfo").read_text().split("MemTotal:")[1].split()[0])
        wanted[int(place.name.removeprefix("node"))] = ((place / "cpulist").read_text().strip(), kib * 1024)
    assert {each.id: (str(each.cpus), each.memory_bytes) for each in machine.numa_nodes} == wanted


@pytest.mark.short
async def test_pci_functions_are_those_of_the_kernel(node: Node) -> None:
    """Identity, NUMA node, IOMMU group and driver of every function, the way down to it, and none
    too many.
    """
    machine = await node.machine()
    wanted = {}
    for place in PCI.iterdir():
        numa_node = number(place / "numa_node")
        group = (place / "iommu_group").resolve().name if (place / "iommu_group").exists() else "None"
        root, *path, _ = place.resolve().parts[3:]
        wanted[place.name] = (
            number(place / "vendor"),
            number(place / "device"),
            number(place / "class"),
            numa_node if numa_node >= 0 else None,
            group,
            root,
            path,
        )
    pci_functions = {
        str(each.address): (
            each.vendor,
            each.device,
            each.class_code,
            each.numa_node,
            str(each.iommu_group),
            each.root,
            [*map(str, each.path)],
        )
        for each in machine.pci_devices
    }
    assert pci_functions == wanted


async def test_cpu_that_goes_off_and_on_is_told(node: Node) -> None:
    """The last one, which every kernel can switch off."""
    last = max(int(place.name.removeprefix("cpu")) for place in _CPUS.glob("cpu[0-9]*"))
    if last == 0:
        pytest.skip("this machine has one CPU")
    for is_online in (False, True):
        (_CPUS / f"cpu{last}/online").write_text(str(int(is_online)))
        machine = await node.machine(
            lambda machine, wanted=is_online: [cpu.online for cpu in machine.cpus if cpu.id == last] == [wanted]
        )
        assert str(CpuSet.of(cpu.id for cpu in machine.cpus if cpu.online)) == (_CPUS / "online").read_text().strip()


async def test_record_of_the_machine_tells_the_same(node: Node) -> None:
    """What `topobus record` writes is read as the machine itself is, but for the name, which is the
    folder's.
    """

    def drawn(root: str) -> str:
        return subprocess.run(
            ["/opt/topobus/bin/topobus", "machine", "--root", root, "--json"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    subprocess.run(["/opt/topobus/bin/topobus", "record", "/tmp/guest"], capture_output=True, check=True)
    assert drawn("/tmp/guest") == drawn("/")
