"""The sample driver with hands keeps the contract of drivers and of hands: with short work and with
long.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from topobus.devicekit.driver import DeviceDriver
from topobus.simulation.machines import RecordedMachine, build
from topobus.testing.drivers.folder_driver import CARDS, FolderDriver, make_card
from topobus.testing.drivers.hands_contract import HandsContract
from topobus.values.device import Device

_PROFILE = Path(__file__).parent.parent / "data" / "profiles" / "h100-pair.toml"


class TestFolderDriver(HandsContract):
    """Two cards that are folders."""

    config = ({"mtu": "9000", "image": "fast"},)
    bad_config = ({"mtu": "70000"},)

    def make_driver(self) -> DeviceDriver:
        """Make the driver."""
        return FolderDriver()

    def record(self, into: Path) -> RecordedMachine:
        """Put two cards into a machine."""
        recorded = build(_PROFILE, into)
        for number in range(2):
            make_card(recorded.root, f"nic-card-{number}", f"02:00:00:00:00:0{number}")
        return recorded

    def vanish(self, recorded: RecordedMachine, device: Device) -> None:
        """Take a card out."""
        shutil.rmtree(recorded.root / CARDS / device.name)

    def soil(self, recorded: RecordedMachine, device: Device) -> None:
        """Leave dirt."""
        (recorded.root / CARDS / device.name / "dirt").write_text("coffee", encoding="utf-8")


class TestFolderDriverWithLongWork(TestFolderDriver):
    """The same, programmed as long work."""

    config = ({"mtu": "9000", "image": "fast", "is_slow": "yes"},)
