"""The CPU driver on whole recorded machines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from topobus.cpu.plugins.linux_cpu import LinuxCpuDriver
from topobus.simulation.machines import build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree


@pytest.mark.parametrize(
    ("profile", "cpus", "cores", "nodes"),
    [("dgx", 224, 112, 2), ("gb200", 144, 144, 2), ("epyc-8numa", 128, 64, 8), ("laptop", 16, 12, 1)],
)
def test_discover_places_every_cpu_when_the_machine_is_recorded(
    tmp_path: Path, profile: str, cpus: int, cores: int, nodes: int
) -> None:
    """Counts of CPUs, cores and nodes with CPUs are those of the profile.

    Memory-only nodes have no CPU.
    """
    tree = Tree(HardwareSettings(root=str(build(profile, tmp_path / "machine").root)))

    devices = LinuxCpuDriver().discover(tree, read_machine(tree, "n")).devices

    assert (
        len(devices),
        len({device.core for device in devices}),
        len({str(device.numa_nodes) for device in devices}),
    ) == (
        cpus,
        cores,
        nodes,
    )


def test_discover_tells_kinds_of_cores_when_the_machine_is_hybrid(tmp_path: Path) -> None:
    """A laptop's performance and efficiency cores can be told apart in a claim."""
    tree = Tree(HardwareSettings(root=str(build("laptop", tmp_path / "machine").root)))

    devices = LinuxCpuDriver().discover(tree, read_machine(tree, "n")).devices

    assert Counter(device.attributes["kind"] for device in devices) == {"performance": 8, "efficiency": 8}


def test_observe_follows_a_cpu_when_it_goes_offline_and_comes_back(tmp_path: Path) -> None:
    """A CPU that somebody may hold is told of as gone while it is offline, and as it was before
    when it is back.
    """
    machine = build("dgx", tmp_path / "machine")
    tree = Tree(HardwareSettings(root=str(machine.root)))
    driver = LinuxCpuDriver()
    before = driver.discover(tree, read_machine(tree, "n")).devices

    machine.set_cpu_online(223, is_online=False)
    sick = driver.observe(tree, before)
    machine.set_cpu_online(223, is_online=True)
    after = driver.discover(tree, read_machine(tree, "n")).devices

    assert {name: [observation.message for observation in observations] for name, observations in sick.items()} == {
        "cpu-223": ["CPU 223 is offline"]
    }
    assert (tuple(after), driver.observe(tree, after)) == (tuple(before), {})
