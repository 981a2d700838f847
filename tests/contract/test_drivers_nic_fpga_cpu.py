"""The NIC, FPGA and CPU drivers keep the contract of drivers."""

from __future__ import annotations

from pathlib import Path

from support.bitstream_files import gbs, xclbin
from support.fpga_cards import (
    BLANK,
    FileDflProgrammer,
    FileXrtProgrammer,
    add,
    dfl_machine,
    files_of,
    port_file,
    xilinx_machine,
)
from support.net_trees import add_interface, remove_interface
from topobus.cpu.plugins.linux_cpu import LinuxCpuDriver
from topobus.devicekit.driver import DeviceDriver
from topobus.fpga.config import FunctionSettings
from topobus.fpga.host_services import FpgaServices
from topobus.fpga.plugins.intel_dfl import IntelDflDriver
from topobus.fpga.plugins.xilinx import XilinxDriver
from topobus.nic.config import InterfaceRule, InterfaceSettings
from topobus.nic.plugins.linux_netdev import LinuxNetdevDriver
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.simulation.machines import RecordedMachine, build
from topobus.testing.drivers.driver_contract import DriverContract
from topobus.testing.drivers.hands_contract import HandsContract
from topobus.values.device import Device

_PROFILES = Path(__file__).parent.parent / "data" / "profiles"
# Its suite reads the machine hundreds of times.
_CARDS = _PROFILES / "driver-cards.toml"


class TestPciNetdevDriver(DriverContract):
    """Two RDMA cards under one switch."""

    def make_driver(self) -> DeviceDriver:
        """Make the driver."""
        return PciNetdevDriver()

    def record(self, into: Path) -> RecordedMachine:
        """Build the small machine."""
        return build(_CARDS, into)


class TestPciNetdevDriverWithVirtualFunctions(TestPciNetdevDriver):
    """Physical and virtual functions of three cards, with the empty port plugged in."""

    def record(self, into: Path) -> RecordedMachine:
        """Build a machine that has them."""
        machine = build(_PROFILES / "nic-functions.toml", into)
        machine.write(f"{machine.folder('0000:16:00.1')}/net/enp22s0f1/carrier", "1")
        return machine


class TestLinuxNetdevDriver(DriverContract):
    """Two interfaces without hardware of their own, beside cards."""

    def make_driver(self) -> DeviceDriver:
        """Make the driver, with its two interfaces listed."""
        return LinuxNetdevDriver(InterfaceSettings(offer=(InterfaceRule(name="tenant-*", kind="veth"),)))

    def record(self, into: Path) -> RecordedMachine:
        """Build the small machine, and two interfaces."""
        machine = build(_CARDS, into)
        for index in (101, 102):
            add_interface(into, f"tenant-{index}", index, iflink=str(index + 100))
        return machine

    def vanish(self, recorded: RecordedMachine, device: Device) -> None:
        """Take the interface away."""
        remove_interface(recorded.root, str(device.attributes["interface"]))


class TestXilinxDriver(DriverContract):
    """Two Alveo cards, each of two functions."""

    def make_driver(self) -> DeviceDriver:
        """Make the driver."""
        return XilinxDriver()

    def record(self, into: Path) -> RecordedMachine:
        """Build the small machine."""
        return build(_CARDS, into)

    def vanish(self, recorded: RecordedMachine, device: Device) -> None:
        """Take the card out: both functions leave."""
        slot = str(device.pci).rpartition(".")[0]
        for function in (0, 1):
            recorded.remove_pci(f"{slot}.{function}")


class TestIntelDflDriver(DriverContract):
    """One DFL card."""

    def make_driver(self) -> DeviceDriver:
        """Make the driver."""
        return IntelDflDriver()

    def record(self, into: Path) -> RecordedMachine:
        """Build the small machine."""
        return build(_CARDS, into)


class TestIntelDflDriverThatPrograms(HandsContract):
    """The same with a store: the card is programmed for a claim, and blanked after it, at whichever
    step the service dies.
    """

    config = ({"apiVersion": "fpga.topobus.dev/v1", "kind": "FunctionParameters", "function": "matrix"},)
    bad_config = ({"apiVersion": "fpga.topobus.dev/v1", "kind": "FunctionParameters", "function": "Not A Name"},)
    _root = Path("no-machine-yet")

    def make_driver(self) -> DeviceDriver:
        """Make the driver, as a service does at each start."""
        driver = IntelDflDriver(FileDflProgrammer(self._root))
        driver.configure(
            FpgaServices(functions=FunctionSettings(store=str(self._root.parent / "store")), can_program=True)
        )
        return driver

    def record(self, into: Path) -> RecordedMachine:
        """Build the machine, blank, and its store."""
        self._root = into
        add(into.parent / "store", gbs(), "matrix")
        add(into.parent / "store", gbs(BLANK), "blank", is_blank=True)
        return dfl_machine(into)

    def look(self, recorded: RecordedMachine) -> object:
        """Look at the card; the rest of the machine is large."""
        return files_of(recorded.root.glob("sys/class/fpga_region/region*"))

    def soil(self, recorded: RecordedMachine, device: Device) -> None:
        """Leave another function in the region, and an error that a reset clears."""
        port_file(recorded.root, "dfl-port.0", "afu_id").write_text("0123456789abcdef" * 2, encoding="ascii")
        port_file(recorded.root, "dfl-port.0", "errors/errors").write_text("0x4", encoding="ascii")


class TestXilinxDriverThatPrograms(HandsContract):
    """An Alveo card with a store, blanked after each claim."""

    config = ({"apiVersion": "fpga.topobus.dev/v1", "kind": "FunctionParameters", "function": "filter"},)
    bad_config = ({"apiVersion": "fpga.topobus.dev/v1", "kind": "FunctionParameters", "function": 7},)
    _root = Path("no-machine-yet")

    def make_driver(self) -> DeviceDriver:
        """Make the driver, as a service does at each start."""
        driver = XilinxDriver(FileXrtProgrammer(self._root))
        driver.configure(
            FpgaServices(functions=FunctionSettings(store=str(self._root.parent / "store")), can_program=True)
        )
        return driver

    def record(self, into: Path) -> RecordedMachine:
        """Build the machine, whose cards have the blank function, and its store."""
        self._root = into
        add(into.parent / "store", xclbin(), "filter")
        add(into.parent / "store", xclbin(BLANK), "blank", is_blank=True)
        machine = xilinx_machine(into)
        for folder in (path.parent for path in into.glob("sys/bus/pci/devices/*/mgmt_pf")):
            (folder / "test_loaded_uuid").write_text(BLANK, encoding="ascii")
        return machine

    def look(self, recorded: RecordedMachine) -> object:
        """Look at the cards' management functions; the rest of the machine is large."""
        return files_of(path.parent for path in recorded.root.glob("sys/bus/pci/devices/*/mgmt_pf"))

    def vanish(self, recorded: RecordedMachine, device: Device) -> None:
        """Take the card out: both functions leave."""
        slot = str(device.pci).rpartition(".")[0]
        for function in (0, 1):
            recorded.remove_pci(f"{slot}.{function}")


class TestLinuxCpuDriver(DriverContract):
    """The laptop's CPUs: two kinds of cores, with and without siblings."""

    def make_driver(self) -> DeviceDriver:
        """Make the driver."""
        return LinuxCpuDriver()

    def record(self, into: Path) -> RecordedMachine:
        """Build the laptop."""
        return build("laptop", into)
