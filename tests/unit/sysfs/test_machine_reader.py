"""The machine reader on small trees: old kernels, missing parts, contradictions, limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.sysfs_trees import CPU, NODE, cpu_files, mask, node_files, write
from topobus.sysfs.machine import read_machine
from topobus.sysfs.report import machine_report
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.errors import HardwareError
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import L3Cache, Machine


def machine_of(root: Path, files: dict[str, object]) -> Machine:
    """Write a tree and read it."""
    return read_machine(write(root, files), "n")


@pytest.mark.parametrize("is_old", [False, True], ids=["new-names", "old-names"])
def test_read_machine_groups_threads_by_core_and_socket_when_names_are_of_any_kernel(
    tmp_path: Path, is_old: bool
) -> None:
    """Cores and sockets come from the sets of CPUs, whatever the kernel calls the files.

    A core is named by its lowest CPU.
    """
    machine = machine_of(tmp_path, cpu_files(8, threads=2, sockets=2, is_old=is_old))

    assert [cpu.core for cpu in machine.cpus] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert [cpu.socket for cpu in machine.cpus] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_read_machine_names_a_core_by_its_online_thread_when_the_first_is_offline(tmp_path: Path) -> None:
    """A core whose lowest CPU is offline is named by the next one, and the offline CPU stays listed
    without a place.
    """
    files = cpu_files(4, threads=2) | {f"{CPU}/online": "1-3"}

    machine = machine_of(tmp_path, files)

    assert [(cpu.id, cpu.online, cpu.core) for cpu in machine.cpus] == [
        (0, False, None),
        (1, True, 1),
        (2, True, 2),
        (3, True, 2),
    ]


def test_read_machine_asks_each_cpu_when_there_is_no_online_list(tmp_path: Path) -> None:
    """Without `online`, a CPU's own file counts, and a CPU without one is online."""
    files = cpu_files(3) | {f"{CPU}/cpu1/online": "0"}
    del files[f"{CPU}/online"]

    assert machine_of(tmp_path, files).online_cpus == CpuSet(0, 2)


def test_read_machine_makes_one_node_when_the_kernel_has_no_numa(tmp_path: Path) -> None:
    """Without a node folder, node 0 holds all CPUs and the machine's memory, and no distance is
    made up.
    """
    machine = machine_of(tmp_path, cpu_files(4))

    (node,) = machine.numa_nodes
    assert (node.id, node.cpus, node.memory_bytes) == (0, CpuSet(0, 1, 2, 3), 1024 * 1024)
    assert machine.distances == ()
    assert {cpu.numa_node for cpu in machine.cpus} == {0}


def test_read_machine_maps_distance_columns_by_online_nodes_when_ids_are_sparse(tmp_path: Path) -> None:
    """A row's columns belong to the online nodes in order, not to ids."""
    files = cpu_files(4, sockets=2) | {f"{NODE}/online": "2,17"}
    files |= node_files(2, (0, 1), distance="10 31") | node_files(17, (2, 3), distance="32 10")

    machine = machine_of(tmp_path, files)

    assert machine.distances == ((10, 31), (32, 10))


def test_read_machine_takes_distances_as_unknown_when_a_row_is_short(tmp_path: Path) -> None:
    """One short row makes all distances unknown, and is told."""
    files = cpu_files(4, sockets=2) | {f"{NODE}/online": "0-1"}
    files |= node_files(0, (0, 1), distance="10 20") | node_files(1, (2, 3), distance="20")

    machine = machine_of(tmp_path, files)

    assert machine.distances == ()
    assert any("node1/distance" in warning for warning in machine.warnings)


def test_read_machine_finds_cpus_near_memory_by_distance_when_a_node_has_none(tmp_path: Path) -> None:
    """A memory-only node has no CPUs of its own; near are those of the closest node."""
    files = cpu_files(4, sockets=2) | {f"{NODE}/online": "0-2"}
    files |= (
        node_files(0, (0, 1), distance="10 20 17")
        | node_files(1, (2, 3), distance="20 10 28")
        | node_files(2, (), distance="17 28 10")
    )

    node = machine_of(tmp_path, files).numa_nodes[2]

    assert (node.cpus, node.near_cpus) == (CpuSet(), CpuSet(0, 1))


def test_read_machine_prefers_initiators_when_the_firmware_names_them(tmp_path: Path) -> None:
    """HMAT's initiators decide before distances do."""
    files = cpu_files(4, sockets=2) | {f"{NODE}/online": "0-2", f"{NODE}/node2/access1/initiators/node1/x": ""}
    files |= (
        node_files(0, (0, 1), distance="10 20 17")
        | node_files(1, (2, 3), distance="20 10 28")
        | node_files(2, (), distance="17 28 10")
    )

    assert machine_of(tmp_path, files).numa_nodes[2].near_cpus == CpuSet(2, 3)


def test_read_machine_drops_a_node_when_its_cpus_belong_to_another(tmp_path: Path) -> None:
    """Two nodes that claim one CPU contradict each other: the first stands, the second is told, the
    rest works.
    """
    files = cpu_files(4) | {f"{NODE}/online": "0-1"} | node_files(0, (0, 1, 2)) | node_files(1, (2, 3))

    machine = machine_of(tmp_path, files)

    assert machine.node_set == NodeSet(0)
    assert any("node1" in warning for warning in machine.warnings)


def test_read_machine_drops_a_core_when_it_overlaps_another(tmp_path: Path) -> None:
    """A core that shares only some CPUs with another one is impossible: its CPUs have no core, and
    a warning names the file.
    """
    files = cpu_files(4, threads=2) | {
        f"{CPU}/cpu1/topology/core_cpus": mask(1, 2),
        f"{CPU}/cpu2/topology/core_cpus": mask(2, 3),
    }
    files[f"{CPU}/cpu1/topology/core_cpus"] = mask(1, 2)

    machine = machine_of(tmp_path, files)

    assert [cpu.core for cpu in machine.cpus] == [0, 0, 2, 2]
    assert any("cpu1" in warning and "overlaps" in warning for warning in machine.warnings)


def test_read_machine_keeps_the_rest_when_one_file_is_corrupt(tmp_path: Path) -> None:
    """A mask that is no mask costs that CPU's grouping and nothing else."""
    files = cpu_files(4) | {f"{CPU}/cpu2/topology/core_cpus": "zz"}

    machine = machine_of(tmp_path, files)

    assert [cpu.core for cpu in machine.cpus] == [0, 1, None, 3]
    assert any("cpu2/topology/core_cpus" in warning and "'zz'" in warning for warning in machine.warnings)


def test_read_machine_numbers_sockets_by_order_when_ids_repeat(tmp_path: Path) -> None:
    """Virtual machines that give -1 (or one id for all) still have sockets of their own."""
    files = cpu_files(4, sockets=2) | {f"{CPU}/cpu{cpu}/topology/physical_package_id": -1 for cpu in range(4)}

    assert [cpu.socket for cpu in machine_of(tmp_path, files).cpus] == [0, 0, 1, 1]


def test_read_machine_splits_compute_units_when_amd_calls_two_cores_siblings(tmp_path: Path) -> None:
    """On AMD family 21 the threads of a compute unit have core ids of their own: they are cores."""
    files = cpu_files(4, threads=2) | {"proc/cpuinfo": "processor : 0\nvendor_id : AuthenticAMD\ncpu family : 21\n"}
    files |= {f"{CPU}/cpu{cpu}/topology/core_id": cpu for cpu in range(4)}

    assert [cpu.core for cpu in machine_of(tmp_path, files).cpus] == [0, 1, 2, 3]


def test_read_machine_takes_cpus_from_cpuinfo_when_there_is_no_topology(tmp_path: Path) -> None:
    """A kernel without topology files still tells of its CPUs in /proc/cpuinfo."""
    blocks = "\n".join(f"processor : {cpu}\nphysical id : {cpu // 2}\ncore id : 0\n" for cpu in range(4))

    machine = machine_of(tmp_path, {"proc/cpuinfo": blocks, "proc/meminfo": "MemTotal: 2 kB"})

    assert [(cpu.core, cpu.socket) for cpu in machine.cpus] == [(0, 0), (0, 0), (2, 1), (2, 1)]
    assert machine.numa_nodes[0].cpus == CpuSet(0, 1, 2, 3)


def test_read_machine_refuses_when_the_tree_tells_of_no_cpu(tmp_path: Path) -> None:
    """An empty folder is no machine: the error names the place and the setting to check."""
    with pytest.raises(HardwareError) as caught:
        machine_of(tmp_path, {"proc/meminfo": "MemTotal: 2 kB"})

    assert str(tmp_path) in caught.value.message
    assert "hardware.root" in caught.value.next_step


E, P = "efficiency", "performance"


@pytest.mark.parametrize(
    ("capacities", "kinds"),
    [
        pytest.param([446, 446, 1024, 1024], [E, E, P, P], id="two-kinds"),
        pytest.param([1024, 250, 760, 1024], [P, E, P, P], id="prime-big-little"),
        pytest.param([992, 992, 1024, 1024], [""] * 4, id="one-kind-by-two-clocks"),
        pytest.param([1024] * 4, [""] * 4, id="all-alike"),
        pytest.param([446, 446, 1024, None], [""] * 4, id="not-all-told"),
        pytest.param([446, "?", 1024, 0], [""] * 4, id="no-numbers"),
    ],
)
def test_read_machine_tells_core_kinds_by_capacity_when_the_kernel_has_no_other_word(
    tmp_path: Path, capacities: list[object], kinds: list[str]
) -> None:
    """On arm64 the capacity of each CPU says which cores are big.

    Cores that clock a little differently are of one kind.
    """
    files = cpu_files(4) | {
        f"{CPU}/cpu{cpu}/cpu_capacity": capacity for cpu, capacity in enumerate(capacities) if capacity is not None
    }

    assert [cpu.kind for cpu in machine_of(tmp_path, files).cpus] == kinds


def test_read_machine_believes_the_kernels_own_kinds_before_capacities(tmp_path: Path) -> None:
    """Where the kernel names kinds (x86 hybrid), capacities, which newer kernels have there as
    well, change nothing.
    """
    files = cpu_files(2) | {
        f"{CPU}/cpu0/cpu_capacity": 400,
        f"{CPU}/cpu1/cpu_capacity": 1024,
        "sys/devices/cpu_core/cpus": "0-1",
    }

    assert [cpu.kind for cpu in machine_of(tmp_path, files).cpus] == [P, P]


CPUSETS = {
    "cpuset": ("none /dev/cpuset cpuset rw 0 0", "dev/cpuset/job/cpus", "dev/cpuset/job/mems"),
    "cgroup-v1-noprefix": (
        "none /dev/cpuset cgroup rw,cpuset,noprefix 0 0",
        "dev/cpuset/job/cpus",
        "dev/cpuset/job/mems",
    ),
    "cgroup-v1": (
        "cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0",
        "sys/fs/cgroup/cpuset/job/cpuset.cpus",
        "sys/fs/cgroup/cpuset/job/cpuset.mems",
    ),
    "cgroup-v2": (
        "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0",
        "sys/fs/cgroup/job/cpuset.cpus.effective",
        "sys/fs/cgroup/job/cpuset.mems.effective",
    ),
    "elsewhere": (
        "none /cgroups/sets cgroup rw,cpuset 0 0",
        "cgroups/sets/job/cpuset.cpus",
        "cgroups/sets/job/cpuset.mems",
    ),
}


def limited(kind: str) -> dict[str, object]:
    """Describe two nodes of which a cpuset allows the first."""
    mounts, cpus, mems = CPUSETS[kind]
    files = cpu_files(4, sockets=2) | {f"{NODE}/online": "0-1", "proc/self/cpuset": "/job", "proc/mounts": mounts}
    files |= {cpus: "0-1", mems: "0", "sys/fs/cgroup/cgroup.controllers": "cpuset cpu"}
    return files | node_files(0, (0, 1), distance="10 20") | node_files(1, (2, 3), distance="20 10")


@pytest.mark.parametrize("kind", CPUSETS)
def test_read_machine_offers_only_what_the_cpuset_allows_when_there_is_one(tmp_path: Path, kind: str) -> None:
    """CPUs outside our cpuset are not online for us, nodes outside are left out, and a warning
    names the cpuset.
    """
    machine = machine_of(tmp_path, limited(kind))

    assert (machine.online_cpus, machine.node_set) == (CpuSet(0, 1), NodeSet(0))
    assert [cpu.is_allowed for cpu in machine.cpus] == [True, True, False, False]
    assert any("/job" in warning for warning in machine.warnings)


def pci_files(address: str, node: int) -> dict[str, object]:
    """Describe a PCI function that says its NUMA node."""
    folder = f"sys/bus/pci/devices/{address}"
    return {
        f"{folder}/{name}": text
        for name, text in (("class", "0x030200"), ("vendor", "0x10de"), ("device", "0x2330"), ("numa_node", node))
    }


@pytest.mark.parametrize("kind", CPUSETS)
def test_read_machine_keeps_nodes_without_memory_when_a_cpuset_lists_those_that_have_some(
    tmp_path: Path, kind: str
) -> None:
    """The kernel never lists a node without memory in a cpuset's mems: its CPUs are offered all the
    same, and a device beside it keeps its place.
    """
    files = limited(kind) | {CPUSETS[kind][1]: "0-3"}
    files |= node_files(1, (2, 3), distance="20 10", memory_kib=0) | pci_files("0000:41:00.0", 1)

    machine = machine_of(tmp_path, files)

    assert [(node.id, node.cpus, node.memory_bytes) for node in machine.numa_nodes] == [
        (0, CpuSet(0, 1), 1024 * 1024),
        (1, CpuSet(2, 3), 0),
    ]
    assert (machine.pci_devices[0].numa_node, machine.distances[0][1], machine.warnings) == (1, 20, ())


def test_read_machine_counts_no_memory_of_a_node_when_the_cpuset_has_its_cpus_alone(tmp_path: Path) -> None:
    """A limit of memory (`--cpuset-mems`) takes away memory and huge pages, and no CPU."""
    pages = f"{NODE}/node1/hugepages/hugepages-2048kB"
    files = limited("cgroup-v2") | {
        CPUSETS["cgroup-v2"][1]: "0-3",
        f"{pages}/nr_hugepages": 8,
        f"{pages}/free_hugepages": 8,
    }

    machine = machine_of(tmp_path, files)

    assert machine.online_cpus == CpuSet(0, 1, 2, 3)
    assert [(node.memory_bytes, node.hugepages) for node in machine.numa_nodes] == [(1024 * 1024, ()), (0, ())]
    assert machine.warnings == ("the memory of NUMA nodes 1 is outside our cpuset; counted as none",)


def test_read_machine_keeps_a_node_with_its_memory_when_the_cpuset_has_none_of_its_cpus(tmp_path: Path) -> None:
    """A limit of CPUs (`--cpuset-cpus`) takes away CPUs, and no memory."""
    machine = machine_of(tmp_path, limited("cgroup-v2") | {CPUSETS["cgroup-v2"][2]: "0-1"})

    assert [(node.id, node.cpus, node.memory_bytes) for node in machine.numa_nodes] == [
        (0, CpuSet(0, 1), 1024 * 1024),
        (1, CpuSet(), 1024 * 1024),
    ]


def test_read_machine_keeps_the_place_of_a_function_when_its_node_is_outside_the_cpuset(tmp_path: Path) -> None:
    """Limits of CPUs and memory say nothing of PCI functions: one keeps the NUMA node that it
    tells.
    """
    machine = machine_of(tmp_path, limited("cgroup-v2") | pci_files("0000:41:00.0", 1))

    assert (machine.pci_devices[0].numa_node, machine.online_cpus) == (1, CpuSet(0, 1))
    assert [(node.id, node.cpus, node.memory_bytes) for node in machine.numa_nodes] == [
        (0, CpuSet(0, 1), 1024 * 1024),
        (1, CpuSet(), 0),
    ]


def test_read_machine_offers_all_when_told_not_to_honour_the_cpuset(tmp_path: Path) -> None:
    """A service in a container with a small cpuset can still describe its node."""
    write(tmp_path, limited("cgroup-v2"))

    machine = read_machine(Tree(HardwareSettings(root=str(tmp_path), honours_cpuset=False)), "n")

    assert (machine.online_cpus, machine.node_set) == (CpuSet(0, 1, 2, 3), NodeSet(0, 1))


def test_machine_report_widens_a_node_when_it_crosses_sockets(tmp_path: Path) -> None:
    """The report draws a node that fits no socket around both.

    The machine keeps what the node itself says.
    """
    files = cpu_files(4, sockets=2) | {f"{NODE}/online": "0-1"} | node_files(0, (0, 2)) | node_files(1, (1, 3))

    machine = machine_of(tmp_path, files)

    assert machine.numa_nodes[0].cpus == CpuSet(0, 2)
    assert machine_report(machine)["numa"][0]["cpus"] == "0-3"


def test_read_machine_hides_gpu_memory_when_on_power(tmp_path: Path) -> None:
    """GPU memory that POWER shows as a NUMA node is no node to place on.

    Elsewhere it is kept, near the GPU's CPUs.
    """
    files = cpu_files(4, sockets=2) | {
        f"{NODE}/online": "0,255",
        "proc/driver/nvidia/gpus/0004:04:00.0/numa_status": "Node: 255",
    }
    files |= (
        {"sys/bus/pci/devices/0004:04:00.0/local_cpus": mask(2, 3)} | node_files(0, (0, 1, 2, 3)) | node_files(255, ())
    )

    power = machine_of(tmp_path / "power", files | {"proc/hwloc-nofile-info": "Architecture: ppc64le"})
    grace = machine_of(tmp_path / "grace", files | {"proc/hwloc-nofile-info": "Architecture: aarch64"})

    assert power.node_set == NodeSet(0)
    assert (grace.node_set, grace.numa_nodes[1].near_cpus) == (NodeSet(0, 255), CpuSet(2, 3))


KNIGHTS_LANDING = {"proc/cpuinfo": "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 87\n"}


def test_read_machine_finds_near_cpus_and_no_distances_when_firmware_lies_on_purpose(tmp_path: Path) -> None:
    """Knights Landing calls its fast memory far: it is near all the same, and the distances are no
    latency.
    """
    files = cpu_files(4) | KNIGHTS_LANDING | {f"{NODE}/online": "0-1"}
    files |= node_files(0, (0, 1, 2, 3), distance="10 31") | node_files(1, (), distance="31 10")

    machine = machine_of(tmp_path, files)

    assert (machine.numa_nodes[1].near_cpus, machine.distances) == (CpuSet(0, 1, 2, 3), ())
    assert {cpu.l3 for cpu in machine.cpus} == {None}


def test_read_machine_takes_fast_memory_for_a_cache_when_it_is_no_node(tmp_path: Path) -> None:
    """Knights Landing in cache mode: each cluster has its part of the
    fast memory as level-3 cache.
    """
    files = cpu_files(4) | KNIGHTS_LANDING | {f"{NODE}/online": "0-1"}
    files |= node_files(0, (0, 1), distance="10 21") | node_files(1, (2, 3), distance="21 10")

    assert [cpu.l3 for cpu in machine_of(tmp_path, files).cpus] == [0, 0, 2, 2]


def test_read_machine_tells_the_size_of_level_3_caches_when_the_kernel_does(tmp_path: Path) -> None:
    """Each cache once, named as its CPUs name it.

    A size that is no number is not told, and other levels are no level-3 caches.
    """
    files = cpu_files(6)
    for cpu, shared, size in (
        (0, "0-1", "32768K"),
        (1, "0-1", "32768K"),
        (2, "2-3", "96M"),
        (3, "2-3", "96M"),
        (4, "4-5", "big"),
        (5, "4-5", "big"),
    ):
        for index, level in ((2, 2), (3, 3)):
            folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            files |= {
                f"{folder}/level": level,
                f"{folder}/size": size if level == 3 else "1024K",
                f"{folder}/shared_cpu_list": shared,
            }

    machine = machine_of(tmp_path, files)

    assert machine.l3_caches == (L3Cache(cpu=0, size_bytes=32 << 20), L3Cache(cpu=2, size_bytes=96 << 20))
    assert [cpu.l3 for cpu in machine.cpus] == [0, 0, 2, 2, 4, 4]


def test_read_machine_takes_a_devices_node_as_unknown_when_the_machine_lacks_it(tmp_path: Path) -> None:
    """A device on a NUMA node that does not exist is kept, near nothing in particular, and the
    contradiction is told with its path.
    """
    folder = "sys/bus/pci/devices/0000:00:02.0"
    files = cpu_files(4) | {f"{folder}/class": "0x030000", f"{folder}/vendor": "0x10de", f"{folder}/numa_node": "77"}

    machine = machine_of(tmp_path, files)

    assert [pci_device.numa_node for pci_device in machine.pci_devices] == [None]
    assert any(f"{folder}/numa_node: got 77" in warning for warning in machine.warnings)
