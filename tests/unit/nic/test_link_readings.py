"""What people graph of network devices: the counters of interfaces and of RDMA ports."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.sysfs_trees import write
from topobus.nic.plugins.link_readings import link_readings
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.simulation.machines import build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.readings import Reading

ETH0, ETH1 = "sys/class/net/eth0", "sys/class/net/eth1"
PORT = "sys/class/infiniband/mlx5_0/ports/1"


def _values(readings: list[Reading]) -> dict[tuple[str, str], float]:
    return {(str(reading.quantity), reading.part): reading.value for reading in readings}


def test_link_readings_are_summed_over_a_device_when_it_has_several_interfaces(tmp_path: Path) -> None:
    """RDMA goes past the interface and is counted in words, so it has bytes of its own."""
    tree = write(
        tmp_path,
        {
            f"{ETH0}/statistics/rx_bytes": 1000,
            f"{ETH1}/statistics/rx_bytes": 24,
            f"{ETH0}/statistics/tx_errors": 3,
            f"{ETH0}/statistics/rx_dropped": 9,
            f"{PORT}/counters/port_rcv_data": 100,
        },
    )

    assert _values(link_readings(tree, [ETH0, ETH1], [PORT])) == {
        ("received_bytes_total", "network"): 1024,
        ("link_errors_total", "sent"): 3,
        ("link_drops_total", "received"): 9,
        ("received_bytes_total", "rdma"): 400,
    }


@pytest.mark.parametrize("text", ["", "no number"])
def test_link_reading_is_absent_when_its_counter_cannot_be_read(tmp_path: Path, text: str) -> None:
    """It is not 0: a rate over it would be wrong twice."""
    tree = write(tmp_path, {f"{ETH0}/statistics/rx_bytes": text, f"{ETH0}/statistics/tx_bytes": 5})

    assert _values(link_readings(tree, [ETH0])) == {("sent_bytes_total", "network"): 5}


def test_interface_has_no_reading_when_it_is_away_in_a_pod(tmp_path: Path) -> None:
    """On the recorded machine each NIC has readings, and none as soon as its interface is gone."""
    recorded = build(Path(__file__).parents[2] / "data" / "profiles" / "h100-pair.toml", tmp_path / "machine")
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    driver = PciNetdevDriver()
    devices = driver.discover(tree, read_machine(tree, "n1")).devices
    (device,) = devices
    folder = f"sys/bus/pci/devices/{device.pci}/net"
    (interface,) = tree.names(folder)
    recorded.write(f"{folder}/{interface}/statistics/rx_bytes", "77")

    before = driver.measure(tree, devices)
    (tree.path(f"{folder}/{interface}")).rename(tmp_path / "away")
    after = driver.measure(Tree(tree.settings), devices)

    assert ("received_bytes_total", "network") in _values(list(before[device.name]))
    assert ("received_bytes_total", "network") not in _values(list(after[device.name]))
