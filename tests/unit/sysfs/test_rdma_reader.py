"""RDMA devices, their ports and nodes, read from small trees and a recorded machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from topobus.simulation.machines import build
from topobus.sysfs.rdma import function_rdma_devices, function_rdma_ports
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.pci import PciAddress

ADDRESS = PciAddress.parse("0000:43:00.0")
FOLDER = f"sys/bus/pci/devices/{ADDRESS}"


def make_tree(root: Path, files: dict[str, str]) -> Tree:
    """Write files below the function's folder and open the tree."""
    for name, text in files.items():
        path = root / FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Tree(HardwareSettings(root=str(root)))


@pytest.mark.parametrize(
    ("state", "is_active"),
    [("4: ACTIVE", True), ("1: DOWN", False), ("2: INIT", False), ("3: ARMED", False)],
    ids=lambda value: str(value),
)
def test_rdma_port_is_active_only_when_the_kernel_says_so(tmp_path: Path, state: str, is_active: bool) -> None:
    """A port without a subnet manager (INIT, ARMED) carries no traffic either."""
    tree = make_tree(
        tmp_path, {"infiniband/qib0/ports/1/state": state, "infiniband/qib0/ports/1/link_layer": "InfiniBand"}
    )

    (device,) = function_rdma_devices(tree, ADDRESS)

    assert device.ports[0].is_active is is_active


def test_function_rdma_ports_are_those_of_the_devices_when_read_alone(tmp_path: Path) -> None:
    """A look each second reads no nodes, and of an active port no physical state.

    Of one that is down it says the same as the whole device.
    """
    port = {"link_layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)"}
    up = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", **port}
    down = {"state": "1: DOWN", "phys_state": "3: Disabled", **port}
    files = {
        f"infiniband/mlx5_0/ports/{number}/{name}": text
        for number, files in ((1, up), (2, down))
        for name, text in files.items()
    }
    tree = make_tree(tmp_path, files)

    ((first, second),) = (device.ports for device in function_rdma_devices(tree, ADDRESS))

    assert function_rdma_ports(tree, ADDRESS) == (structs.replace(first, physical_state=""), second)


@pytest.mark.parametrize(
    ("text", "gbps"), [("400 Gb/sec (4X NDR)", 400.0), ("2.5 Gb/sec (1X SDR)", 2.5), ("unknown", None)]
)
def test_function_rdma_devices_reads_the_rate_when_it_has_lanes_behind_it(
    tmp_path: Path, text: str, gbps: float | None
) -> None:
    """The rate is a number of Gbit/s, or open."""
    tree = make_tree(tmp_path, {"infiniband/mlx5_0/ports/1/rate": text})

    assert function_rdma_devices(tree, ADDRESS)[0].ports[0].rate_gbps == gbps


def test_function_rdma_devices_gives_each_device_its_own_nodes_when_a_function_has_two(tmp_path: Path) -> None:
    """Nodes belong to the device that `ibdev` names: a container never gets its neighbour's."""
    tree = make_tree(
        tmp_path,
        {
            "infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
            "infiniband/mlx5_1/ports/1/state": "4: ACTIVE",
            "infiniband_verbs/uverbs0/ibdev": "mlx5_0",
            "infiniband_verbs/uverbs1/ibdev": "mlx5_1",
            "infiniband_mad/umad1/ibdev": "mlx5_1",
            "infiniband_mad/issm1/ibdev": "mlx5_1",
        },
    )

    nodes = {
        function_rdma_device.name: function_rdma_device.nodes
        for function_rdma_device in function_rdma_devices(tree, ADDRESS)
    }

    assert nodes == {
        "mlx5_0": ("infiniband/uverbs0",),
        "mlx5_1": ("infiniband/uverbs1", "infiniband/issm1", "infiniband/umad1"),
    }


def test_function_rdma_devices_is_empty_when_the_function_has_none(tmp_path: Path) -> None:
    """A plain NIC has no RDMA device."""
    assert function_rdma_devices(make_tree(tmp_path, {"vendor": "0x8086"}), ADDRESS) == ()


def test_function_rdma_devices_finds_all_when_the_machine_is_recorded(tmp_path: Path) -> None:
    """The recorded demo machine has eight RDMA devices at eight functions, each with one verbs
    node.
    """
    tree = Tree(HardwareSettings(root=str(build("dgx", tmp_path / "dgx").root)))

    rdma_devices = [
        function_rdma_device
        for name in tree.names("sys/bus/pci/devices")
        for function_rdma_device in function_rdma_devices(tree, PciAddress.parse(name))
    ]

    assert sorted(rdma_device.name for rdma_device in rdma_devices) == [f"mlx5_{number}" for number in range(8)]
    assert len({node for rdma_device in rdma_devices for node in rdma_device.nodes}) == 8
