"""Xilinx cards: pairing of functions, health, and what a container gets."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from topobus.devicekit.driver import PrepareContext
from topobus.fpga.plugins.xilinx import XilinxDriver
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.health import HealthState
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine, NumaNode, PciDevice
from topobus.values.outcome import Refusal
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind

MANAGEMENT = PciDevice(
    address=PciAddress.parse("0000:3b:00.0"),
    vendor=0x10EE,
    device=0x505C,
    class_code=0x120000,
    numa_node=0,
    driver="xclmgmt",
)
USER = PciDevice(
    address=PciAddress.parse("0000:3b:00.1"),
    vendor=0x10EE,
    device=0x505D,
    class_code=0x120000,
    numa_node=0,
    driver="xocl",
)
CONTEXT = PrepareContext(owner=Owner(kind=OwnerKind.CLAIM, name="c", uid="u"))
NAME = "fpga-0000-3b-00-0"


def folder(function: PciDevice) -> str:
    """Give a function's folder."""
    return f"sys/bus/pci/devices/{function.address}"


FILES = {
    f"{folder(MANAGEMENT)}/mgmt_pf": "",
    f"{folder(MANAGEMENT)}/instance": "15104",
    f"{folder(MANAGEMENT)}/ready": "0x1",
    f"{folder(USER)}/user_pf": "",
    f"{folder(USER)}/ready": "0x1",
    f"{folder(USER)}/dev_offline": "0",
    f"{folder(USER)}/rom.u.15105/VBNV": "xilinx_u55c_gen3x16_xdma_base_3",
    f"{folder(USER)}/rom.u.15105/timestamp": "0x5e9c1a1b",
    f"{folder(USER)}/xmc.u.15105/serial_num": "XFL1ABCD",
    f"{folder(USER)}/firewall.u.15105/detected_level": "0",
    f"{folder(USER)}/drm/renderD129/dev": "226:129",
}


class Slot:
    """A small tree with one slot, and the driver that watches it."""

    def __init__(
        self, root: Path, functions: tuple[PciDevice, ...] = (MANAGEMENT, USER), files: dict[str, str] | None = None
    ) -> None:
        self.root = root
        self.functions = functions
        for function in functions:
            (root / folder(function)).mkdir(parents=True)
            if function.driver:
                (root / "sys/bus/pci/drivers" / function.driver).mkdir(parents=True, exist_ok=True)
                (root / folder(function) / "driver").symlink_to(f"../../drivers/{function.driver}")
        for name, text in (FILES if files is None else files).items():
            self.write(name, text)
        self.tree = Tree(HardwareSettings(root=str(root)))
        self.driver = XilinxDriver()

    def write(self, name: str, text: str) -> None:
        """Set a file."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def remove(self, function: PciDevice) -> None:
        """Take a function off the bus."""
        (self.root / folder(function)).rename(self.root / str(function.address))

    def discover(self) -> tuple[Device, ...]:
        """Find the cards."""
        node = NumaNode(id=0, cpus=CpuSet(0), memory_bytes=1)
        self.discovery = self.driver.discover(
            self.tree, Machine(node="n", numa_nodes=(node,), cpus=(), pci_devices=self.functions)
        )
        return tuple(self.discovery.devices)

    def look(self, devices: tuple[Device, ...]) -> list[tuple[HealthState, str]]:
        """Give state and reason of all that the driver sees of the only card."""
        return [
            (observation.state, observation.reason) for observation in self.driver.observe(self.tree, devices)[NAME]
        ]


@pytest.fixture
def slot(tmp_path: Path) -> Slot:
    """A healthy Alveo U55C."""
    return Slot(tmp_path)


def test_discover_makes_one_card_of_two_functions_when_they_share_a_slot(slot: Slot) -> None:
    """Management and user function are one device, which computes at
    the user function's address.
    """
    (card,) = slot.discover()

    assert (card.name, str(card.pci), card.model, card.uuid) == (NAME, "0000:3b:00.1", "Alveo U55C", "XFL1ABCD")
    assert (card.attributes["managementPciBusID"], card.attributes["shell"]) == (
        "0000:3b:00.0",
        "xilinx_u55c_gen3x16_xdma_base_3",
    )


def test_discover_pairs_by_device_id_when_no_driver_is_loaded(tmp_path: Path) -> None:
    """Without markers and drivers the ids still tell which function is which."""
    bare = tuple(
        PciDevice(
            address=pci_device.address,
            vendor=pci_device.vendor,
            device=pci_device.device,
            class_code=pci_device.class_code,
        )
        for pci_device in (MANAGEMENT, USER)
    )

    (card,) = Slot(tmp_path, bare, files={}).discover()

    assert (str(card.pci), card.attributes["managementPciBusID"]) == ("0000:3b:00.1", "0000:3b:00.0")


def test_discover_offers_the_user_function_alone_when_in_a_virtual_machine(tmp_path: Path) -> None:
    """A virtual machine sees no management function, and that is a whole card."""
    slot = Slot(tmp_path, (USER,), files={name: text for name, text in FILES.items() if name.startswith(folder(USER))})

    (card,) = slot.discover()

    assert "managementPciBusID" not in card.attributes
    assert slot.look((card,)) == []


@pytest.mark.parametrize(
    ("vendor", "device", "class_code", "is_found"),
    [
        (0x1D0F, 0xF010, 0x058000, True),
        (0x1D0F, 0xEC20, 0x020000, False),
        (0x10EE, 0x7038, 0x070001, True),
        (0x10EE, 0x5084, 0x020000, False),
        (0x8086, 0xBCCE, 0x120000, False),
    ],
    ids=["aws-f1", "aws-network", "own-design", "xilinx-network", "intel-fpga"],
)
def test_discover_takes_fpgas_alone_when_the_maker_makes_other_things(
    tmp_path: Path, vendor: int, device: int, class_code: int, is_found: bool
) -> None:
    """A maker's id alone does not make an FPGA."""
    function = PciDevice(address=USER.address, vendor=vendor, device=device, class_code=class_code)

    assert bool(Slot(tmp_path, (function,), files={}).discover()) is is_found


def test_observe_finds_nothing_when_the_card_is_healthy(slot: Slot) -> None:
    """A healthy card has no observation."""
    assert slot.look(slot.discover()) == []


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        (f"{folder(USER)}/ready", "0x0", "shell-not-ready"),
        (f"{folder(USER)}/dev_offline", "1", "device-offline"),
        (f"{folder(USER)}/firewall.u.15105/detected_level", "2", "firewall-tripped"),
        (f"{folder(MANAGEMENT)}/ready", "0x0", "shell-not-ready"),
    ],
    ids=["shell", "offline", "firewall", "management-shell"],
)
def test_observe_is_unhealthy_when_the_driver_says_so(slot: Slot, file: str, text: str, reason: str) -> None:
    """What the driver's own files tell of a fault is believed, on either function."""
    devices = slot.discover()
    slot.write(file, text)

    assert slot.look(devices) == [(HealthState.UNHEALTHY, reason)]


def test_observe_is_unhealthy_when_no_driver_has_the_user_function(slot: Slot) -> None:
    """Without its driver nobody can compute on the card."""
    devices = slot.discover()
    (slot.root / folder(USER) / "driver").unlink()

    assert slot.look(devices) == [(HealthState.UNHEALTHY, "no-kernel-driver")]


def test_observe_goes_on_missing_the_user_function_when_it_left_the_bus(slot: Slot) -> None:
    """A card that lost its user function keeps its name and is Unhealthy, before and after the next
    discovery.
    """
    devices = slot.discover()
    slot.remove(USER)

    before = slot.look(devices)
    after = slot.look(slot.discover())

    assert (before, after) == (
        [(HealthState.UNHEALTHY, "fell-off-bus")],
        [(HealthState.UNHEALTHY, "user-function-missing")],
    )


def test_observe_goes_on_missing_the_management_function_when_it_left_the_bus(slot: Slot) -> None:
    """A card that lost its management function keeps its name and is Unhealthy after the next
    discovery too.
    """
    slot.discover()
    slot.remove(MANAGEMENT)

    assert slot.look(slot.discover()) == [(HealthState.UNHEALTHY, "fell-off-bus")]


def test_observe_is_unknown_when_a_file_cannot_be_read(slot: Slot) -> None:
    """A garbled file is neither health nor sickness."""
    devices = slot.discover()
    slot.write(f"{folder(USER)}/dev_offline", "perhaps")

    assert slot.look(devices) == [(HealthState.UNKNOWN, "tree-unreadable")]


def test_prepare_gives_the_render_node_alone_when_both_functions_have_drivers(slot: Slot) -> None:
    """A container gets what runs kernels and a variable of the card's own, and never the node that
    re-flashes the card.
    """
    edits = slot.driver.prepare(slot.tree, slot.discover(), CONTEXT)

    assert not isinstance(edits, Refusal)
    assert [node.path for node in edits[NAME].device_nodes] == ["/dev/dri/renderD129"]
    assert edits[NAME].env == {"TOPOBUS_FPGA_0000_3B_00_0": "0000:3b:00.1"}


def test_prepare_refuses_when_the_card_is_no_longer_there(slot: Slot) -> None:
    """A vanished card is named."""
    devices = slot.discover()
    slot.remove(USER)

    refusal = slot.driver.prepare(slot.tree, devices, CONTEXT)

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].facts == {"devices": (NAME,)}


def test_discover_leaves_the_card_out_when_its_user_function_is_passed_through(tmp_path: Path) -> None:
    """A card whose user function a virtual machine holds is not offered,
    and the inventory says so.
    """
    slot = Slot(tmp_path, functions=(MANAGEMENT, msgspec.structs.replace(USER, driver="vfio-pci")))

    assert slot.discover() == ()
    assert slot.discovery.warnings == (
        f"{USER.address} is not offered: kernel driver vfio-pci holds it for passthrough",
    )


SECOND = msgspec.structs.replace(USER, address=PciAddress.parse("0000:3b:00.2"))


@pytest.fixture
def double(tmp_path: Path) -> Slot:
    """A card with two user functions and one management function that has a render node, too."""
    files = {
        f"{folder(SECOND)}/user_pf": "",
        f"{folder(SECOND)}/rom.u.15106/VBNV": "xilinx_other_shell",
        f"{folder(SECOND)}/drm/renderD130/dev": "226:130",
        f"{folder(MANAGEMENT)}/drm/renderD140/dev": "226:140",
    }
    return Slot(tmp_path, (MANAGEMENT, USER, SECOND), FILES | files)


def test_discover_gives_each_user_function_when_a_card_has_several(double: Slot) -> None:
    """Each is a device of its own, with its shell, and names the card as its parent.

    The card's serial number is no id of theirs.
    """
    devices = double.discover()

    assert [(device.name, str(device.pci), device.attributes["shell"]) for device in devices] == [
        (f"{NAME}-user-1", "0000:3b:00.1", "xilinx_u55c_gen3x16_xdma_base_3"),
        (f"{NAME}-user-2", "0000:3b:00.2", "xilinx_other_shell"),
    ]
    assert {(device.parent, device.partition_of, device.uuid, device.attributes["serial"]) for device in devices} == {
        (NAME, NAME, "", "XFL1ABCD")
    }


def test_prepare_gives_each_user_function_its_own_node_when_a_card_has_several(double: Slot) -> None:
    """No container gets the neighbour's node, nor the management function's."""
    devices = double.discover()

    edits = double.driver.prepare(double.tree, devices, CONTEXT)

    assert not isinstance(edits, Refusal)
    assert {name: [node.path for node in edit.device_nodes] for name, edit in edits.items()} == {
        f"{NAME}-user-1": ["/dev/dri/renderD129"],
        f"{NAME}-user-2": ["/dev/dri/renderD130"],
    }


def test_prepare_gives_no_node_when_the_management_function_is_all_that_is_left(double: Slot) -> None:
    """A card whose user functions are gone is listed as sick.

    Whoever is given it all the same gets no node of the management function.
    """
    double.remove(USER)
    double.remove(SECOND)
    devices = double.discover()

    edits = double.driver.prepare(double.tree, devices, CONTEXT)

    assert not isinstance(edits, Refusal)
    assert [(str(device.pci), edits[device.name].device_nodes) for device in devices] == [("0000:3b:00.0", ())]


def test_discover_keeps_a_user_functions_name_when_its_neighbour_leaves(double: Slot) -> None:
    """One function's absence renames nobody, and is no fault of the other."""
    double.discover()
    double.remove(USER)

    (left,) = double.discover()

    assert left.name == f"{NAME}-user-2"
    assert double.driver.observe(double.tree, (left,)) == {left.name: []}


def test_discover_keeps_a_user_functions_name_when_its_neighbour_left_before_a_restart(double: Slot) -> None:
    """The next process has seen one of the two alone.

    The inventory of the one before tells it that there were two.
    """
    before = double.discover()
    double.remove(double.functions[1])
    double.functions = tuple(function for function in double.functions if (double.root / folder(function)).exists())
    double.driver = XilinxDriver()
    double.driver.remember(before)

    after = double.discover()

    assert [device.name for device in after] == [device.name for device in before if device.pci == after[0].pci]
    assert after[0].partition_of == NAME


def test_observe_misses_the_management_function_when_it_left_before_a_restart(slot: Slot) -> None:
    """What was known of the slot stays known: that a card lacks its management function is a fault,
    and not another kind of card.
    """
    before = slot.discover()
    slot.remove(MANAGEMENT)
    slot.functions = (USER,)
    slot.driver = XilinxDriver()
    slot.driver.remember(before)

    assert slot.look(slot.discover()) == [(HealthState.UNHEALTHY, "fell-off-bus")]


def test_observe_blames_one_user_function_when_its_firewall_trips(double: Slot) -> None:
    """The neighbour computes on; what the management function says is told of both."""
    devices = double.discover()
    double.write(f"{folder(SECOND)}/dev_offline", "1")
    double.write(f"{folder(MANAGEMENT)}/ready", "0x0")

    seen = double.driver.observe(double.tree, devices)

    assert {name: [observation.reason for observation in observations] for name, observations in seen.items()} == {
        f"{NAME}-user-1": ["shell-not-ready"],
        f"{NAME}-user-2": ["device-offline", "shell-not-ready"],
    }
