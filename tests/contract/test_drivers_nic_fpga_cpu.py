"""The NIC, FPGA and CPU drivers keep the contract of drivers."""

from __future__ import annotations

from pathlib import Path

from support.net_trees import add_interface, remove_interface
from topobus.cpu.plugins.linux_cpu import LinuxCpuDriver
from topobus.devicekit.driver import DeviceDriver
from topobus.domain.device import Device
from topobus.fpga.plugins.intel_dfl import IntelDflDriver
from topobus.fpga.plugins.xilinx import XilinxDriver
from topobus.nic.config import InterfaceRule, InterfaceSettings
from topobus.nic.plugins.linux_netdev import LinuxNetdevDriver
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.simulation.machines import RecordedMachine, build
from topobus.testing.drivers.driver_contract import DriverContract


class TestPciNetdevDriver(DriverContract):
    """Eight RDMA cards of the demo machine."""

    def make_driver(self) -> DeviceDriver:
        """Make the driver."""
        return PciNetdevDriver()

    def record(self, into: Path) -> RecordedMachine:
        """Build the demo machine."""
        return build("dgx", into)


class TestPciNetdevDriverWithVirtualFunctions(TestPciNetdevDriver):
    """Physical and virtual functions of the EPYC machine, with its empty port plugged in."""

    def record(self, into: Path) -> RecordedMachine:
        """Build the EPYC machine."""
        machine = build("epyc-8numa", into)
        machine.write(f"{machine.folder('0000:01:00.1')}/net/enp1s0f1/carrier", "1")
        return machine


class TestLinuxNetdevDriver(DriverContract):
    """Two interfaces without hardware of their own, on the demo machine."""

    def make_driver(self) -> DeviceDriver:
        """Make the driver, with its two interfaces listed."""
        return LinuxNetdevDriver(InterfaceSettings(offer=(InterfaceRule(name="tenant-*", kind="veth"),)))

    def record(self, into: Path) -> RecordedMachine:
        """Build the demo machine, and two interfaces."""
        machine = build("dgx", into)
        for index in (101, 102):
            add_interface(into, f"tenant-{index}", index, iflink=str(index + 100))
        return machine

    def vanish(self, recorded: RecordedMachine, device: Device) -> None:
        """Take the interface away."""
        remove_interface(recorded.root, str(device.attributes["interface"]))


class TestXilinxDriver(DriverContract):
    """Two Alveo cards of the demo machine, each of two functions."""

    def make_driver(self) -> DeviceDriver:
        """Make the driver."""
        return XilinxDriver()

    def record(self, into: Path) -> RecordedMachine:
        """Build the demo machine."""
        return build("dgx", into)

    def vanish(self, recorded: RecordedMachine, device: Device) -> None:
        """Take the card out: both functions leave."""
        slot = str(device.pci).rpartition(".")[0]
        for function in (0, 1):
            recorded.remove_pci(f"{slot}.{function}")


class TestIntelDflDriver(DriverContract):
    """The DFL card of the EPYC machine."""

    def make_driver(self) -> DeviceDriver:
        """Make the driver."""
        return IntelDflDriver()

    def record(self, into: Path) -> RecordedMachine:
        """Build the EPYC machine."""
        return build("epyc-8numa", into)


class TestLinuxCpuDriver(DriverContract):
    """The laptop's CPUs: two kinds of cores, with and without siblings."""

    def make_driver(self) -> DeviceDriver:
        """Make the driver."""
        return LinuxCpuDriver()

    def record(self, into: Path) -> RecordedMachine:
        """Build the laptop."""
        return build("laptop", into)
