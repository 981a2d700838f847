"""What every PCI function tells about itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.devicekit.pci import PciHealth, observe_kernel_driver, pci_device, select_functions
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.health import HealthState
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Machine, NumaNode, PciDevice, PciLink
from topobus.values.pci import PciAddress

_ADDRESS = PciAddress.parse("0000:18:00.0")
_PORT = "sys/devices/pci0000:17/0000:17:00.0"
_FOLDER = f"{_PORT}/0000:18:00.0"


class _Card:
    """One PCI function below a port, as files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = Tree(HardwareSettings(root=str(root)))
        (root / _FOLDER).mkdir(parents=True)
        (root / "sys/bus/pci/devices").mkdir(parents=True)
        (root / f"sys/bus/pci/devices/{_ADDRESS}").symlink_to(f"../../../{_FOLDER.removeprefix('sys/')}")
        for name in ("current", "max"):
            self.write(f"{name}_link_width", "16")
            self.write(f"{name}_link_speed", "32.0 GT/s PCIe")
        for kind, total in (("correctable", "COR"), ("nonfatal", "NONFATAL"), ("fatal", "FATAL")):
            self.write(f"aer_dev_{kind}", f"Undefined 0\nTOTAL_ERR_{total} 0")

    def write(self, name: str, text: str, folder: str = _FOLDER) -> None:
        (self.root / folder / name).write_text(f"{text}\n")


@pytest.fixture
def card(tmp_path: Path) -> _Card:
    """Give one healthy card below a port."""
    return _Card(tmp_path)


def _reasons(card: _Card, health: PciHealth | None = None) -> list[tuple[str, HealthState]]:
    return [
        (observation.reason, observation.state) for observation in (health or PciHealth()).observe(card.tree, _ADDRESS)
    ]


def test_observe_sees_nothing_when_all_is_well(card: _Card) -> None:
    """A card at full width without errors gives no observation."""
    assert _reasons(card) == []


def test_no_driver_is_missed_when_the_function_left_the_bus_meanwhile(card: _Card) -> None:
    """A function that leaves between two readings of one look is gone.

    That it has no driver either is no fault of its own. One that is there is told.
    """
    assert [observation.reason for observation in observe_kernel_driver(card.tree, _ADDRESS)] == ["no-kernel-driver"]

    (card.root / _FOLDER).rename(card.root / "removed")

    assert observe_kernel_driver(card.tree, _ADDRESS) == []


def test_observe_sees_absence_when_the_function_left_the_bus(card: _Card) -> None:
    """A function that is no longer in the tree fell off the bus."""
    (card.root / f"sys/bus/pci/devices/{_ADDRESS}").unlink()

    assert _reasons(card) == [("fell-off-bus", HealthState.UNHEALTHY)]


@pytest.mark.parametrize(
    ("kind", "total", "rise", "wanted"),
    [
        pytest.param("fatal", "FATAL", 1, [("aer-fatal", HealthState.UNHEALTHY)], id="fatal"),
        pytest.param("nonfatal", "NONFATAL", 1, [("aer-nonfatal", HealthState.DEGRADED)], id="not fatal"),
        pytest.param("correctable", "COR", 1, [], id="one corrected"),
        pytest.param("correctable", "COR", 500, [("aer-correctable-storm", HealthState.DEGRADED)], id="many corrected"),
    ],
)
def test_observe_sees_errors_once_when_a_counter_rises(
    card: _Card, kind: str, total: str, rise: int, wanted: list[tuple[str, HealthState]]
) -> None:
    """A rise since the last look is evidence at this look and none at the next.

    Old errors are none.
    """
    health = PciHealth()
    card.write(f"aer_dev_{kind}", f"TOTAL_ERR_{total} 7")
    first = _reasons(card, health)
    card.write(f"aer_dev_{kind}", f"TOTAL_ERR_{total} {7 + rise}")

    assert first == []
    assert _reasons(card, health) == wanted
    assert _reasons(card, health) == []


def test_observe_sees_a_fatal_error_that_the_root_port_alone_counts(card: _Card) -> None:
    """The kernel counts an endpoint's fatal error at its root port alone: each function of the slot
    has it, once.
    """
    other = PciAddress.parse("0000:18:00.1")
    (card.root / f"{_PORT}/{other}").mkdir()
    (card.root / f"sys/bus/pci/devices/{other}").symlink_to(f"../../../{_PORT.removeprefix('sys/')}/{other}")
    card.write("aer_dev_fatal", "TOTAL_ERR_FATAL 0", f"{_PORT}/{other}")
    health = PciHealth()
    seen = []
    for count in (3, 4, 4):
        card.write("aer_rootport_total_err_fatal", str(count), _PORT)
        seen.append([[each.reason for each in health.observe(card.tree, address)] for address in (_ADDRESS, other)])

    assert seen == [[[], []], [["aer-fatal"], ["aer-fatal"]], [[], []]]


def test_observe_sees_one_fatal_error_when_the_function_counts_it_as_well(card: _Card) -> None:
    """Where the kernel could read the function's status, both counters rise by the same error."""
    health = PciHealth()
    seen = []
    for count in (0, 1, 1):
        card.write("aer_rootport_total_err_fatal", str(count), _PORT)
        card.write("aer_dev_fatal", f"TOTAL_ERR_FATAL {count}")
        seen.append(_reasons(card, health))

    assert seen == [[], [("aer-fatal", HealthState.UNHEALTHY)], []]


_NO_ADDRESS = bytes(24)


def _header(base_addresses: bytes) -> bytes:
    """Give the part of configuration space that every user may read."""
    return bytes.fromhex("f41a4110070010000100000200000000") + base_addresses + bytes(24)


@pytest.mark.parametrize(
    ("header", "resource", "is_given_up"),
    [
        pytest.param(_header(bytes.fromhex("00000000000080fe" + "00" * 16)), "0xfe800000", False, id="recovered"),
        pytest.param(_header(bytes.fromhex("0c00000004000000" + "00" * 16)), "0x400000000", False, id="above 4 GiB"),
        pytest.param(_header(bytes.fromhex("0c00000000000000" + "00" * 16)), "0x400000000", True, id="kind alone"),
        pytest.param(_header(_NO_ADDRESS), "0xfe800000", True, id="no address"),
        pytest.param(_header(_NO_ADDRESS), "0x0000000000000000", False, id="none assigned"),
        pytest.param(b"\xff" * 64, "0xfe800000", True, id="no answer"),
        pytest.param(b"", "0xfe800000", False, id="unreadable"),
    ],
)
def test_observe_sees_a_function_that_the_kernel_gave_up_as_long_as_it_is_so(
    card: _Card, header: bytes, resource: str, *, is_given_up: bool
) -> None:
    """After a fatal error the function is without its base addresses until its driver has written
    them again: also for a service that was started later.
    """
    (card.root / _FOLDER / "config").write_bytes(header)
    card.write("resource", f"0x0000000000000000 0x0000000000000000 0x0\n{resource} 0xfe800fff 0x40200")
    card.write("aer_rootport_total_err_fatal", "1", _PORT)
    given_up = [("recovery-failed", HealthState.UNHEALTHY)] if is_given_up else []
    health = PciHealth()

    assert [_reasons(card, health) for _ in range(3)] == [given_up] * 3


def test_observe_reads_no_configuration_space_when_no_fatal_error_was_counted(card: _Card) -> None:
    """What a function without a fatal error has there is no evidence."""
    (card.root / _FOLDER / "config").write_bytes(_header(_NO_ADDRESS))
    card.write("resource", "0xfe800000 0xfe800fff 0x40200")
    card.write("aer_rootport_total_err_fatal", "0", _PORT)

    assert _reasons(card) == []


def test_observe_sees_the_function_below_a_switch_that_the_kernel_gave_up(card: _Card) -> None:
    """The root port's count is no sign of a function below a switch: which one it was shows its
    configuration space.
    """
    health, seen = PciHealth(), []
    addresses = [PciAddress.parse("0000:1a:00.0"), PciAddress.parse("0000:1b:00.0")]
    for address, header in zip(addresses, (_header(_NO_ADDRESS), _header(b"\xfe" * 24)), strict=True):
        folder = f"{_FOLDER}/0000:19:0{address.bus - 0x1A}.0/{address}"
        (card.root / folder).mkdir(parents=True)
        (card.root / f"sys/bus/pci/devices/{address}").symlink_to(f"../../../{folder.removeprefix('sys/')}")
        (card.root / folder / "config").write_bytes(header)
        card.write("resource", "0xfe800000 0xfe800fff 0x40200", folder)
        card.write("aer_dev_fatal", "TOTAL_ERR_FATAL 0", folder)
    for count in (0, 1, 1):
        card.write("aer_rootport_total_err_fatal", str(count), _PORT)
        seen.append([[each.reason for each in health.observe(card.tree, address)] for address in addresses])

    assert seen == [[[], []], [["recovery-failed"], []], [["recovery-failed"], []]]


def test_observe_takes_the_root_ports_count_as_it_is_when_a_card_comes_into_the_slot(card: _Card) -> None:
    """What happened in the slot before is no sign of the card that is there now."""
    health, link = PciHealth(), card.root / f"sys/bus/pci/devices/{_ADDRESS}"
    card.write("aer_rootport_total_err_fatal", "0", _PORT)
    health.observe(card.tree, _ADDRESS)
    target = link.readlink()
    link.unlink()
    health.observe(card.tree, _ADDRESS)
    card.write("aer_rootport_total_err_fatal", "1", _PORT)
    link.symlink_to(target)

    assert _reasons(card, health) == []


def test_observe_sees_a_narrow_link_when_lanes_are_lost(card: _Card) -> None:
    """A link that runs fewer lanes than card and slot could is Degraded."""
    card.write("current_link_width", "8")

    assert _reasons(card) == [("link-narrow", HealthState.DEGRADED)]


def test_observe_accepts_a_narrow_link_when_the_slot_is_narrow(card: _Card) -> None:
    """A wide card in a narrow slot is as wide as it can be."""
    card.write("current_link_width", "8")
    card.write("max_link_width", "8", _PORT)

    assert _reasons(card) == []


@pytest.mark.parametrize(("is_steady", "wanted"), [(True, [("link-slow", HealthState.DEGRADED)]), (False, [])])
def test_observe_minds_a_slow_link_when_the_card_never_saves_power(
    card: _Card, wanted: list[tuple[str, HealthState]], *, is_steady: bool
) -> None:
    """A lower speed is a fault for cards that never lower it, and normal for idle GPUs."""
    card.write("current_link_speed", "2.5 GT/s PCIe")

    assert _reasons(card, PciHealth(is_speed_steady=is_steady)) == wanted


@pytest.mark.parametrize("text", ["Unknown", "255", "0", ""])
def test_observe_sees_nothing_when_a_link_file_tells_nothing(card: _Card, text: str) -> None:
    """What the kernel cannot tell is no evidence."""
    card.write("current_link_width", text)

    assert _reasons(card) == []


def test_pci_device_tells_no_numa_node_when_the_machine_does_not() -> None:
    """An unknown NUMA node is None, never node 0; a known one is a set of one."""
    function = PciDevice(address=_ADDRESS, vendor=1, device=2, near_cpus=CpuSet(1), link=PciLink(max_width=16))
    device = PciDevice(address=_ADDRESS, vendor=1, device=2, numa_node=3)

    assert pci_device(function, device_class="gpu", driver="d", vendor="v").numa_nodes is None
    assert pci_device(device, device_class="gpu", driver="d", vendor="v").numa_nodes == NodeSet(3)


def test_select_functions_leaves_out_a_function_when_the_tree_lacks_it(card: _Card) -> None:
    """The machine may be older than the tree: what is gone from the tree is not found."""
    gone = PciAddress.parse("0000:19:00.0")
    machine = Machine(
        node="n",
        numa_nodes=(NumaNode(id=0, cpus=CpuSet(0), memory_bytes=1),),
        cpus=(),
        pci_devices=tuple(
            PciDevice(address=pci_address, vendor=1, device=2, class_code=0x030200) for pci_address in (gone, _ADDRESS)
        ),
    )

    assert [
        function.address for function in select_functions(card.tree, machine, vendors={1}, base_classes={0x0302})
    ] == [_ADDRESS]


def test_observe_judges_the_link_anew_when_another_card_stands_at_the_address(card: _Card) -> None:
    """What a link could be is remembered of the card that was there: a wider one in its place runs
    narrow with the same lanes.
    """
    health = PciHealth()
    card.write("max_link_width", "32", _PORT)
    before = _reasons(card, health)
    (card.root / _FOLDER).rename(card.root / "gone")
    (card.root / _FOLDER).mkdir()
    card.write("current_link_width", "16")
    card.write("max_link_width", "32")

    assert before == []
    assert _reasons(card, health) == [("link-narrow", HealthState.DEGRADED)]


def test_observe_sees_a_narrow_link_at_each_look_when_it_stays_so(card: _Card) -> None:
    """Only what was well is taken as read at the next look.

    A fault is told as long as it lasts, and ends when it ends.
    """
    health = PciHealth()
    well = _reasons(card, health)
    card.write("current_link_width", "8")
    narrow = [_reasons(card, health) for _ in range(3)]
    card.write("current_link_width", "16")

    assert (well, _reasons(card, health)) == ([], [])
    assert narrow == [[("link-narrow", HealthState.DEGRADED)]] * 3
