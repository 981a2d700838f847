"""GPUs that no container can use as GPUs: held for a virtual machine, shared through virtual
functions, or cut into MIG instances.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.devicekit.driver import DeviceDriver, PrepareContext
from topobus.gpu.plugins.amd import AmdDriver
from topobus.gpu.plugins.intel import IntelDriver
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

_PROFILES = Path(__file__).parent.parent.parent / "data" / "profiles"
_CONTEXT = PrepareContext(owner=Owner(kind=OwnerKind.CLAIM, name="c", uid="u"))


class _Node:
    """Two GPUs of one maker, and the maker's driver."""

    def __init__(self, driver: DeviceDriver, recorded: RecordedMachine, card: str) -> None:
        self.driver = driver
        self.recorded = recorded
        self.tree = Tree(HardwareSettings(root=str(recorded.root)))
        self.first, self.second = recorded.pci(card)

    def discover(self) -> tuple[Device, ...]:
        return tuple(self.driver.discover(self.tree, read_machine(self.tree, "n1")).devices)

    def bind(self, address: str, kernel_driver: str) -> None:
        """Bind a function to another kernel driver."""
        link = self.recorded.root / self.recorded.folder(address) / "driver"
        link.unlink()
        link.symlink_to(f"/sys/bus/pci/drivers/{kernel_driver}")

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self.driver.discover(self.tree, read_machine(self.tree, "n1")).warnings)


@pytest.fixture(params=["nvidia", "amd"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> _Node:
    """Give a node of each maker that has a recorded machine."""
    if request.param == "nvidia":
        return _Node(NvidiaDriver(), build(_PROFILES / "h100-pair.toml", tmp_path / "machine"), "h100")
    return _Node(AmdDriver(), build(_PROFILES / "mi210-pair.toml", tmp_path / "machine"), "mi210")


@pytest.mark.parametrize("kernel_driver", ["vfio-pci", "pci-stub", "nvgrace-gpu-vfio-pci", "mlx5_vfio_pci"])
def test_discover_leaves_a_gpu_out_when_a_passthrough_driver_holds_it(node: _Node, kernel_driver: str) -> None:
    """A GPU of a virtual machine is not a healthy GPU for containers: it is named in the warnings,
    and its neighbour is offered.
    """
    node.bind(node.first, kernel_driver)

    devices = node.discover()

    assert [str(device.pci) for device in devices] == [node.second]
    assert node.warnings == (f"{node.first} is not offered: kernel driver {kernel_driver} holds it for passthrough",)


def test_discover_leaves_a_gpu_out_when_its_virtual_functions_are_on(node: _Node) -> None:
    """A physical function is not handed out whole beside its own virtual functions."""
    node.recorded.write(f"{node.recorded.folder(node.first)}/sriov_numvfs", "4")

    devices = node.discover()

    assert [str(device.pci) for device in devices] == [node.second]
    assert node.warnings == (f"{node.first} is not offered: it has 4 virtual functions on, which are offered instead",)


@pytest.mark.parametrize("change", ["passthrough", "virtual functions"])
def test_prepare_refuses_a_gpu_when_it_was_rebound_since_the_last_look(node: _Node, change: str) -> None:
    """Between two looks a GPU may go to a virtual machine: a claim for it is refused by name, and
    prepares no empty device.
    """
    devices = node.discover()
    if change == "passthrough":
        node.bind(node.first, "vfio-pci")
    else:
        node.recorded.write(f"{node.recorded.folder(node.first)}/sriov_numvfs", "1")

    refusal = node.driver.prepare(node.tree, devices, _CONTEXT)

    assert isinstance(refusal, Refusal)
    assert [(reason.code, reason.facts["devices"]) for reason in refusal.reasons] == [
        ("device-not-offered", (devices[0].name,))
    ]


def test_discover_leaves_a_gpu_out_when_it_is_cut_into_mig_instances(tmp_path: Path) -> None:
    """Without NVML the kernel module's list of instances tells that MIG is on."""
    node = _Node(NvidiaDriver(), build(_PROFILES / "h100-pair.toml", tmp_path / "machine"), "h100")
    node.recorded.write("proc/driver/nvidia/capabilities/gpu0/mig/gi3/access", "DeviceFileMinor: 30")

    devices = node.discover()

    assert [str(device.pci) for device in devices] == [node.second]
    assert node.warnings == (
        f"{node.first} is not offered: MIG mode is on, and CUDA finds no device on the whole GPU; NVML, which "
        "reports its instances, is not used",
    )


def test_intel_leaves_a_gpu_out_when_a_passthrough_driver_holds_it(tmp_path: Path) -> None:
    """Intel's driver follows the same rule."""
    recorded = build("laptop", tmp_path / "machine")
    tree, driver = Tree(HardwareSettings(root=str(recorded.root))), IntelDriver()
    (graphics,) = driver.discover(tree, read_machine(tree, "n1")).devices
    link = recorded.root / recorded.folder(str(graphics.pci)) / "driver"
    link.unlink()
    link.symlink_to("/sys/bus/pci/drivers/vfio-pci")

    assert driver.discover(tree, read_machine(tree, "n1")).devices == ()
    assert driver.discover(tree, read_machine(tree, "n1")).warnings == (
        f"{graphics.pci} is not offered: kernel driver vfio-pci holds it for passthrough",
    )
