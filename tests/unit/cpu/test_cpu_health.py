"""What the kernel counts of CPUs: heat and memory errors, each of which touches its own CPUs alone."""

from __future__ import annotations

from pathlib import Path

from support.sysfs_trees import write
from topobus.cpu.plugins.linux_cpu import LinuxCpuDriver
from topobus.domain.device import Device
from topobus.sysfs.tree import Tree

CPU, CONTROLLERS = "sys/devices/system/cpu", "sys/devices/system/edac/mc"
DEVICES = [Device(name=f"cpu-{cpu}", device_class="cpu", cpu=cpu, socket=cpu // 2) for cpu in range(4)]


def _tree(root: Path, *, throttled: int = 0, errors: int = 0, controller: str = "Skylake Socket#1 IMC#0") -> Tree:
    files: dict[str, object] = {f"{CPU}/online": "0-3", f"{CONTROLLERS}/mc0/mc_name": controller, f"{CONTROLLERS}/mc0/ue_count": errors}
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
    assert _second_look(tmp_path, _tree(tmp_path), {"errors": 1}) == {"cpu-2": ["memory-errors"], "cpu-3": ["memory-errors"]}


def test_no_cpu_is_blamed_when_the_controller_tells_no_socket(tmp_path: Path) -> None:
    """A guess would take out the wrong CPUs."""
    unnamed = {"controller": "F19h_M10h"}

    assert _second_look(tmp_path, _tree(tmp_path, controller="F19h_M10h"), {"errors": 1, **unnamed}) == {}


def test_cpus_are_well_when_the_kernel_counts_nothing(tmp_path: Path) -> None:
    """A virtual machine has neither file."""
    tree = write(tmp_path, {f"{CPU}/online": "0-3"})

    assert LinuxCpuDriver().observe(tree, DEVICES) == {}
