"""The GPU drivers keep the driver contract."""

from __future__ import annotations

from pathlib import Path

from topobus.devicekit.driver import DeviceDriver
from topobus.gpu.plugins.amd import AmdDriver
from topobus.gpu.plugins.intel import IntelDriver
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.simulation.machines import RecordedMachine, build
from topobus.testing.drivers.driver_contract import DriverContract

_PROFILES = Path(__file__).parent.parent / "data" / "profiles"


class TestNvidiaDriver(DriverContract):
    """NVIDIA, on two H100."""

    def make_driver(self) -> DeviceDriver:
        """Give the NVIDIA driver."""
        return NvidiaDriver()

    def record(self, into: Path) -> RecordedMachine:
        """Give two H100 under one switch."""
        return build(_PROFILES / "h100-pair.toml", into)


class TestAmdDriver(DriverContract):
    """AMD, on two MI210."""

    def make_driver(self) -> DeviceDriver:
        """Give the AMD driver."""
        return AmdDriver()

    def record(self, into: Path) -> RecordedMachine:
        """Give two MI210, one without a NUMA node."""
        return build(_PROFILES / "mi210-pair.toml", into)


class TestIntelDriver(DriverContract):
    """Intel, on a laptop."""

    def make_driver(self) -> DeviceDriver:
        """Give the Intel driver."""
        return IntelDriver()

    def record(self, into: Path) -> RecordedMachine:
        """Give the processor's own graphics."""
        return build("laptop", into)
