"""The nvidia plugin with NVML, and without it: sysfs speaks where the library does not load or may
not be asked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.devicekit.driver import PrepareContext
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import LinkClass
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind
from unit.gpu.nvml_stand_in import Gpu, Library, MigLibrary, started

_OWNER = Owner(kind=OwnerKind.CLAIM, name="c", uid="u")

_PROFILE = Path(__file__).parent.parent.parent / "data" / "profiles" / "h100-pair.toml"


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedMachine:
    """Give two H100 under one switch."""
    return build(_PROFILE, tmp_path / "machine")


def test_driver_prefers_nvml_when_it_is_there(recorded: RecordedMachine) -> None:
    """With NVML a GPU has its UUID, exact memory and fabric peers.

    Through switches every GPU on them is one.
    """
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    addresses = [PciAddress.parse(address) for address in recorded.pci("h100")]
    driver = NvidiaDriver(started(Library(*(Gpu(address, links=["switch"] * 18) for address in addresses))))

    first, second = driver.discover(tree, read_machine(tree, "n1")).devices

    assert first.uuid == f"GPU-nvml-{addresses[0].bus:x}"
    assert first.capacity == {"memory": 85_520_809_984}
    assert [(link.peer, link.kind, link.bandwidth_gbps) for link in first.links] == [
        (second.name, LinkClass.FABRIC, 3600.0)
    ]


def test_driver_degrades_to_sysfs_when_the_library_does_not_load(recorded: RecordedMachine, tmp_path: Path) -> None:
    """Without the library the GPUs are found all the same, and a warning says what is missing."""
    tree = Tree(HardwareSettings(root=str(recorded.root), library_path=str(tmp_path)))
    driver = NvidiaDriver()

    devices = driver.discover(tree, read_machine(tree, "n1")).devices

    assert [device.uuid[:4] for device in devices] == ["GPU-", "GPU-"]
    assert "without NVLink and ECC" in driver.discover(tree, read_machine(tree, "n1")).warnings[0]


def test_driver_never_asks_nvml_when_the_tree_is_recorded(recorded: RecordedMachine) -> None:
    """A recorded machine's GPUs must not mix with those of the machine that runs this."""
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    driver = NvidiaDriver()

    assert len(driver.discover(tree, read_machine(tree, "n1")).devices) == 2
    assert driver.discover(tree, read_machine(tree, "n1")).warnings == ()


def test_driver_does_not_offer_a_gpu_when_nvml_says_that_mig_is_on(recorded: RecordedMachine) -> None:
    """CUDA finds no device on a GPU in MIG mode, so it is not offered whole; its neighbour is."""
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    addresses = [PciAddress.parse(address) for address in recorded.pci("h100")]
    driver = NvidiaDriver(started(MigLibrary(*map(Gpu, addresses))))

    devices = driver.discover(tree, read_machine(tree, "n1")).devices

    assert [device.pci for device in devices] == [addresses[1]]
    assert (
        driver.discover(tree, read_machine(tree, "n1"))
        .warnings[0]
        .startswith(f"{addresses[0]} is not offered: MIG mode is on, and CUDA finds no device on the whole GPU")
    )


@pytest.mark.parametrize("is_known", [True, False], ids=["uuids-known", "one-uuid-unknown"])
def test_driver_never_leaves_the_variable_to_the_image(recorded: RecordedMachine, is_known: bool) -> None:
    """Images of CUDA say "all", which NVIDIA's runtime obeys where nobody says otherwise.

    A list that lacks one GPU would hide it.
    """
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    if not is_known:
        recorded.write(f"proc/driver/nvidia/gpus/{recorded.pci('h100')[0]}/information", "Device Minor: \t 0")
    driver = NvidiaDriver()
    devices = driver.discover(tree, read_machine(tree, "n1")).devices

    edits = driver.prepare(tree, devices, PrepareContext(owner=_OWNER))

    assert isinstance(edits, dict)
    assert edits[""].env["NVIDIA_VISIBLE_DEVICES"] == (
        ",".join(device.uuid for device in devices) if is_known else "void"
    )
    assert [node.path for node in edits[devices[0].name].device_nodes][:1] == ["/dev/nvidia0"]


def test_driver_tells_an_excluded_gpu_when_the_module_leaves_it_alone(recorded: RecordedMachine) -> None:
    """A GPU that the kernel module was told to leave alone is listed, and Unhealthy with the
    reason.
    """
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    recorded.write(
        f"proc/driver/nvidia/gpus/{recorded.pci('h100')[0]}/information", "Device Minor: \t 0\nGPU Excluded:\t Yes"
    )
    driver = NvidiaDriver()
    devices = driver.discover(tree, read_machine(tree, "n1")).devices

    seen = driver.observe(tree, devices)

    assert [observation.reason for observation in seen[devices[0].name]] == ["gpu-excluded"]
    assert list(seen[devices[1].name]) == []
