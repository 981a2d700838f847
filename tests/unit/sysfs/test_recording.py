"""A recording reads like the machine it was made of, and says what it had to leave out."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from topobus.devicekit.registry import load_drivers
from topobus.simulation.machines import build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.recording import record
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.errors import HardwareError
from topobus.values.health import HealthState
from topobus.values.machine import Machine

_DATA = Path(__file__).parents[2] / "data" / "machines"
_CLASSES = ("gpu", "nic", "fpga", "cpu")


def tree_of(root: Path) -> Tree:
    """Read below a folder, without this process's own cpuset."""
    return Tree(HardwareSettings(root=str(root), honours_cpuset=False))


def seen_below(root: Path) -> tuple[Machine, dict[str, Device], list[str]]:
    """Read the machine, discover every class with the drivers that ship, and list what they find
    wrong.
    """
    tree = tree_of(root)
    machine = read_machine(tree, "n1")
    devices: dict[str, Device] = {}
    troubles: list[str] = []
    for device_class in _CLASSES:
        for driver in load_drivers(device_class).drivers:
            discovered = driver.discover(tree, machine).devices
            devices |= {f"{device_class}/{device.name}": device for device in discovered}
            troubles += [
                f"{name}: {observation.reason}"
                for name, seen in driver.observe(tree, discovered).items()
                for observation in seen
                if observation.state is not HealthState.HEALTHY
            ]
    return machine, devices, sorted(troubles)


@pytest.mark.parametrize("profile", ["dgx", "epyc-8numa", "gb200", "laptop"])
def test_recording_reads_like_the_machine_when_a_profile_is_recorded(profile: str, tmp_path: Path) -> None:
    """Machine, devices of every class and what is wrong with them are the same in the copy."""
    original = build(profile, tmp_path / "original").root

    record(tree_of(original), tmp_path / "copy")

    machine, devices, troubles = seen_below(tmp_path / "copy")
    assert (machine, devices, troubles) == seen_below(original)
    assert devices


@pytest.mark.parametrize("name", ["48amd64-4pa2n6c-sparse", "40intel64-2g2n4c+pcilocality", "2pa-pcidomain32bits"])
def test_recording_reads_like_the_machine_when_a_real_one_is_recorded(name: str, tmp_path: Path) -> None:
    """Trees of real computers, with sparse ids, wide PCI domains and odd links, survive a second
    recording.
    """
    with tarfile.open(_DATA / f"{name}.tar.bz2") as archive:
        archive.extractall(tmp_path / "original", filter="tar", numeric_owner=True)
    (original,) = (tmp_path / "original").iterdir()

    record(tree_of(original), tmp_path / "copy")

    assert read_machine(tree_of(tmp_path / "copy"), "n1") == read_machine(tree_of(original), "n1")


def test_recording_leaves_the_folder_out_when_it_is_no_hardware(tmp_path: Path) -> None:
    """Firmware images, queues and other large or dangerous files are not touched."""
    machine = build("laptop", tmp_path / "original")
    gpu = machine.functions[0].folder
    for name in ("rom", "resource0", "reset"):
        machine.write(f"{gpu}/{name}", "do not read")

    record(tree_of(machine.root), tmp_path / "copy")

    assert (tmp_path / "copy" / gpu / "vendor").is_file()
    assert [name for name in ("rom", "resource0", "reset") if (tmp_path / "copy" / gpu / name).exists()] == []


def test_recording_names_the_file_when_it_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel refuses is told by path, and the rest is there."""
    machine = build("laptop", tmp_path / "original")
    target = machine.root / machine.functions[0].folder / "vendor"
    opened = os.open

    def refuse(path: str | os.PathLike[str], flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == target:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse)
    done = record(tree_of(machine.root), tmp_path / "copy")

    assert [path for path in done.unreadable if path.endswith("vendor: Permission denied")] == done.unreadable != []
    assert done.files > 100


def test_recording_refuses_when_the_source_is_no_machine(tmp_path: Path) -> None:
    """A folder without sys is told as such, before anything is written."""
    with pytest.raises(HardwareError, match="no sys/devices"):
        record(tree_of(tmp_path), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_recording_of_this_machine_reads_like_it(tmp_path: Path) -> None:
    """The live /sys, with whatever this machine has, is recorded and read back."""
    live = Tree(HardwareSettings(honours_cpuset=False))

    record(live, tmp_path / "copy")

    original, copy = read_machine(live, "n1"), read_machine(tree_of(tmp_path / "copy"), "n1")
    assert (copy.numa_nodes, copy.cpus, copy.pci_devices) == (original.numa_nodes, original.cpus, original.pci_devices)
