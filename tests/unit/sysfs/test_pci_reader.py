"""PCI functions: place in the tree, kinds of bridges, links, and what a machine does not tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.sysfs_trees import cpu_files, mask, write
from topobus.simulation.machines import build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.pci import read_pci_devices
from topobus.sysfs.report import machine_report
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine, PciDevice
from topobus.values.pci import PciAddress

ALL = CpuSet(0, 1, 2, 3)
FOLDER = "sys/bus/pci/devices"


@pytest.fixture(scope="module")
def dgx(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """The demo machine, read."""
    root = tmp_path_factory.mktemp("dgx")
    build("dgx", root)
    return read_machine(Tree(HardwareSettings(root=str(root))), "demo-node")


def at(machine: Machine, address: str) -> PciDevice:
    """Find a function."""
    return next(pci_device for pci_device in machine.pci_devices if pci_device.address == PciAddress.parse(address))


def test_pci_device_knows_root_path_and_switch_when_below_a_switch(dgx: Machine) -> None:
    """A GPU below a switch names its root complex, the three bridges above it, and the switch's
    upstream port.
    """
    gpu = at(dgx, "0000:1a:00.0")

    assert gpu.root == "pci0000:15"
    assert [str(pci_address) for pci_address in gpu.path] == ["0000:15:01.0", "0000:16:00.0", "0000:17:02.0"]
    assert gpu.switch == PciAddress.parse("0000:16:00.0")


def test_pci_ports_are_told_apart_when_configuration_space_is_readable(dgx: Machine) -> None:
    """Root ports and both kinds of switch ports are told apart; a root port is no switch."""
    kinds = {
        name: (at(dgx, name).is_root_port, at(dgx, name).is_switch_port)
        for name in ("0000:15:01.0", "0000:16:00.0", "0000:17:00.0")
    }

    assert kinds == {"0000:15:01.0": (True, False), "0000:16:00.0": (False, True), "0000:17:00.0": (False, True)}
    assert at(dgx, "0000:38:00.0").switch is None


def test_pci_switch_is_found_by_the_order_of_bridges_when_configuration_space_is_closed(tmp_path: Path) -> None:
    """Without the right to read beyond 64 bytes, three PCI Express bridges in a row still mean a
    switch.
    """
    machine = build("dgx", tmp_path)
    for config in tmp_path.glob("sys/devices/pci*/**/config"):
        config.write_bytes(config.read_bytes()[:64])

    devices, _ = read_pci_devices(Tree(HardwareSettings(root=str(machine.root))), CpuSet(0))

    pci_devices = {str(device.address): device for device in devices}
    assert pci_devices["0000:1a:00.0"].switch == PciAddress.parse("0000:16:00.0")
    assert pci_devices["0000:38:00.0"].switch is None
    assert pci_devices["0000:16:00.0"].is_switch_port
    assert pci_devices["0000:15:01.0"].is_root_port


def test_pci_functions_of_one_switch_share_it_when_compared(dgx: Machine) -> None:
    """Each switch of the demo machine has two GPUs and two NICs below it, and no switch is shared
    between root complexes.
    """
    switches: dict[PciAddress, list[int]] = {}
    for pci_device in dgx.pci_devices:
        if pci_device.switch is not None and not pci_device.is_bridge:
            switches.setdefault(pci_device.switch, []).append(pci_device.class_code >> 16)

    assert [sorted(classes) for classes in switches.values()] == [[2, 2, 3, 3]] * 4


def test_pci_numa_node_is_none_when_the_kernel_says_minus_one(tmp_path: Path) -> None:
    """-1 is "not told", never node 0; near are all CPUs then."""
    files: dict[str, object] = {f"{FOLDER}/0000:00:02.0/class": "0x030000", f"{FOLDER}/0000:00:02.0/numa_node": "-1"}

    (device,), _ = read_pci_devices(write(tmp_path, files), ALL)

    assert (device.numa_node, device.near_cpus) == (None, ALL)


def test_pci_device_is_left_out_when_its_link_dangles(tmp_path: Path) -> None:
    """A function that goes away between listing and reading is simply not
    there, without a warning.
    """
    tree = write(tmp_path, {f"{FOLDER}/0000:00:02.0/class": "0x030000"})
    (tmp_path / FOLDER / "0000:00:03.0").symlink_to("../../../devices/pci0000:00/0000:00:03.0")

    devices, warnings = read_pci_devices(tree, ALL)

    assert ([str(device.address) for device in devices], warnings) == (["0000:00:02.0"], ())


@pytest.mark.parametrize(
    "file", ["class", "vendor", "device", "numa_node", "subsystem_vendor", "revision", "local_cpus"]
)
@pytest.mark.parametrize("raw", ["display", "0x", "\ufffd", "1 2", "NaN"])
def test_pci_device_stays_with_a_warning_when_one_of_its_files_is_garbage(tmp_path: Path, file: str, raw: str) -> None:
    """A function with a corrupt number stays visible, and the machine says which file it was and
    what it held.
    """
    files: dict[str, object] = {f"{FOLDER}/0000:00:02.0/class": "0x030000", f"{FOLDER}/0000:00:03.0/{file}": raw}

    devices, warnings = read_pci_devices(write(tmp_path, files), ALL)

    assert [str(device.address) for device in devices] == ["0000:00:02.0", "0000:00:03.0"]
    assert len(warnings) == 1
    assert f"0000:00:03.0/{file}" in warnings[0]
    assert repr(raw) in warnings[0]


def test_pci_numbers_come_from_configuration_space_when_their_files_are_garbage(tmp_path: Path) -> None:
    """Class, vendor and device stand in configuration space, too: a GPU with a corrupt class file
    is a GPU still.
    """
    machine = build("dgx", tmp_path)
    tree = Tree(HardwareSettings(root=str(machine.root)))
    before = at(read_machine(tree, "n"), "0000:1a:00.0")
    for file in ("class", "vendor", "device"):
        machine.write(f"{FOLDER}/0000:1a:00.0/{file}", "garbage")

    after = read_machine(tree, "n")

    assert at(after, "0000:1a:00.0") == before
    assert (
        len([warning for warning in after.warnings if "0000:1a:00.0" in warning and "configuration space" in warning])
        == 3
    )


def test_pci_device_stays_when_its_class_is_garbage_and_configuration_space_is_closed(tmp_path: Path) -> None:
    """Without either source the class is unknown; the function stays in the machine."""
    machine = build("dgx", tmp_path)
    machine.write(f"{FOLDER}/0000:1a:00.0/class", "garbage")
    for config in tmp_path.glob("sys/devices/pci*/**/0000:1a:00.0/config"):
        config.write_bytes(b"\xff" * 64)

    read = read_machine(Tree(HardwareSettings(root=str(machine.root))), "n")

    assert at(read, "0000:1a:00.0").class_code == 0
    assert [warning for warning in read.warnings if "0000:1a:00.0/class" in warning and "taken as unknown" in warning]


def test_pci_link_is_zero_when_the_kernel_says_unknown(tmp_path: Path) -> None:
    """`Unknown` speed and 255 lanes are no numbers to calculate with."""
    base = f"{FOLDER}/0000:00:02.0"
    files: dict[str, object] = {
        f"{base}/current_link_speed": "Unknown",
        f"{base}/current_link_width": "255",
        f"{base}/max_link_speed": "16.0 GT/s PCIe",
        f"{base}/max_link_width": "16",
    }

    (device,), _ = read_pci_devices(write(tmp_path, files), ALL)

    assert device.link is not None
    assert (device.link.speed_gts, device.link.width, device.link.max_speed_gts, device.link.max_width) == (
        0.0,
        0,
        16.0,
        16,
    )


def test_pci_virtual_function_names_its_physical_one_when_sriov_is_on(tmp_path: Path) -> None:
    """A VF leads to its PF, has a driver of its own, and an IOMMU group apart."""
    build("epyc-8numa", tmp_path)
    devices, _ = read_pci_devices(Tree(HardwareSettings(root=str(tmp_path))), CpuSet(0))
    pci_devices = {str(device.address): device for device in devices}

    virtual, physical = pci_devices["0000:42:00.1"], pci_devices["0000:42:00.0"]

    assert virtual.physfn == physical.address
    assert (virtual.driver, physical.driver) == ("iavf", "ice")
    assert virtual.iommu_group != physical.iommu_group


def test_pci_report_leaves_bridges_and_wide_domains_out_when_listing(tmp_path: Path) -> None:
    """The report lists functions, not bridges, and only domains of 16 bits.

    The machine has them all.
    """
    files = cpu_files(4) | {
        f"{FOLDER}/0000:00:01.0/class": "0x060400",
        f"{FOLDER}/0000:00:02.0/class": "0x060000",
        f"{FOLDER}/10000:00:02.0/class": "0x010802",
    }

    machine = read_machine(write(tmp_path, files), "n")

    assert [device["address"] for device in machine_report(machine)["pci"]] == ["0000:00:02.0"]
    assert len(machine.pci_devices) == 3


def test_pci_report_lets_the_first_function_speak_for_its_root_bus_when_they_differ(tmp_path: Path) -> None:
    """Near CPUs in the report are those of the root complex.

    Each function's own stay in the machine.
    """
    files = cpu_files(4, sockets=2) | {
        f"{FOLDER}/0000:00:01.0/local_cpus": mask(0, 1),
        f"{FOLDER}/0000:00:02.0/local_cpus": mask(2, 3),
    }

    machine = read_machine(write(tmp_path, files), "n")

    assert [device["near_cpus"] for device in machine_report(machine)["pci"]] == ["0-1", "0-1"]
    assert [str(pci_device.near_cpus) for pci_device in machine.pci_devices] == ["0-1", "2-3"]
