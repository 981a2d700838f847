"""NVIDIA GPUs that go to VFIO: what the plugin has of its own on them is closed, and the other GPUs
go on.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest

from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.pci import PciAddress
from unit.gpu.nvml_stand_in import Gpu, Library, started

_PROFILE = Path(__file__).parent.parent.parent / "data" / "profiles" / "h100-pair.toml"


class _AskedLibrary(Library):
    """Notes which GPUs somebody takes a handle of: NVML opens their nodes then."""

    def __init__(self, *gpus: Gpu) -> None:
        super().__init__(*gpus)
        self.opened: set[PciAddress] = set()

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> Gpu:  # noqa: N802 - NVML's own name
        self.opened.add(PciAddress.parse(bus_id))
        return super().nvmlDeviceGetHandleByPciBusId(bus_id)


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedMachine:
    """Give two H100."""
    return build(_PROFILE, tmp_path / "machine")


def test_nvml_leaves_a_gpu_alone_from_letting_go_to_taking_back(recorded: RecordedMachine) -> None:
    """Its session ends and the next one never opens this GPU, however often all are looked at, and
    knows the other one.

    After the way back it is asked again.
    """
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    addresses = [PciAddress.parse(address) for address in recorded.pci("h100")]
    first, during, after = (_AskedLibrary(*map(Gpu, addresses)) for _ in range(3))
    driver = NvidiaDriver(started(first, during, after))
    machine = read_machine(tree, "n1")
    devices = driver.discover(tree, machine).devices

    driver.let_go(tree, devices[0])
    looked = driver.discover(tree, machine).devices
    seen = driver.observe(tree, devices)
    driver.take_back(tree, devices[0])
    driver.observe(tree, devices)

    assert first.opened == set(addresses)
    assert during.opened == {addresses[1]}
    assert after.opened == set(addresses)
    # What was known of it stands, and nothing is wrong with it.
    assert [device.uuid for device in looked] == [device.uuid for device in devices]
    assert {name: list(observations) for name, observations in seen.items()} == {device.name: [] for device in devices}


def test_own_node_of_a_gpu_is_named_for_the_look_at_who_uses_it(recorded: RecordedMachine) -> None:
    """The node of CUDA stands in no folder of sysfs.

    Without NVML, letting go and taking back are nothing. The maker's runtime
    adds no GPU to such a container.
    """
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    driver = NvidiaDriver()
    first, second = driver.discover(tree, read_machine(tree, "n1")).devices
    driver.let_go(tree, first)
    driver.take_back(tree, first)

    assert [list(driver.own_nodes(tree, device)) for device in (first, second)] == [["nvidia0"], ["nvidia1"]]
    assert driver.passthrough_variables == MappingProxyType({"NVIDIA_VISIBLE_DEVICES": "void"})
