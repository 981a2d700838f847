"""The NIC driver on trees recorded from real computers (hwloc's test data)."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.idset import NodeSet

DATA = Path(__file__).parents[2] / "data" / "machines"
# Thousands of counters that say nothing of what a card is.
NOISE = re.compile(
    r"/(statistics|counters|cm_\w+|diag_counters|linkcontrol|pkeys|gids|power|cpufreq|cpuidle|thermal_throttle|queues)(/|$)"
)


def discover(name: str, into: Path) -> tuple[Tree, PciNetdevDriver, tuple[Device, ...]]:
    """Unpack a recording and look at it."""
    with tarfile.open(DATA / f"{name}.tar.bz2") as archive:
        archive.extractall(
            into, (member for member in archive if not NOISE.search(member.name)), filter="tar", numeric_owner=True
        )
    (root,) = into.iterdir()
    tree = Tree(HardwareSettings(root=str(root)))
    driver = PciNetdevDriver()
    return tree, driver, tuple(driver.discover(tree, read_machine(tree, "n")).devices)


def test_discover_finds_four_ports_and_an_infiniband_card_when_the_machine_is_a_dell_server(tmp_path: Path) -> None:
    """Broadcom ports whose node the BIOS hides, and a QLogic InfiniBand card beside node 2.

    Idle ports are no faults.
    """
    tree, driver, devices = discover("40intel64-2g2n4c+pcilocality", tmp_path)

    assert [
        (device.name, device.vendor, device.attributes["interface"], device.attributes["rdma"], device.numa_nodes)
        for device in devices
    ] == [
        ("nic-0000-02-00-0", "Broadcom", "eth0", False, None),
        ("nic-0000-02-00-1", "Broadcom", "eth1", False, None),
        ("nic-0000-03-00-0", "Broadcom", "eth2", False, None),
        ("nic-0000-03-00-1", "Broadcom", "eth3", False, None),
        ("nic-0000-43-00-0", "QLogic", "ib0", True, NodeSet(2)),
    ]
    assert (devices[-1].attributes["rdmaDevice"], devices[-1].attributes["linkLayer"]) == ("qib0", "InfiniBand")
    assert [name for name, seen in driver.observe(tree, devices).items() if seen] == []


def test_discover_finds_the_virtio_card_when_the_machine_is_a_virtual_one(tmp_path: Path) -> None:
    """A virtio card's interface, one folder further down, is its own."""
    _, _, devices = discover("2pa-pcidomain32bits", tmp_path)

    assert [(device.name, device.model, device.attributes["interface"]) for device in devices] == [
        ("nic-0000-00-03-0", "Virtio network device", "ens3")
    ]
