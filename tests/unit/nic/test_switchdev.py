"""Cards in switchdev mode, whose physical function shows the representors of its virtual ones, and
functions with several ports: which interface is meant.

The tree is own-made: as k8snetworkplumbingwg/sriov-network-device-plugin issue 383 describes the
names and ports of such a card (ConnectX, two virtual functions).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from topobus.devicekit.driver import HostServices
from topobus.devicekit.settings import PartitionSettings
from topobus.nic.netlink.vf_settings import VfPlace
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.health import HealthState
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine, NumaNode, PciDevice
from topobus.values.outcome import Refusal
from topobus.values.pci import PciAddress

PHYSICAL = "0000:d8:00.1"
VIRTUAL = ("0000:d8:01.0", "0000:d8:01.1")
VF = "nic-0000-d8-01-0"
DEVICES = "sys/bus/pci/devices"
_UP = {"flags": "0x1003", "carrier": "1", "operstate": "up", "speed": "100000", "duplex": "full"}


class Watched(PciNetdevDriver):
    """The driver of cards, whose parts a test may look at."""

    def vf_of(self, tree: Tree, device: Device) -> VfPlace | Refusal | None:
        """Find the physical function."""
        return self._find_vf(tree, device)


class Switch:
    """A card with two virtual functions, and the driver that watches it."""

    def __init__(self, root: Path, uplinks: dict[str, dict[str, str]], representors: tuple[str, ...]) -> None:
        self.root = root
        self.write(f"{DEVICES}/{PHYSICAL}/sriov_totalvfs", "8")
        self.write(f"{DEVICES}/{PHYSICAL}/sriov_numvfs", "2")
        for address in (PHYSICAL, *VIRTUAL):
            self.link(f"{DEVICES}/{address}/driver", "sys/bus/pci/drivers/mlx5_core")
        for name, files in uplinks.items():
            self.interface(PHYSICAL, name, phys_switch_id="e435870003c3590c", **files)
        for index, name in enumerate(representors):
            self.interface(
                PHYSICAL,
                name,
                phys_port_name=f"pf1vf{index}",
                phys_switch_id="e435870003c3590c",
                flags="0x1002",
                carrier="",
            )
        for index, address in enumerate(VIRTUAL):
            self.interface(address, f"ens8f1v{index}", dev_port="0")
            self.link(f"{DEVICES}/{address}/physfn", f"{DEVICES}/{PHYSICAL}")
            self.link(f"{DEVICES}/{PHYSICAL}/virtfn{index}", f"{DEVICES}/{address}")
        self.driver = Watched()
        physical = PciAddress.parse(PHYSICAL)
        functions = [self._function(PHYSICAL, None), *(self._function(address, physical) for address in VIRTUAL)]
        node = NumaNode(id=0, cpus=CpuSet(0), memory_bytes=1)
        self.machine = Machine(node="n", numa_nodes=(node,), cpus=(), pci_devices=tuple(functions))

    @property
    def tree(self) -> Tree:
        """The files as they are now."""
        return Tree(HardwareSettings(root=str(self.root)))

    def devices(self) -> dict[str, Device]:
        """Look for devices."""
        self.discovery = self.driver.discover(self.tree, self.machine)
        return {device.name: device for device in self.discovery.devices}

    def place(self) -> VfPlace | Refusal | None:
        """Say where the first virtual function's physical one is."""
        return self.driver.vf_of(self.tree, self.devices()[VF])

    def look(self) -> dict[str, list[tuple[HealthState, str]]]:
        """Give state and reason of all that is wrong, by device."""
        seen = self.driver.observe(self.tree, list(self.devices().values()))
        return {name: [(sign.state, sign.reason) for sign in signs] for name, signs in seen.items() if signs}

    def interface(self, address: str, name: str, **files: str) -> None:
        """Write an interface of a function: up and linked, but for `files`."""
        folder = f"{DEVICES}/{address}/net/{name}"
        for file, text in {**_UP, **files}.items():
            if text:
                self.write(f"{folder}/{file}", text)
        self.link(f"sys/class/net/{name}", folder)

    def write(self, path: str, text: str) -> None:
        """Write a file."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")

    def link(self, path: str, target: str) -> None:
        """Write a link."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        (self.root / target).mkdir(parents=True, exist_ok=True)
        file.symlink_to(os.path.relpath(self.root / target, file.parent))

    def _function(self, address: str, physical: PciAddress | None) -> PciDevice:
        return PciDevice(
            address=PciAddress.parse(address),
            vendor=0x15B3,
            device=0x1021,
            class_code=0x020000,
            numa_node=0,
            root="pci0000:d7",
            driver="mlx5_core",
            physfn=physical,
        )


@pytest.fixture
def switch(tmp_path: Path) -> Switch:
    """The card of the report: a representor has the name that sorts first."""
    return Switch(tmp_path, {"ens8f1": {"phys_port_name": "p1"}}, ("ens8f1_0", "58609951635cbfa"))


def test_find_vf_names_the_uplink_when_a_representor_sorts_before_it(switch: Switch) -> None:
    """Set through a representor, an address or a VLAN would be another function's, or nobody's."""
    assert switch.place() == VfPlace(physical="ens8f1", index=0)


def test_find_vf_says_what_is_there_when_the_uplink_is_not(tmp_path: Path) -> None:
    """With representors alone nobody is told what to do, and the claim hears why."""
    switch = Switch(tmp_path, {}, ("ens8f1_0",))

    refusal = switch.place()

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].code == "vf-gone"
    assert "no interface of its own on the host, but ens8f1_0 of other functions" in refusal.reasons[0].message


@pytest.mark.parametrize(
    ("files", "own", "place"),
    [
        ({"ens8": {"dev_port": "0"}, "aaa": {"dev_port": "1"}}, {"dev_port": "0"}, "ens8"),
        ({"ens8": {"dev_port": "0"}, "aaa": {"dev_port": "1"}}, {"dev_port": "1"}, "aaa"),
        (
            {"ens8": {"dev_port": "0", "phys_port_id": "01"}, "aaa": {"dev_port": "1", "phys_port_id": "02"}},
            {"phys_port_id": "02"},
            "aaa",
        ),
        ({"ens8": {"dev_port": "0"}, "aaa": {"dev_port": "1"}}, {"dev_port": "2"}, ""),
        ({"ens8": {}, "aaa": {}}, {}, ""),
    ],
    ids=["first", "second", "by-id", "neither", "untold"],
)
def test_find_vf_goes_by_the_port_when_the_physical_function_has_two(
    tmp_path: Path, files: dict[str, dict[str, str]], own: dict[str, str], place: str
) -> None:
    """Two ports of one function (mlx4) are told by number or id.

    Where nothing tells, none is taken.
    """
    switch = Switch(tmp_path, files, ())
    switch.interface(VIRTUAL[1], "spare")
    for file, text in own.items():
        switch.write(f"{DEVICES}/{VIRTUAL[0]}/net/ens8f1v0/{file}", text)

    vf_place = switch.place()

    assert vf_place == VfPlace(physical=place, index=0) if place else isinstance(vf_place, Refusal)


def test_discover_tells_the_port_and_no_representor_when_the_card_is_offered_too(switch: Switch) -> None:
    """With its virtual functions counted the physical one is a device: by the interface that is its
    own.
    """
    switch.driver.configure(HostServices(partitions=PartitionSettings(parents="counted")))

    devices = switch.devices()

    assert devices["nic-0000-d8-00-1"].attributes["interface"] == "ens8f1"


def test_discover_offers_no_interface_and_says_so_when_two_ports_cannot_be_told_apart(tmp_path: Path) -> None:
    """A pod is not given one of two at random."""
    switch = Switch(tmp_path, {"ens8": {}, "aaa": {}}, ())
    switch.driver.configure(HostServices(partitions=PartitionSettings(parents="counted")))

    devices = switch.devices()

    assert "interface" not in devices["nic-0000-d8-00-1"].attributes
    assert any("aaa, ens8, and neither" in warning for warning in switch.discovery.warnings)


def test_observe_follows_the_uplink_when_representors_say_otherwise(switch: Switch) -> None:
    """A representor without a carrier is a pod that has gone.

    A cable that was pulled is told though a representor is up.
    """
    switch.driver.configure(HostServices(partitions=PartitionSettings(parents="counted")))
    rep, uplink = (f"{DEVICES}/{PHYSICAL}/net/{name}" for name in ("ens8f1_0", "ens8f1"))
    switch.write(f"{rep}/flags", "0x1003")
    switch.write(f"{rep}/carrier", "0")

    gone_pod = switch.look()
    switch.write(f"{rep}/carrier", "1")
    switch.write(f"{uplink}/carrier", "0")
    switch.driver = Watched()
    pulled = switch.look()

    assert gone_pod == {}
    assert {name: [reason for _, reason in signs] for name, signs in pulled.items()} == {
        name: ["parent-carrier-lost"] for name in (VF, "nic-0000-d8-01-1")
    }


def test_observe_leaves_out_rdma_ports_of_representors(switch: Switch) -> None:
    """The RDMA device of a card in switchdev mode has a port for each representor, down as long as
    no pod has the function.
    """
    switch.driver.configure(HostServices(partitions=PartitionSettings(parents="counted")))
    for number, (state, interface) in enumerate((("4: ACTIVE", "ens8f1"), ("1: DOWN", "ens8f1_0")), 1):
        folder = f"{DEVICES}/{PHYSICAL}/infiniband/mlx5_1/ports/{number}"
        for file, text in {"state": state, "link_layer": "Ethernet", "gid_attrs/ndevs/0": interface}.items():
            switch.write(f"{folder}/{file}", text)

    assert switch.look() == {}


@pytest.mark.parametrize(
    ("other_switch", "reasons"), [("e435870003c3590c", []), ("ffff", ["parent-carrier-lost"])], ids=["same", "other"]
)
def test_observe_counts_the_other_port_of_a_bond_when_it_is_of_the_same_switch(
    switch: Switch, other_switch: str, reasons: list[str]
) -> None:
    """In switchdev mode the ports of a bond carry each other's virtual functions.

    Another card's port carries none of them.
    """
    switch.interface("0000:d8:00.0", "ens8f0", phys_port_name="p0", phys_switch_id=other_switch)
    switch.write("sys/class/net/bond0/bonding/slaves", "ens8f0 ens8f1")
    switch.link(f"{DEVICES}/{PHYSICAL}/net/ens8f1/master", "sys/class/net/bond0")
    switch.write(f"{DEVICES}/{PHYSICAL}/net/ens8f1/carrier", "0")

    assert [reason for _, reason in switch.look().get(VF, [])] == reasons
