"""DFL cards: identity, health, and what a container gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from topobus.devicekit.driver import PrepareContext
from topobus.fpga.plugins.intel_dfl import IntelDflDriver
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.health import HealthState, Observation
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Machine, NumaNode, PciDevice
from topobus.values.outcome import Refusal
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind

ADDRESS = PciAddress.parse("0000:5e:00.0")
FUNCTION = PciDevice(
    address=ADDRESS, vendor=0x8086, device=0x0B30, class_code=0x120000, numa_node=1, root="pci0000:5d", driver="dfl-pci"
)
CARD = f"sys/devices/pci0000:5d/{ADDRESS}"
REGION = f"{CARD}/fpga_region/region0"
ENGINE = f"{REGION}/dfl-fme.0"
PORT = f"{REGION}/dfl-port.0"
FILES = {
    f"{ENGINE}/bitstream_id": "0x23000410010310",
    f"{ENGINE}/errors/catfatal_errors": "0x0",
    f"{ENGINE}/errors/nonfatal_errors": "0x0",
    f"{ENGINE}/errors/pcie0_errors": "0x0",
    f"{ENGINE}/hwmon/hwmon4/temp1_crit_alarm": "0",
    f"{ENGINE}/hwmon/hwmon4/temp1_max_alarm": "0",
    f"{ENGINE}/dfl-fme-region.3/fpga_region/region1/compat_id": "9926ab6d6c925a68aabca7d84c545738",
    f"{PORT}/afu_id": "9aeffe5f84570612c000c9660d824272",
    f"{PORT}/errors/errors": "0x0",
    f"{PORT}/power_state": "0x0",
}
CONTEXT = PrepareContext(owner=Owner(kind=OwnerKind.CLAIM, name="c", uid="u"))


class Node:
    """A small tree with one card, and the driver that watches it."""

    def __init__(self, root: Path, region: str = REGION) -> None:
        self.root = root
        for name, text in FILES.items():
            self.write(name.replace(REGION, region), text)
        for link, target in (("sys/class/fpga_region/region0", region), (f"sys/bus/pci/devices/{ADDRESS}", CARD)):
            (root / link).parent.mkdir(parents=True, exist_ok=True)
            (root / link).symlink_to(os.path.relpath(root / target, (root / link).parent))
        self.tree = Tree(HardwareSettings(root=str(root)))
        self.driver = IntelDflDriver()

    def write(self, name: str, text: str) -> None:
        """Set a file."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def discover(self) -> tuple[Device, ...]:
        """Find the cards."""
        node = NumaNode(id=1, cpus=CpuSet(0), memory_bytes=1)
        self.discovery = self.driver.discover(
            self.tree, Machine(node="n", numa_nodes=(node,), cpus=(), pci_devices=(FUNCTION,))
        )
        return tuple(self.discovery.devices)

    def look(self, devices: tuple[Device, ...]) -> list[Observation]:
        """Give all that the driver sees of the only card."""
        return list(self.driver.observe(self.tree, devices)[devices[0].name])


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node with a healthy PAC N3000."""
    return Node(tmp_path)


def test_discover_describes_the_card_when_a_function_is_loaded(node: Node) -> None:
    """Place comes from PCI, ids from the card."""
    (card,) = node.discover()

    assert (card.name, card.model, card.numa_nodes, card.pcie_root) == (
        "fpga-0000-5e-00-0",
        "PAC N3000",
        NodeSet(1),
        "pci0000:5d",
    )
    wanted = {
        "afuId": "9aeffe5f84570612c000c9660d824272",
        "interfaceId": "9926ab6d6c925a68aabca7d84c545738",
        "bitstreamId": "0x23000410010310",
        "region": "region0",
        "ports": 1,
    }
    assert {key: card.attributes[key] for key in wanted} == wanted


def test_discover_names_the_card_by_its_region_when_it_is_on_no_pci_bus(tmp_path: Path) -> None:
    """An FPGA of a system on chip has no address and no opinion on NUMA."""
    (card,) = Node(tmp_path, "sys/devices/platform/soc/fpga_region/region0").discover()

    assert (card.name, card.pci, card.numa_nodes) == ("fpga-region0", None, None)


def test_discover_leaves_an_unreadable_card_out_and_says_so(node: Node) -> None:
    """What cannot be read is told in the inventory's warnings."""
    node.write(f"{ENGINE}/errors/pcie0_errors", "oops")

    assert node.discover() == ()
    assert "pcie0_errors" in node.discovery.warnings[0]


def test_observe_finds_nothing_when_all_registers_are_zero(node: Node) -> None:
    """A healthy card has no observation."""
    assert node.look(node.discover()) == []


@pytest.mark.parametrize(
    ("file", "text", "state", "reason"),
    [
        (f"{PORT}/afu_id", "f" * 32, HealthState.UNHEALTHY, "function-crashed"),
        (f"{PORT}/errors/errors", "0x4", HealthState.UNHEALTHY, "port-error"),
        (f"{ENGINE}/errors/catfatal_errors", "0x10", HealthState.UNHEALTHY, "engine-fatal-error"),
        (f"{ENGINE}/errors/nonfatal_errors", "0x10", HealthState.DEGRADED, "engine-error"),
        (f"{ENGINE}/errors/pcie0_errors", "0x1", HealthState.DEGRADED, "engine-error"),
        (f"{ENGINE}/hwmon/hwmon4/temp1_crit_alarm", "1", HealthState.UNHEALTHY, "too-hot"),
        (f"{ENGINE}/hwmon/hwmon4/temp1_max_alarm", "1", HealthState.DEGRADED, "too-hot"),
        (f"{PORT}/power_state", "0x1", HealthState.DEGRADED, "power-throttled"),
        (f"{PORT}/power_state", "0x6", HealthState.UNHEALTHY, "power-stopped"),
    ],
    ids=["crashed", "port", "fatal", "nonfatal", "pcie", "critical", "warm", "throttled", "stopped"],
)
def test_observe_tells_the_fault_and_its_file_when_a_register_says_so(
    node: Node, file: str, text: str, state: HealthState, reason: str
) -> None:
    """Each register has one meaning, and the evidence names it."""
    devices = node.discover()
    node.write(file, text)

    (observation,) = node.look(devices)

    assert (observation.state, observation.reason, observation.evidence["path"]) == (state, reason, file)


def test_observe_is_unknown_when_a_register_cannot_be_read(node: Node) -> None:
    """A garbled register is neither health nor sickness."""
    devices = node.discover()
    node.write(f"{PORT}/errors/errors", "oops")

    assert [(observation.state, observation.reason) for observation in node.look(devices)] == [
        (HealthState.UNKNOWN, "tree-unreadable")
    ]


def test_observe_is_unhealthy_when_the_card_left_the_bus(node: Node) -> None:
    """A missing function is told as such, not as a missing file."""
    devices = node.discover()
    (node.root / f"sys/bus/pci/devices/{ADDRESS}").unlink()

    assert [observation.reason for observation in node.look(devices)] == ["fell-off-bus"]


def test_prepare_gives_the_port_alone_when_the_card_has_an_engine(node: Node) -> None:
    """A container gets the port that it computes through, and never the engine that re-flashes the
    card for everybody.
    """
    devices = node.discover()

    edits = node.driver.prepare(node.tree, devices, CONTEXT)

    assert not isinstance(edits, Refusal)
    assert [device_node.path for device_node in edits[devices[0].name].device_nodes] == ["/dev/dfl-port.0"]
    assert edits[devices[0].name].env == {"TOPOBUS_FPGA_0000_5E_00_0": "0000:5e:00.0"}


def test_discover_leaves_the_card_out_when_its_ports_are_virtual_functions(node: Node) -> None:
    """A physical function whose ports went to virtual functions is not offered beside them.

    A claim that still names it is refused.
    """
    devices = node.discover()
    node.write(f"{CARD}/sriov_numvfs", "2")

    refusal = node.driver.prepare(node.tree, devices, CONTEXT)

    assert node.discover() == ()
    assert node.discovery.warnings == (
        f"{ADDRESS} is not offered: it has 2 virtual functions on, which are offered instead",
    )
    assert isinstance(refusal, Refusal)
    assert [reason.code for reason in refusal.reasons] == ["device-not-offered"]


PORTS = {
    f"{ENGINE}/ports_num": "2",
    f"{ENGINE}/dfl-fme-region.10/fpga_region/region2/compat_id": "1111ab6d6c925a68aabca7d84c545738",
    f"{PORT}/id": "0",
    f"{REGION}/dfl-port.5/id": "1",
    f"{REGION}/dfl-port.5/afu_id": "00001f5784570612c000c9660d824272",
    f"{REGION}/dfl-port.5/errors/errors": "0x0",
}


@pytest.fixture
def double(node: Node) -> Node:
    """A card with two ports, each with a region of its own."""
    for file, text in PORTS.items():
        node.write(file, text)
    return node


def test_discover_gives_each_port_when_a_card_has_several(double: Node) -> None:
    """Each port is a device with its own function and its own region's interface id, and names the
    card as its parent, which is not offered.
    """
    devices = double.discover()

    assert [(device.name, device.attributes["interfaceId"], device.attributes["afuId"]) for device in devices] == [
        ("fpga-0000-5e-00-0-port-0", "9926ab6d6c925a68aabca7d84c545738", "9aeffe5f84570612c000c9660d824272"),
        ("fpga-0000-5e-00-0-port-1", "1111ab6d6c925a68aabca7d84c545738", "00001f5784570612c000c9660d824272"),
    ]
    assert {(device.parent, device.partition_of, str(device.pci)) for device in devices} == {
        ("fpga-0000-5e-00-0", "fpga-0000-5e-00-0", "0000:5e:00.0")
    }


def test_prepare_gives_each_port_its_own_node_when_a_card_has_several(double: Node) -> None:
    """A claim for one port gets that port, and neither the other nor the engine."""
    devices = double.discover()

    edits = double.driver.prepare(double.tree, devices, CONTEXT)

    assert not isinstance(edits, Refusal)
    assert {name: [each.path for each in edit.device_nodes] for name, edit in edits.items()} == {
        "fpga-0000-5e-00-0-port-0": ["/dev/dfl-port.0"],
        "fpga-0000-5e-00-0-port-1": ["/dev/dfl-port.5"],
    }


def test_prepare_refuses_a_port_when_it_went_to_a_virtual_function(double: Node) -> None:
    """A port that was released is gone from the card.

    The one that stays keeps its name and is given.
    """
    devices = double.discover()
    for file in (double.root / f"{REGION}/dfl-port.5/errors", double.root / f"{REGION}/dfl-port.5"):
        for path in [path for path in file.iterdir() if path.is_file()]:
            path.unlink()
        file.rmdir()

    refusal = double.driver.prepare(Tree(HardwareSettings(root=str(double.root))), devices, CONTEXT)

    assert [device.name for device in double.discover()] == ["fpga-0000-5e-00-0-port-0"]
    assert isinstance(refusal, Refusal)
    assert [(reason.code, reason.facts["devices"]) for reason in refusal.reasons] == [
        ("device-not-offered", ("fpga-0000-5e-00-0-port-1",))
    ]


def test_observe_blames_one_port_when_its_function_fails(double: Node) -> None:
    """The neighbour computes on.

    What the engine says is told of both, and a risen error counter as well.
    """
    counter = f"sys/bus/pci/devices/{ADDRESS}/aer_dev_fatal"
    double.write(counter, "TOTAL_ERR_FATAL 0")
    devices = double.discover()
    double.driver.observe(double.tree, devices)
    double.write(f"{REGION}/dfl-port.5/errors/errors", "0x4")
    double.write(f"{ENGINE}/errors/nonfatal_errors", "0x1")
    double.write(counter, "TOTAL_ERR_FATAL 1")

    seen = double.driver.observe(double.tree, devices)

    assert {name: [observation.reason for observation in observations] for name, observations in seen.items()} == {
        "fpga-0000-5e-00-0-port-0": ["aer-fatal", "engine-error"],
        "fpga-0000-5e-00-0-port-1": ["aer-fatal", "engine-error", "port-error"],
    }


def test_discover_leaves_a_card_out_when_it_has_an_engine_alone(node: Node) -> None:
    """Without a port nothing is left for a container: the engine is management, and nobody's."""
    (node.root / f"{PORT}/errors/errors").unlink()
    (node.root / f"{PORT}/errors").rmdir()
    for name in ("afu_id", "power_state"):
        (node.root / PORT / name).unlink()
    (node.root / PORT).rmdir()

    assert node.discover() == ()
    assert node.discovery.warnings == (
        "0000:5e:00.0 is not offered: it has no port, and its management engine is given to no container",
    )
