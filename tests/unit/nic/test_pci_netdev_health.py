"""What the NIC driver calls a fault, how bad, and what it calls none."""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.health import Dimension, HealthState, Observation
from topobus.values.pci import PciAddress

ADDRESS = PciAddress.parse("0000:3b:00.0")
NIC = Device(name="nic-0000-3b-00-0", device_class="nic", driver="pci-netdev", pci=ADDRESS)
UP = {"flags": "0x1003", "carrier": "1", "operstate": "up", "speed": "100000", "duplex": "full"}


class Card:
    """One card in a small tree, and the driver that watches it."""

    def __init__(self, root: Path) -> None:
        self.folder = root / f"sys/bus/pci/devices/{ADDRESS}"
        self.folder.mkdir(parents=True)
        (root / "sys/bus/pci/drivers/mlx5_core").mkdir(parents=True)
        (self.folder / "driver").symlink_to("../../drivers/mlx5_core")
        self.tree = Tree(HardwareSettings(root=str(root)))
        self.driver = PciNetdevDriver()

    def interface(self, name: str = "eth0", **changes: str) -> Card:
        """Set the files of an interface: up and linked, but for `changes`."""
        for file, text in {**UP, **changes}.items():
            self.write(f"net/{name}/{file}", text)
        return self

    def port(self, state: str, link_layer: str, number: int = 1) -> Card:
        """Set an RDMA port."""
        self.write(f"infiniband/mlx5_0/ports/{number}/state", state)
        self.write(f"infiniband/mlx5_0/ports/{number}/link_layer", link_layer)
        return self

    def write(self, name: str, text: str) -> None:
        """Set one file of the card."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def look(self) -> list[tuple[HealthState, str]]:
        """Give state and reason of all that the driver sees now."""
        return [(observation.state, observation.reason) for observation in self.observations()]

    def observations(self) -> list[Observation]:
        """Give all that the driver sees now."""
        return list(self.driver.observe(self.tree, [NIC])[NIC.name])


@pytest.fixture
def card(tmp_path: Path) -> Card:
    """A card without interface or port."""
    return Card(tmp_path)


def test_observe_finds_nothing_when_the_link_is_up(card: Card) -> None:
    """A healthy card has no observation."""
    assert card.interface().port("4: ACTIVE", "Ethernet").look() == []


def test_observe_is_unhealthy_when_the_carrier_is_lost(card: Card) -> None:
    """A card that reaches nobody is not handed out; the evidence names the file."""
    card.interface(carrier="0", operstate="down", speed="-1")

    (observation,) = card.observations()

    assert (observation.dimension, observation.state, observation.reason) == (
        Dimension.LINK,
        HealthState.UNHEALTHY,
        "carrier-lost",
    )
    assert observation.evidence["path"].endswith("net/eth0/carrier")


def test_observe_is_degraded_when_one_of_two_interfaces_lost_its_carrier(card: Card) -> None:
    """A function with two interfaces still reaches somebody over the other."""
    assert card.interface("eth0").interface("eth1", carrier="0").look() == [(HealthState.DEGRADED, "carrier-lost")]


def test_observe_finds_nothing_when_the_interface_is_switched_off(card: Card) -> None:
    """The kernel tells no carrier of an interface that is off, and an idle card is no sick card."""
    card.interface(flags="0x1002", speed="-1", operstate="down")
    (card.folder / "net/eth0/carrier").unlink()

    assert card.look() == []


def test_observe_finds_nothing_when_the_interface_moved_into_a_pod(card: Card) -> None:
    """Neither the missing interface nor the RoCE port that follows it out of sight is a fault."""
    assert card.port("1: DOWN", "Ethernet").look() == []


def test_observe_is_unhealthy_when_the_infiniband_port_is_down(card: Card) -> None:
    """An InfiniBand port has a state of its own, interface or not."""
    assert card.port("1: DOWN", "InfiniBand").look() == [(HealthState.UNHEALTHY, "rdma-port-down")]


def test_observe_is_unhealthy_when_the_roce_port_is_down_below_an_interface_that_is_up(card: Card) -> None:
    """The interface works and RDMA does not: whoever asked for RDMA must not get this card."""
    assert card.interface().port("1: DOWN", "Ethernet").look() == [(HealthState.UNHEALTHY, "rdma-port-down")]


def test_observe_is_degraded_when_one_of_two_ports_is_down(card: Card) -> None:
    """One port of two is less than it should be, and works."""
    assert card.port("4: ACTIVE", "InfiniBand", 1).port("1: DOWN", "InfiniBand", 2).look() == [
        (HealthState.DEGRADED, "rdma-port-down")
    ]


def test_observe_is_degraded_when_the_link_runs_slower_than_before(card: Card) -> None:
    """A link that renegotiated downwards is told, until it is back."""
    card.interface().look()
    slower = card.interface(speed="25000").look()
    back = card.interface().look()

    assert (slower, back) == ([(HealthState.DEGRADED, "speed-dropped")], [])


def test_observe_is_degraded_when_the_link_is_half_duplex(card: Card) -> None:
    """Half duplex means that the partner does not negotiate."""
    assert card.interface(duplex="half").look() == [(HealthState.DEGRADED, "half-duplex")]


def test_observe_is_unhealthy_when_the_card_fell_off_the_bus(tmp_path: Path, card: Card) -> None:
    """A missing function is one observation, not a list of missing files."""
    card.interface().look()
    card.folder.rename(tmp_path / "gone")

    assert card.look() == [(HealthState.UNHEALTHY, "fell-off-bus")]


def test_observe_is_degraded_when_the_pcie_link_is_narrow(card: Card) -> None:
    """The bus side of the card is watched too."""
    card.interface()
    card.write("max_link_width", "16")
    card.write("current_link_width", "4")

    assert card.look() == [(HealthState.DEGRADED, "link-narrow")]


def test_observe_is_unhealthy_when_no_kernel_driver_is_bound(card: Card) -> None:
    """A card that nobody drives has neither interface nor RDMA device: whoever gets it gets
    nothing.
    """
    (card.folder / "driver").unlink()

    assert card.look() == [(HealthState.UNHEALTHY, "no-kernel-driver")]


def test_observe_is_unknown_when_a_file_cannot_be_read(card: Card) -> None:
    """What cannot be read is neither healthy nor sick, and the file is named."""
    card.interface(carrier="banana")

    (observation,) = card.observations()

    assert (observation.state, observation.reason) == (HealthState.UNKNOWN, "tree-unreadable")
    assert observation.evidence["value"] == "banana"
