"""What the kernel counts of CPUs: heat and memory errors, each of which
touches its own CPUs alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.sysfs_trees import write
from topobus.cpu.plugins.linux_cpu import LinuxCpuDriver
from topobus.devicekit.driver import HostServices
from topobus.devicekit.settings import CpuGroupSettings
from topobus.simulation.machines import build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.idset import CpuSet, NodeSet

CPU, CONTROLLERS = "sys/devices/system/cpu", "sys/devices/system/edac/mc"
NODES, PAGES = "sys/devices/system/node", "memory_failure/total"
DEVICES = [Device(name=f"cpu-{cpu}", device_class="cpu", cpu=cpu, socket=cpu // 2) for cpu in range(4)]


def _tree(root: Path, *, throttled: int = 0, errors: int = 0, controller: str = "Skylake Socket#1 IMC#0") -> Tree:
    files: dict[str, object] = {
        f"{CPU}/online": "0-3",
        f"{CONTROLLERS}/mc0/mc_name": controller,
        f"{CONTROLLERS}/mc0/ue_count": errors,
    }
    files |= {f"{CPU}/cpu{cpu}/thermal_throttle/core_throttle_count": 7 + throttled * (cpu == 2) for cpu in range(4)}
    return write(root, files)


def _second_look(root: Path, first: Tree, second: dict[str, object]) -> dict[str, list[str]]:
    driver = LinuxCpuDriver()
    before = driver.observe(first, DEVICES)
    after = driver.observe(_tree(root, **second), DEVICES)  # type: ignore[arg-type]  # names of the function above
    assert before == {}
    return {name: [observation.reason for observation in seen] for name, seen in after.items()}


def test_cpu_is_throttled_when_its_core_was_since_the_last_look(tmp_path: Path) -> None:
    """What had been counted before the service started is no news."""
    assert _second_look(tmp_path, _tree(tmp_path), {"throttled": 2}) == {"cpu-2": ["throttled"]}


def test_cpus_of_a_socket_have_memory_errors_when_their_controller_counts_some(tmp_path: Path) -> None:
    """Uncorrected errors touch the CPUs of the socket that the controller names."""
    assert _second_look(tmp_path, _tree(tmp_path), {"errors": 1}) == {
        "cpu-2": ["memory-errors"],
        "cpu-3": ["memory-errors"],
    }


def test_no_cpu_is_blamed_when_the_controller_tells_no_socket(tmp_path: Path) -> None:
    """A guess would take out the wrong CPUs."""
    unnamed = {"controller": "F19h_M10h"}

    assert _second_look(tmp_path, _tree(tmp_path, controller="F19h_M10h"), {"errors": 1, **unnamed}) == {}


def test_cpus_are_well_when_the_kernel_counts_nothing(tmp_path: Path) -> None:
    """A virtual machine has neither file."""
    tree = write(tmp_path, {f"{CPU}/online": "0-3"})

    assert LinuxCpuDriver().observe(tree, DEVICES) == {}


def test_cpus_of_a_core_are_throttled_together_when_one_file_tells(tmp_path: Path) -> None:
    """The kernel counts alike for the threads of a core, so one file a core is read.

    A core that counts alone touches its own threads.
    """
    cores = [Device(name=f"cpu-{cpu}", device_class="cpu", cpu=cpu, core=cpu // 2, socket=0) for cpu in range(4)]
    driver = LinuxCpuDriver()
    driver.observe(_tree(tmp_path), cores)
    hot = _tree(tmp_path, throttled=1)
    # CPU 3 is not the one that is read of its core.
    write(tmp_path, {f"{CPU}/cpu3/thermal_throttle/core_throttle_count": "nonsense"})

    seen = driver.observe(hot, cores)

    assert {name: [observation.reason for observation in signs] for name, signs in seen.items()} == {
        "cpu-2": ["throttled"],
        "cpu-3": ["throttled"],
    }


def test_neighbours_are_judged_when_one_cpus_file_holds_nonsense(tmp_path: Path) -> None:
    """One bad file is the sign of its own CPU; the others go on being seen."""
    driver = LinuxCpuDriver()
    driver.observe(_tree(tmp_path), DEVICES)
    tree = _tree(tmp_path, throttled=1)
    write(
        tmp_path,
        {f"{CPU}/cpu0/thermal_throttle/core_throttle_count": "nonsense", f"{CONTROLLERS}/mc0/ue_count": "nonsense"},
    )

    seen = driver.observe(tree, DEVICES)

    assert {name: [observation.reason for observation in signs] for name, signs in seen.items()} == {
        "cpu-0": ["tree-unreadable"],
        "cpu-2": ["throttled", "tree-unreadable"],
        "cpu-3": ["tree-unreadable"],
    }


def test_a_group_is_judged_by_its_cpus_when_cpus_are_offered_in_groups(tmp_path: Path) -> None:
    """A group is degraded as long as one of its CPUs is; its neighbours are not."""
    recorded = build("laptop", tmp_path)
    tree = Tree(HardwareSettings(root=str(tmp_path)))
    driver = LinuxCpuDriver()
    driver.configure(HostServices(cpus=CpuGroupSettings(groups="l3")))
    machine = read_machine(tree, "n")
    devices = driver.discover(tree, machine).devices
    counts = [f"{CPU}/cpu{cpu.id}/thermal_throttle/core_throttle_count" for cpu in machine.cpus]
    for path in counts:
        recorded.write(path, "0")
    before = driver.observe(tree, devices)
    leader = min(devices[0].near_cpus)
    recorded.write(f"{CPU}/cpu{leader}/thermal_throttle/core_throttle_count", "3")

    seen = driver.observe(tree, devices)

    assert before == {}
    assert {name: [observation.reason for observation in signs] for name, signs in seen.items()} == {
        devices[0].name: ["throttled"]
    }


@pytest.mark.parametrize(
    ("names", "hit", "cpus"),
    [
        (["Broadwell SrcID#0_Ha#0", "Broadwell SrcID#1_Ha#0"], 1, {"cpu-2", "cpu-3"}),
        (["F19h_M10h", "F19h_M10h"], 1, {"cpu-2", "cpu-3"}),
        (["F17h", "F17h", "F17h", "F17h"], 1, {"cpu-0", "cpu-1"}),
        (["F19h_M10h", "MI200"], 0, set[str]()),
    ],
    ids=["by its source", "a die a socket", "two dies a socket", "a socket without modules"],
)
def test_cpus_have_memory_errors_when_their_controllers_name_or_number_tells_the_socket(
    tmp_path: Path, names: list[str], hit: int, cpus: set[str]
) -> None:
    """AMD numbers the controllers of its dies socket by socket.

    Where the numbers do not fit the sockets nobody is blamed.
    """

    def tree(errors: int) -> Tree:
        files: dict[str, object] = {f"{CPU}/online": "0-3"}
        for index, name in enumerate(names):
            files |= {
                f"{CONTROLLERS}/mc{index}/mc_name": name,
                f"{CONTROLLERS}/mc{index}/ue_count": errors * (index == hit),
            }
        return write(tmp_path, files)

    driver = LinuxCpuDriver()
    driver.observe(tree(0), DEVICES)

    assert set(driver.observe(tree(1), DEVICES)) == cpus


@pytest.mark.parametrize(("rise", "reasons"), [(100, ["memory-corrected-storm"]), (99, [])], ids=["storm", "few"])
def test_corrected_memory_errors_tell_when_they_are_a_storm(tmp_path: Path, rise: int, reasons: list[str]) -> None:
    """As for corrected PCIe errors: some are ordinary."""
    driver = LinuxCpuDriver()
    _tree(tmp_path)
    driver.observe(write(tmp_path, {f"{CONTROLLERS}/mc0/ce_count": 5}), DEVICES)

    seen = driver.observe(write(tmp_path, {f"{CONTROLLERS}/mc0/ce_count": 5 + rise}), DEVICES)

    assert [observation.reason for observation in seen.get("cpu-3", ())] == reasons


def test_cpus_of_a_numa_node_are_degraded_when_the_kernel_gave_up_pages_of_its_memory(tmp_path: Path) -> None:
    """The CPUs and groups of CPUs of that node alone.

    What was given up before the first look is no news, and a node whose file holds nonsense is told
    apart.
    """
    devices = [
        *(
            Device(name=f"cpu-{cpu}", device_class="cpu", cpu=cpu, socket=0, numa_nodes=NodeSet(cpu))
            for cpu in range(3)
        ),
        Device(name="cpu-socket-0", device_class="cpu", near_cpus=CpuSet(0, 1, 2), numa_nodes=NodeSet(0, 1)),
        Device(name="cpu-3", device_class="cpu", cpu=3),
    ]
    driver = LinuxCpuDriver()
    before = driver.observe(
        write(tmp_path, {f"{CPU}/online": "0-3", **{f"{NODES}/node{node}/{PAGES}": 4 for node in range(3)}}), devices
    )

    seen = driver.observe(write(tmp_path, {f"{NODES}/node1/{PAGES}": 6, f"{NODES}/node2/{PAGES}": "many"}), devices)

    assert before == {}
    assert {name: [observation.reason for observation in signs] for name, signs in seen.items()} == {
        "cpu-1": ["memory-pages-lost"],
        "cpu-2": ["tree-unreadable"],
        "cpu-socket-0": ["memory-pages-lost"],
    }
    assert (seen["cpu-1"][0].message, seen["cpu-1"][0].evidence) == (
        "the kernel has given up 2 page(s) of the memory of NUMA node 1",
        {"path": f"{NODES}/node1/{PAGES}", "value": "6"},
    )
