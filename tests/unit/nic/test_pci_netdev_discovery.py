"""Which network functions the driver offers, and how it describes them."""

from __future__ import annotations

from pathlib import Path

from topobus.devicekit.driver import Discovery
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Machine, NumaNode, PciDevice
from topobus.values.pci import PciAddress

FIRST = PciAddress.parse("0000:3b:00.0")
SECOND = PciAddress.parse("0000:3b:00.1")
ROUTE = (
    "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\neth0\t00000000\t0101A8C0\t0003\t0\t0\t0\t00000000\n"
)


def nic(address: PciAddress = FIRST, **facts: object) -> PciDevice:
    """Make a network function of the machine."""
    return PciDevice(
        **{"address": address, "vendor": 0x15B3, "device": 0x1021, "class_code": 0x020000, "numa_node": 0, **facts}
    )


def discover(root: Path, functions: list[PciDevice], files: dict[str, str]) -> tuple[Device, ...]:
    """Give what the driver finds."""
    return tuple(look(root, functions, files).devices)


def look(root: Path, functions: list[PciDevice], files: dict[str, str]) -> Discovery:
    """Write a tree with the functions' folders and look at it."""
    for function in functions:
        (root / f"sys/bus/pci/devices/{function.address}").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = root / name.replace("FIRST", f"sys/bus/pci/devices/{FIRST}").replace(
            "SECOND", f"sys/bus/pci/devices/{SECOND}"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    machine = Machine(
        node="n", numa_nodes=(NumaNode(id=0, cpus=CpuSet(0), memory_bytes=1),), cpus=(), pci_devices=tuple(functions)
    )
    return PciNetdevDriver().discover(Tree(HardwareSettings(root=str(root))), machine)


def test_discover_describes_a_card_when_it_has_interface_and_rdma(tmp_path: Path) -> None:
    """Name, place and attributes are those that claims select by."""
    files = {
        "FIRST/net/eth0/address": "02:00:00:00:00:01",
        "FIRST/net/eth0/speed": "400000",
        "FIRST/net/eth0/carrier": "1",
        "FIRST/sriov_totalvfs": "16",
        "FIRST/sriov_numvfs": "0",
        "FIRST/infiniband/mlx5_0/ports/1/link_layer": "Ethernet",
    }

    (device,) = discover(tmp_path, [nic(driver="mlx5_core")], files)

    assert (device.name, device.device_class, device.driver) == ("nic-0000-3b-00-0", "nic", "pci-netdev")
    assert (device.vendor, device.model, device.numa_nodes) == ("Mellanox", "ConnectX-7", NodeSet(0))
    wanted = {
        "interface": "eth0",
        "mac": "02:00:00:00:00:01",
        "linkSpeed": 400000,
        "rdma": True,
        "rdmaDevice": "mlx5_0",
        "linkLayer": "Ethernet",
        "sriovVf": False,
        "totalVfs": 16,
        "kernelDriver": "mlx5_core",
    }
    assert {key: device.attributes.get(key) for key in wanted} == wanted


def test_discover_names_the_physical_function_as_parent_when_it_is_a_virtual_one(tmp_path: Path) -> None:
    """A virtual function knows whose part it is, and its physical function is not offered beside it
    but told of.
    """
    functions = [nic(), nic(SECOND, device=0x101E, physfn=FIRST)]

    discovery = look(tmp_path, functions, {"FIRST/sriov_totalvfs": "16", "FIRST/sriov_numvfs": "1"})
    devices = discovery.devices

    assert [(device.name, device.parent, device.attributes["sriovVf"]) for device in devices] == [
        ("nic-0000-3b-00-1", "nic-0000-3b-00-0", True)
    ]
    assert [text.split(" ")[0] for text in discovery.warnings] == [str(FIRST)]


def test_discover_leaves_the_card_out_when_the_default_route_goes_over_it(tmp_path: Path) -> None:
    """Nobody is handed the card that the node itself needs; its neighbour is offered."""
    files = {"FIRST/net/eth0/mtu": "1500", "SECOND/net/eth1/mtu": "1500", "proc/net/route": ROUTE}

    discovery = look(tmp_path, [nic(), nic(SECOND)], files)
    devices = discovery.devices

    assert [device.name for device in devices] == ["nic-0000-3b-00-1"]
    assert "default route" in discovery.warnings[0]


def test_discover_leaves_the_card_out_when_the_default_route_goes_over_a_bond_of_it(tmp_path: Path) -> None:
    """A card below the bond that carries the route is the node's own as well."""
    files = {
        "FIRST/net/eth0/mtu": "1500",
        "proc/net/route": ROUTE.replace("eth0", "bond0"),
        "sys/class/net/bond0/lower_eth0/mtu": "1500",
    }

    assert discover(tmp_path, [nic()], files) == ()


def test_discover_takes_a_function_of_another_class_when_it_has_an_rdma_device(tmp_path: Path) -> None:
    """An InfiniBand card of the old class (0x0c06) is a NIC; a disk is none."""
    functions = [nic(class_code=0x0C0600), nic(SECOND, class_code=0x010802)]

    devices = discover(tmp_path, functions, {"FIRST/infiniband/qib0/ports/1/state": "4: ACTIVE"})

    assert [(device.name, device.attributes["rdma"]) for device in devices] == [("nic-0000-3b-00-0", True)]


def test_discover_keeps_the_card_when_its_interface_is_in_another_namespace(tmp_path: Path) -> None:
    """A card whose interface was moved into a pod stays in the inventory, without the interface's
    facts.
    """
    (device,) = discover(tmp_path, [nic()], {"FIRST/vendor": "0x15b3"})

    assert "interface" not in device.attributes


def test_discover_has_no_numa_node_when_the_kernel_does_not_tell(tmp_path: Path) -> None:
    """Unknown is no opinion, never node 0."""
    (device,) = discover(tmp_path, [nic(numa_node=None)], {})

    assert device.numa_nodes is None


def test_discover_keeps_the_neighbours_when_one_card_cannot_be_read(tmp_path: Path) -> None:
    """A card with a garbled file is still listed, and so is the card beside it, in full."""
    files = {"FIRST/sriov_totalvfs": "many", "SECOND/net/eth1/address": "02:00:00:00:00:02"}

    devices = discover(tmp_path, [nic(), nic(SECOND)], files)

    assert [device.name for device in devices] == ["nic-0000-3b-00-0", "nic-0000-3b-00-1"]
    assert devices[1].attributes["mac"] == "02:00:00:00:00:02"


def test_discover_names_the_maker_by_number_when_it_is_not_known(tmp_path: Path) -> None:
    """A card that no table knows is offered all the same."""
    (device,) = discover(tmp_path, [nic(vendor=0xABCD, device=1)], {})

    assert (device.vendor, device.model) == ("0xabcd", "")


def test_discover_is_empty_when_the_machine_has_no_network_function(tmp_path: Path) -> None:
    """No card is an ordinary answer."""
    assert discover(tmp_path, [nic(class_code=0x030000)], {}) == ()
