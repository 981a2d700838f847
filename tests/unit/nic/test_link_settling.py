"""When a missing carrier is a loss: not while a link comes up, and at once when it had its time."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.net_trees import add_interface
from support.sriov_bench import COUNT, SriovBench
from support.sriov_kernel import PHYSICAL
from support.sysfs_trees import write
from topobus.nic.config import InterfaceRule, InterfaceSettings
from topobus.nic.plugins.linux_netdev import LinuxNetdevDriver, device_name
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.pci import PciAddress

ADDRESS = PciAddress.parse("0000:3b:00.0")
NIC = Device(name="nic-0000-3b-00-0", device_class="nic", driver="pci-netdev", pci=ADDRESS)
FOLDER = f"sys/bus/pci/devices/{ADDRESS}"


class Clock:
    """A time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.now_s


class Card:
    """One card, looked at each time that a test says so."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = Clock()
        self.driver = PciNetdevDriver(self.clock)
        (root / FOLDER).mkdir(parents=True)
        (root / FOLDER / "driver").symlink_to("../../drivers/igb")

    def interface(self, *, carrier: int | None) -> None:
        """Switch the interface on, with or without a carrier; None: off, as the kernel shows it."""
        file = self.root / FOLDER / "net/ens1/carrier"
        write(self.root, {f"{FOLDER}/net/ens1/flags": "0x1002" if carrier is None else "0x1003"})
        if carrier is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(f"{carrier}\n")

    def port(self, state: str) -> None:
        """Set an InfiniBand port's state."""
        write(
            self.root,
            {
                f"{FOLDER}/infiniband/mlx5_0/ports/1/{file}": text
                for file, text in {"state": state, "link_layer": "InfiniBand"}.items()
            },
        )

    def look(self, after_s: float = 1.0) -> list[str]:
        """Look after a while; the reasons of what is wrong."""
        self.clock.now_s += after_s
        seen = self.driver.observe(Tree(HardwareSettings(root=str(self.root))), [NIC])
        return [observation.reason for observation in seen[NIC.name]]


@pytest.fixture
def card(tmp_path: Path) -> Card:
    """A card whose interface is off, that was looked at."""
    made = Card(tmp_path)
    made.interface(carrier=None)
    assert made.look() == []
    return made


def test_observe_finds_nothing_when_a_link_comes_up(card: Card) -> None:
    """Copper is without a carrier for some seconds after it was switched on, and may lose it once
    more while it trains.
    """
    card.interface(carrier=0)
    training = [card.look() for _ in range(3)]
    card.interface(carrier=1)
    up = card.look()
    card.interface(carrier=0)
    again = card.look()
    card.interface(carrier=1)

    assert (training, up, again, card.look(after_s=60)) == ([[]] * 3, [], [], [])


def test_observe_tells_a_link_that_does_not_come_up_when_it_had_its_time(card: Card) -> None:
    """No cable is there: 15 s after it was switched on it is told."""
    card.interface(carrier=0)
    seen = [card.look(after_s=5) for _ in range(4)]

    assert seen == [[], [], [], ["carrier-lost"]]


def test_observe_tells_a_pulled_cable_at_once_when_the_link_had_been_up(card: Card) -> None:
    """Who uses the card hears of it at the next look."""
    card.interface(carrier=1)
    card.look()
    card.look(after_s=60)

    card.interface(carrier=0)

    assert card.look() == ["carrier-lost"]


def test_observe_tells_a_dead_cable_at_once_when_it_is_the_first_look(tmp_path: Path) -> None:
    """A service that starts does not take a device for well that was sick before."""
    card = Card(tmp_path)
    card.interface(carrier=0)

    assert card.look() == ["carrier-lost"]


def test_observe_gives_a_link_its_time_when_the_interface_comes_back_from_a_pod(card: Card) -> None:
    """Moving it closed it; switched on again it begins anew."""
    card.interface(carrier=1)
    card.look(after_s=60)
    shutil.rmtree(card.root / FOLDER / "net")
    card.look(after_s=60)

    card.interface(carrier=0)

    assert card.look() == []


def test_observe_gives_an_rdma_port_its_time_when_the_card_has_come(card: Card) -> None:
    """An InfiniBand port is not active until the subnet manager has seen it."""
    card.port("2: INIT")
    coming = card.look()
    late = card.look(after_s=30)

    assert (coming, late) == ([], ["rdma-port-down"])


def test_observe_finds_nothing_when_somebody_changes_the_number_of_virtual_functions(card: Card) -> None:
    """The driver takes the physical function's link down for it."""
    write(card.root, {f"{FOLDER}/sriov_numvfs": 0})
    card.interface(carrier=1)
    card.look()
    card.look(after_s=60)

    write(card.root, {f"{FOLDER}/sriov_numvfs": 4})
    card.interface(carrier=0)
    down = card.look()
    card.interface(carrier=1)

    assert (down, card.look(after_s=60)) == ([], [])


def test_card_and_its_functions_are_well_when_a_claim_has_the_card_cut(tmp_path: Path) -> None:
    """Our own write is no fault of the card, nor of the functions that are just being given."""
    clock, seen = Clock(), list[dict[str, Sequence[object]]]()

    def look(bench: SriovBench) -> None:
        clock.now_s += 1
        devices = list(bench.driver.discover(Tree(bench.tree.settings), bench.kernel.machine).devices)
        seen.append(dict(bench.driver.observe(Tree(bench.tree.settings), devices)))

    with SriovBench(tmp_path, lambda: PciNetdevDriver(clock)) as bench:
        write(
            bench.root,
            {
                f"sys/bus/pci/devices/{PHYSICAL}/net/ens1/{file}": text
                for file, text in (("flags", "0x1003"), ("carrier", 1))
            },
        )
        look(bench)
        clock.now_s += 60

        def write_and_look(path: Path, text: str) -> None:
            path.write_text(f"{text}\n", encoding="ascii")
            bench.writes.settle()
            look(bench)

        bench.driver.on_demand_functions.cuts.write = write_and_look
        bench.get("a", f"nic-0000-3b-02-{COUNT - 1}")
        (bench.root / f"sys/bus/pci/devices/{PHYSICAL}/net/ens1/carrier").write_text("0\n")
        look(bench)

    assert [[name for name, signs in each.items() if signs] for each in seen] == [[], [], []]
    assert len(seen[2]) == 1 + COUNT


def test_observe_gives_an_interface_without_hardware_its_time(tmp_path: Path) -> None:
    """A bridge's port or a veth has no carrier until its other end is on."""
    clock = Clock()
    folder = add_interface(tmp_path, "tenant-0", 4, flags="0x1002")
    (folder / "carrier").unlink()
    driver = LinuxNetdevDriver(InterfaceSettings(offer=(InterfaceRule(name="tenant-0"),)), now=clock)
    device = Device(
        name=device_name("tenant-0"), device_class="nic", driver=driver.name, attributes={"interface": "tenant-0"}
    )
    tree = Tree(HardwareSettings(root=str(tmp_path)))
    driver.observe(tree, [device])

    (folder / "flags").write_text("0x1003")
    (folder / "carrier").write_text("0")
    coming = driver.observe(tree, [device])[device.name]
    clock.now_s += 60
    late = driver.observe(tree, [device])[device.name]

    assert ([sign.reason for sign in coming], [sign.reason for sign in late]) == ([], ["carrier-lost"])
