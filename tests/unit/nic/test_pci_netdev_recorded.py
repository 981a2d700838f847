"""The NIC driver on whole recorded machines: the demo machine, one with virtual functions, and a
laptop.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.health import HealthState


class Recorded:
    """A recorded machine under the driver's eyes."""

    def __init__(self, machine: RecordedMachine) -> None:
        self.machine = machine
        self.tree = Tree(HardwareSettings(root=str(machine.root)))
        self.driver = PciNetdevDriver()
        self.discovery = self.driver.discover(self.tree, read_machine(self.tree, "n"))
        self.devices: tuple[Device, ...] = tuple(self.discovery.devices)

    def sick(self) -> dict[str, list[tuple[HealthState, str]]]:
        """Give what is wrong, by device name."""
        seen = self.driver.observe(self.tree, self.devices)
        return {
            name: [(observation.state, observation.reason) for observation in observations]
            for name, observations in seen.items()
            if observations
        }


@pytest.fixture(scope="module")
def dgx(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The demo machine.

    Building it costs a second, so all tests share it: whoever harms it, mends it.
    """
    return Recorded(build("dgx", tmp_path_factory.mktemp("dgx") / "machine"))


def test_discover_finds_eight_rdma_cards_in_pairs_under_switches_when_the_machine_is_the_demo(dgx: Recorded) -> None:
    """Four cards a NUMA node, two a switch, all healthy, each with an RDMA device of its own."""
    assert Counter(str(device.numa_nodes) for device in dgx.devices) == {"0": 4, "1": 4}
    assert set(Counter(device.pcie_switch for device in dgx.devices).values()) == {2}
    assert len({device.attributes["rdmaDevice"] for device in dgx.devices}) == 8
    assert dgx.sick() == {}


def test_discover_gives_the_same_devices_when_asked_again(dgx: Recorded) -> None:
    """Discovery depends on the tree alone."""
    again = PciNetdevDriver().discover(dgx.tree, read_machine(dgx.tree, "n")).devices

    assert tuple(again) == dgx.devices


def test_observe_follows_the_cable_when_it_is_pulled_and_plugged(dgx: Recorded) -> None:
    """The link's two faults (carrier, RDMA port) name one card, and both
    go when the cable is back.
    """
    victim = dgx.devices[2]
    dgx.machine.set_carrier(str(victim.pci), is_up=False)
    pulled = dgx.sick()
    dgx.machine.set_carrier(str(victim.pci), is_up=True)

    assert pulled == {victim.name: [(HealthState.UNHEALTHY, "carrier-lost"), (HealthState.UNHEALTHY, "rdma-port-down")]}
    assert dgx.sick() == {}


def test_observe_names_one_card_when_it_falls_off_the_bus(dgx: Recorded) -> None:
    """A surprise removal leaves the seven others healthy, and the
    returned card is healthy again.
    """
    victim = dgx.devices[0]
    dgx.machine.remove_pci(str(victim.pci))
    gone = dgx.sick()
    dgx.machine.restore_pci(str(victim.pci))

    assert gone == {victim.name: [(HealthState.UNHEALTHY, "fell-off-bus")]}
    assert dgx.sick() == {}


def test_discover_offers_virtual_functions_instead_of_their_card_when_some_are_on(tmp_path: Path) -> None:
    """On the EPYC machine two cards have four virtual functions each: those eight are offered, the
    two are told of.
    """
    epyc = Recorded(build("epyc-8numa", tmp_path / "machine"))
    virtual = [device for device in epyc.devices if device.attributes["sriovVf"]]

    assert Counter(device.parent for device in virtual) == {"nic-0000-42-00-0": 4, "nic-0000-c2-00-0": 4}
    assert not {device.parent for device in virtual} & {device.name for device in epyc.devices}
    assert len(epyc.discovery.warnings) == 2


def test_observe_is_unhealthy_when_nothing_is_plugged_in(tmp_path: Path) -> None:
    """The laptop's wired port has no cable and is not handed out; its wireless card is."""
    laptop = Recorded(build("laptop", tmp_path / "machine"))

    assert laptop.sick() == {"nic-0000-00-1f-6": [(HealthState.UNHEALTHY, "carrier-lost")]}
    assert [device.name for device in laptop.devices] == ["nic-0000-00-14-3", "nic-0000-00-1f-6"]
