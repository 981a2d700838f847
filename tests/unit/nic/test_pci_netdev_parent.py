"""A virtual function is as healthy as its physical one's link: on a recorded machine, whose tree
has all links a real one has.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.health import Dimension, HealthState, Observation
from topobus.values.pci import PciAddress

_PROFILE = Path(__file__).parents[2] / "data" / "profiles" / "nic-functions.toml"


class Card:
    """A recorded card with virtual functions, one of which a pod has."""

    def __init__(self, machine: RecordedMachine) -> None:
        self.machine = machine
        self.tree = Tree(HardwareSettings(root=str(machine.root)))
        self.driver = PciNetdevDriver()
        devices = self.driver.discover(self.tree, read_machine(self.tree, "n")).devices
        self.virtual: tuple[Device, ...] = tuple(device for device in devices if device.attributes["sriovVf"])
        self.own = self.virtual[0]
        self.parent = PciAddress.parse(self.tree.link_name(f"sys/bus/pci/devices/{self.own.pci}/physfn"))

    def siblings(self, device: Device) -> set[str]:
        """Name the virtual functions of the same physical one."""
        return {sibling.name for sibling in self.virtual if sibling.parent == device.parent}

    def see(self) -> dict[str, list[Observation]]:
        """Give what is wrong, by device."""
        seen = self.driver.observe(self.tree, self.virtual)
        return {name: list(observations) for name, observations in seen.items() if observations}

    def hand_over(self) -> None:
        """Take the interface of a virtual function out of sight, as a move into a pod's network
        namespace does.
        """
        folder = self.machine.root / "sys/bus/pci/devices" / str(self.own.pci) / "net"
        for interface in list(folder.iterdir()):
            interface.rename(folder.parent / f"moved-{interface.name}")
        folder.rmdir()


@pytest.fixture
def card(tmp_path: Path) -> Card:
    """A card with virtual functions, healthy, beside another one."""
    machine = build(_PROFILE, tmp_path / "machine")
    made = Card(machine)
    machine.set_carrier(str(made.parent), is_up=True)
    return made


def test_observe_finds_nothing_when_the_physical_function_has_a_carrier(card: Card) -> None:
    """A healthy card has no sick part, whether a part's interface is in sight or in a pod."""
    before = card.see()
    card.hand_over()

    assert (before, card.see()) == ({}, {})


def test_observe_is_unhealthy_when_the_physical_function_of_a_handed_over_one_loses_its_carrier(card: Card) -> None:
    """The interface is in a pod, where nobody sees its link.

    The physical function's cable tells, of all its parts and of no others.
    """
    card.hand_over()
    card.machine.write(f"{card.machine.folder(str(card.parent))}/net/{_interface(card)}/carrier", "0")

    seen = card.see()

    assert set(seen) == card.siblings(card.own)
    assert [(observation.dimension, observation.state, observation.reason) for observation in seen[card.own.name]] == [
        (Dimension.LINK, HealthState.UNHEALTHY, "parent-carrier-lost")
    ]
    assert seen[card.own.name][0].evidence["path"].endswith(f"/{_interface(card)}/carrier")


def test_observe_finds_nothing_when_the_physical_function_is_switched_off(card: Card) -> None:
    """The kernel tells no carrier of an interface that is off.

    That is no evidence against its parts.
    """
    folder = card.machine.root / card.machine.folder(str(card.parent)) / "net" / _interface(card)
    (folder / "carrier").unlink()

    assert card.see() == {}


def test_observe_is_unhealthy_when_the_physical_function_left_the_bus(card: Card) -> None:
    """The kernel takes the parts away too, a moment later: until then
    they are no use to anybody.
    """
    link = card.machine.root / "sys/bus/pci/devices" / str(card.parent)
    link.unlink()

    seen = card.see()

    assert {name: [observation.reason for observation in seen[name]] for name in card.siblings(card.own)} == {
        name: ["parent-gone"] for name in card.siblings(card.own)
    }


def _interface(card: Card) -> str:
    (name,) = card.tree.names(f"sys/bus/pci/devices/{card.parent}/net")
    return name


@pytest.mark.parametrize(
    ("file", "text", "reason", "state"),
    [
        ("aer_dev_fatal", "TOTAL_ERR_FATAL 3", "parent-aer-fatal", HealthState.UNHEALTHY),
        ("aer_dev_nonfatal", "TOTAL_ERR_NONFATAL 1", "parent-aer-nonfatal", HealthState.DEGRADED),
        ("aer_dev_correctable", "TOTAL_ERR_COR 100", "parent-aer-correctable-storm", HealthState.DEGRADED),
        ("current_link_width", "1", "parent-link-narrow", HealthState.DEGRADED),
        ("current_link_speed", "2.5 GT/s PCIe", "parent-link-slow", HealthState.DEGRADED),
    ],
)
def test_observe_tells_the_physical_functions_fault_of_all_its_virtual_ones(
    card: Card, file: str, text: str, reason: str, state: HealthState
) -> None:
    """Virtual functions have no error counters and no link of their own: what their card suffers,
    they all do, and no others.
    """
    assert card.see() == {}
    card.machine.write(f"{card.machine.folder(str(card.parent))}/{file}", text)

    seen = card.see()

    assert {name: [(sign.reason, sign.state) for sign in signs] for name, signs in seen.items()} == {
        name: [(reason, state)] for name in card.siblings(card.own)
    }


def test_observe_is_unhealthy_when_the_physical_function_lost_its_driver(card: Card) -> None:
    """Without it nobody sets the card up."""
    (card.machine.root / card.machine.folder(str(card.parent)) / "driver").unlink()

    seen = card.see()

    assert {name: [(sign.reason, sign.state) for sign in signs] for name, signs in seen.items()} == {
        name: [("parent-no-kernel-driver", HealthState.UNHEALTHY)] for name in card.siblings(card.own)
    }
