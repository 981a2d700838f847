"""Both FPGA drivers on whole recorded machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.devicekit.driver import DeviceDriver
from topobus.fpga.plugins.intel_dfl import IntelDflDriver
from topobus.fpga.plugins.xilinx import XilinxDriver
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.health import HealthState


@pytest.fixture(scope="module")
def dgx(tmp_path_factory: pytest.TempPathFactory) -> RecordedMachine:
    """The demo machine.

    Building it costs a second, so all tests share it: whoever harms it, mends it.
    """
    return build("dgx", tmp_path_factory.mktemp("dgx") / "machine")


def discover(machine: RecordedMachine, driver: DeviceDriver) -> tuple[Device, ...]:
    """Find a driver's devices."""
    tree = Tree(HardwareSettings(root=str(machine.root)))
    return tuple(driver.discover(tree, read_machine(tree, "n")).devices)


def look(
    machine: RecordedMachine, driver: DeviceDriver, devices: tuple[Device, ...]
) -> dict[str, list[tuple[HealthState, str]]]:
    """Give what is wrong, by device name."""
    seen = driver.observe(Tree(HardwareSettings(root=str(machine.root))), devices)
    return {
        name: [(observation.state, observation.reason) for observation in observations]
        for name, observations in seen.items()
        if observations
    }


def test_xilinx_finds_two_cards_on_node_0_when_the_machine_is_the_demo(dgx: RecordedMachine) -> None:
    """Four functions are two healthy cards, both on NUMA node 0."""
    driver = XilinxDriver()

    cards = discover(dgx, driver)

    assert [(card.name, str(card.numa_nodes), card.model) for card in cards] == [
        ("fpga-0000-38-00-0", "0", "Alveo U55C"),
        ("fpga-0000-39-00-0", "0", "Alveo U55C"),
    ]
    assert look(dgx, driver, cards) == {}


@pytest.mark.parametrize("function", [0, 1])
def test_xilinx_misses_either_function_when_it_falls_off_the_bus(dgx: RecordedMachine, function: int) -> None:
    """A card with half of its functions gone is Unhealthy under its own name.

    Its neighbour is not touched.
    """
    driver = XilinxDriver()
    cards = discover(dgx, driver)

    dgx.remove_pci(f"0000:38:00.{function}")
    sick = look(dgx, driver, cards)
    dgx.restore_pci(f"0000:38:00.{function}")

    assert {name: {state for state, _ in conditions} for name, conditions in sick.items()} == {
        cards[0].name: {HealthState.UNHEALTHY}
    }


def test_intel_dfl_finds_the_card_when_the_machine_has_one(tmp_path: Path) -> None:
    """The EPYC machine's card is found with what is loaded, and reported when its function dies."""
    machine = build("epyc-8numa", tmp_path / "machine")
    driver = IntelDflDriver()
    (card,) = discover(machine, driver)
    healthy = look(machine, driver, (card,))

    folder = f"{machine.folder(str(card.pci))}/fpga_region/region0/dfl-port.0"
    machine.write(f"{folder}/afu_id", "f" * 32)

    assert (healthy, str(card.numa_nodes)) == ({}, "2")
    assert look(machine, driver, (card,)) == {card.name: [(HealthState.UNHEALTHY, "function-crashed")]}


@pytest.mark.parametrize("driver", [XilinxDriver(), IntelDflDriver()], ids=lambda driver: driver.name)
def test_fpga_drivers_find_nothing_when_the_machine_is_a_laptop(tmp_path: Path, driver: DeviceDriver) -> None:
    """No FPGA is made up."""
    assert discover(build("laptop", tmp_path / "machine"), driver) == ()
