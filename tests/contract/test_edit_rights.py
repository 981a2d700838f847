"""The rights of the classes and the drivers that come with Topobus fit: nothing that a shipped
driver gives is refused, on any recorded machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.cpu.plugins.linux_cpu import LinuxCpuDriver
from topobus.devicekit.driver import DeviceDriver, PrepareContext
from topobus.formats.messages.messages import Prepared
from topobus.fpga.plugins.intel_dfl import IntelDflDriver
from topobus.fpga.plugins.xilinx import XilinxDriver
from topobus.gateway.containers.rules.edit_limits import NO_RIGHTS, refuse_forbidden, rights_of
from topobus.gpu.plugins.amd import AmdDriver
from topobus.gpu.plugins.intel import IntelDriver
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.simulation.machines import PROFILES, build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.edits import ContainerEdits
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

DRIVERS: tuple[type[DeviceDriver], ...] = (
    NvidiaDriver,
    AmdDriver,
    IntelDriver,
    PciNetdevDriver,
    XilinxDriver,
    IntelDflDriver,
    LinuxCpuDriver,
)
OWNER = Owner(kind=OwnerKind.CLAIM, namespace="default", name="c", uid="u")


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_shipped_drivers_stay_within_the_rights_of_their_class(profile: str, tmp_path: Path) -> None:
    """What they give for all their devices at once passes the gateway without a setting."""
    build(profile, tmp_path)
    tree = Tree(HardwareSettings(root=str(tmp_path)))
    machine = read_machine(tree, "n")
    prepared = 0
    for make in DRIVERS:
        driver = make()
        devices = driver.discover(tree, machine).devices
        edits = driver.prepare(tree, devices, PrepareContext(owner=OWNER)) if devices else {}
        assert not isinstance(edits, Refusal)
        answer = Prepared(
            edits={name: edit for name, edit in edits.items() if name}, common=edits.get("", ContainerEdits())
        )
        prepared += len(devices)

        assert (
            refuse_forbidden(driver.device_class, answer, rights_of(driver.device_class, NO_RIGHTS, is_foreign=False))
            is None
        )

    assert prepared
