"""Recorded faults that are struck and taken back: what their drivers see, and what is left on the
machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lab.device_faults import FAULTS, build_faulty, place_faults
from support.sysfs_trees import contents
from topobus.cpu.plugins.linux_cpu import LinuxCpuDriver
from topobus.devicekit.driver import DeviceDriver
from topobus.fpga.plugins.intel_dfl import IntelDflDriver
from topobus.fpga.plugins.xilinx import XilinxDriver
from topobus.gpu.plugins.amd import AmdDriver
from topobus.gpu.plugins.intel import IntelDriver
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.gpu.wedge_events import WedgeEvents
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.simulation.machines import RecordedMachine
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.sysfs.uevent import Uevent
from topobus.values.device import Device


class _Kernel:
    """Sends the event of a GPU that its driver gave up."""

    def __init__(self) -> None:
        self.sent: list[Uevent] = []

    def pending(self) -> list[Uevent]:
        """Give what was sent, once."""
        sent, self.sent = self.sent, []
        return sent


class _Looks:
    """The drivers of a machine, which look at the devices that they found at first."""

    def __init__(self, machine: RecordedMachine, kernel: _Kernel) -> None:
        self._root = machine.root
        drivers: Sequence[DeviceDriver] = (
            NvidiaDriver(),
            AmdDriver(),
            IntelDriver(WedgeEvents(lambda _: kernel)),
            PciNetdevDriver(),
            IntelDflDriver(),
            XilinxDriver(),
            LinuxCpuDriver(),
        )
        tree = Tree(HardwareSettings(root=str(self._root)))
        known_machine = read_machine(tree, "n")
        self._found = [(driver, tuple(driver.discover(tree, known_machine).devices)) for driver in drivers]

    @property
    def devices(self) -> list[Device]:
        """All that there are."""
        return [device for _, devices in self._found for device in devices]

    def signs(self) -> dict[str, set[str]]:
        """Look once: the reasons by device, without devices that have none."""
        tree = Tree(HardwareSettings(root=str(self._root)))
        present = read_machine(tree, "n")
        seen: dict[str, set[str]] = {}
        for driver, devices in self._found:
            # As a service does: devices as they are now, and those that are gone as they were.
            newest = {device.name: device for device in (*devices, *driver.discover(tree, present).devices)}
            for name, signs in driver.observe(tree, tuple(newest.values())).items():
                seen[name] = {sign.reason for sign in signs}
        return {name: reasons for name, reasons in seen.items() if reasons}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> RecordedMachine:
    """Give the machine, which each test leaves as it was."""
    return build_faulty(tmp_path_factory.mktemp("faulty") / "machine")


def test_machine_and_its_devices_are_as_before_when_all_faults_are_taken_back(machine: RecordedMachine) -> None:
    """Twice: a fault that was taken back can be struck again, and each is seen both times."""
    kernel = _Kernel()
    looks = _Looks(machine, kernel)
    placed = place_faults(machine, looks.devices, FAULTS)
    first = looks.signs()
    before = contents(machine.root)
    for _ in range(2):
        for fault in placed:
            fault.strike()
            if fault.fault.act == "tell":
                path = f"/{machine.folder(str(fault.devices[0].pci)).removeprefix('sys/')}/drm/card0"
                kernel.sent.append(Uevent(action="change", path=path, subsystem="drm", wedged="rebind"))
        sick = looks.signs()
        for fault in placed:
            fault.heal()
            fault.heal()
        healed = looks.signs()

        for fault in placed:
            for name in fault.names:
                assert fault.fault.code in sick.get(name, set()), (fault.fault.code, name)
        assert healed == first
        assert contents(machine.root) == before
