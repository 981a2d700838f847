"""What selectors see of CPUs beside their place, and how one constraint ties them to cards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import convert

from topobus.cpu.plugins.linux_cpu import LinuxCpuDriver
from topobus.devicekit.driver import HostServices
from topobus.devicekit.settings import CpuGroupSettings
from topobus.engine.alignment.planning.node_view import cpu_of_name
from topobus.formats.kubernetes.slices import slice_device
from topobus.simulation.machines import build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.dra_names import DRIVER, class_of_device

CPUS = "sys/devices/system/cpu"


def devices(root: Path, groups: str = "cpu") -> dict[str, Device]:
    """The CPUs of a tree, or its groups, by name."""
    tree, driver = Tree(HardwareSettings(root=str(root))), LinuxCpuDriver()
    driver.configure(HostServices(cpus=convert({"groups": groups}, CpuGroupSettings)))
    return {device.name: device for device in driver.discover(tree, read_machine(tree, "n1")).devices}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two EPYC with eight NUMA nodes, as every test leaves them.

    CPU 1 is isolated and tickless, CPU 2 tells its frequencies.
    """
    root = build("epyc-8numa", tmp_path_factory.mktemp("epyc") / "machine").root
    (root / CPUS / "isolated").write_text("1\n")
    (root / CPUS / "nohz_full").write_text("1\n")
    folder = root / CPUS / "cpu2/cpufreq"
    folder.mkdir()
    (folder / "base_frequency").write_text("2800000\n")
    (folder / "cpuinfo_max_freq").write_text("3700000\n")
    return root


def test_cpus_tell_isolation_and_frequencies(root: Path) -> None:
    """What the kernel tells is there, in MHz; what it does not tell is absent."""
    by_name = devices(root)

    attributes: list[dict[str, Any]] = [by_name[f"cpu-{cpu}"].attributes for cpu in (0, 1, 2)]
    assert [(each["isolated"], each["nohzFull"], each["smtEnabled"]) for each in attributes] == [
        (False, False, True),
        (True, True, True),
        (False, False, True),
    ]
    assert [each.get("maxFrequencyMhz") for each in attributes] == [None, None, 3700]
    assert [each.get("baseFrequencyMhz") for each in attributes] == [None, None, 2800]


def test_nohz_full_is_false_when_the_kernel_has_no_such_parameter(root: Path) -> None:
    """It writes `(null)` then."""
    file = root / CPUS / "nohz_full"
    before = file.read_text()
    file.write_text("  (null)\n")
    try:
        assert devices(root)["cpu-1"].attributes["nohzFull"] is False
    finally:
        file.write_text(before)


@pytest.mark.parametrize("groups", ["numa", "socket", "l3", "machine"])
def test_groups_hold_each_cpu_once(root: Path, groups: str) -> None:
    """The groups of a kind are disjoint, and together they are the machine."""
    group_devices = devices(root, groups).values()

    assert sum(len(device.near_cpus) for device in group_devices) == 128
    assert len({cpu for device in group_devices for cpu in device.near_cpus}) == 128
    assert all(device.capacity == {"cpus": len(device.near_cpus)} for device in group_devices)
    assert {"numa": 8, "socket": 2, "l3": 16, "machine": 1}[groups] == len(group_devices)


@pytest.mark.parametrize("groups", ["cpu", "numa", "socket", "l3"])
def test_sockets_are_told_by_groups_as_by_single_cpus(root: Path, groups: str) -> None:
    """The shapes of a machine do not depend on how its CPUs are offered."""
    homes = {(device.numa_nodes, device.socket) for device in devices(root, groups).values()}

    assert {(node, socket) for nodes, socket in homes for node in nodes or ()} == {
        (node, node // 4) for node in range(8)
    }


@pytest.mark.parametrize(
    ("groups", "name"),
    [("numa", "cpu-numa-0"), ("socket", "cpu-socket-0"), ("l3", "cpu-l3-0"), ("machine", "cpu-machine")],
)
def test_groups_are_named_by_class_and_unit_and_never_as_one_cpu(root: Path, groups: str, name: str) -> None:
    """A name tells the class to Kubernetes, and a group from a CPU to the engine."""
    names = list(devices(root, groups))

    assert names[0] == name
    assert {class_of_device(DRIVER, each_name) for each_name in names} == {"cpu"}
    assert {cpu_of_name(each_name) for each_name in names} == {None}


def test_whole_cores_are_given_when_the_operator_says_so(root: Path) -> None:
    """What is asked for is rounded up to whole cores by whoever allocates."""
    tree, driver = Tree(HardwareSettings(root=str(root))), LinuxCpuDriver()
    driver.configure(HostServices(cpus=CpuGroupSettings(groups="numa", whole_cores=True)))

    shown = slice_device(driver.discover(tree, read_machine(tree, "n1")).devices[0])

    policy = shown.capacity["cpus"].request_policy
    assert policy is not None
    assert policy.valid_range is not None
    assert (policy.default, policy.valid_range.min, policy.valid_range.step) == ("2", "2", "2")


def test_pcie_roots_are_those_of_the_cpus_node(root: Path) -> None:
    """A CPU near one root shows it as cards do.

    A group of several nodes shows all of theirs as a list.
    """
    machine = read_machine(Tree(HardwareSettings(root=str(root))), "n1")
    near = {
        node: {function.root for function in machine.pci_devices if function.numa_node == node and function.root}
        for node in range(8)
    }

    for device in devices(root).values():
        assert device.numa_nodes is not None
        assert set(device.pcie_roots) == near[device.numa_nodes.lowest]
    (whole,) = devices(root, "machine").values()
    shown = slice_device(whole).attributes["resource.kubernetes.io/pcieRoot"]
    assert shown.strings == tuple(sorted(set().union(*near.values())))
    single = next(device for device in devices(root).values() if len(device.pcie_roots) == 1)
    assert slice_device(single).attributes["resource.kubernetes.io/pcieRoot"].string == single.pcie_roots[0]
