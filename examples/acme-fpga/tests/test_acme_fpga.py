"""The Acme driver keeps the driver contract, and publishes what its own files have."""

from __future__ import annotations

from pathlib import Path

import pytest
from topobus_acme_fpga import AcmeDriver

from topobus.devicekit.driver import DeviceDriver
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.drivers.driver_contract import DriverContract
from topobus.values.health import HealthState


def record(into: Path) -> RecordedMachine:
    """Build the recorded machine of this package."""
    return build(Path(__file__).parent.parent / "machine.toml", into)


class TestAcmeContract(DriverContract):
    """All that the fpga service relies on."""

    def make_driver(self) -> DeviceDriver:
        """Make the driver."""
        return AcmeDriver()

    def record(self, into: Path) -> RecordedMachine:
        """Build the machine."""
        return record(into)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("state", "failed: no bitstream", ("not-ready", HealthState.UNHEALTHY)),
        ("temperature_c", "97", ("too-hot", HealthState.DEGRADED)),
    ],
)
def test_observe_tells_when_a_file_of_the_card_says_so(
    tmp_path: Path, name: str, text: str, wanted: tuple[str, HealthState]
) -> None:
    """A card that is not ready is Unhealthy, a hot one Degraded; its neighbour is neither."""
    recorded = record(tmp_path / "machine")
    tree = Tree(HardwareSettings(root=str(recorded.root)))
    driver = AcmeDriver()
    first, second = driver.discover(tree, read_machine(tree, "n1")).devices
    recorded.write(f"{recorded.folder(str(first.pci))}/acme/{name}", text)

    seen = driver.observe(tree, [first, second])

    assert [(observation.reason, observation.state) for observation in seen[first.name]] == [wanted]
    assert list(seen[second.name]) == []
