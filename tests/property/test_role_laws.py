"""Laws of what a function is for: however drivers, virtual functions and partitions flip, no mode
is ever offered, or prepared, as another.

Each maker's driver looks at a tree whose first card is set up anew at each step, as an operator or
another program would. What it offers is held against what the card is, and every device that was
ever offered is prepared again: it is given as what it was offered for, or refused.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from support.kfd_machines import KfdMachine
from support.laws import examples
from support.sysfs_trees import write
from topobus.devicekit.driver import DeviceDriver, HostServices, LongWork, PrepareContext
from topobus.devicekit.settings import PartitionSettings
from topobus.fpga.plugins.intel_dfl import IntelDflDriver
from topobus.fpga.plugins.xilinx import XilinxDriver
from topobus.gpu.plugins.amd import AmdDriver
from topobus.gpu.plugins.intel import IntelDriver
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device, DeviceRole
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine, NumaNode, PciDevice
from topobus.values.outcome import Refusal
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind

CONTEXT = PrepareContext(owner=Owner(kind=OwnerKind.CLAIM, name="c", uid="u"))
ADDRESS = PciAddress.parse("0000:0a:00.0")
FOLDER = f"sys/bus/pci/devices/{ADDRESS}"
REGION = f"{FOLDER}/fpga_region/region0"
VFIO = ("vfio-pci", "mlx5_vfio_pci", "nvgrace-gpu-vfio-pci")
STUBS = ("pci-stub", "xen-pciback", "uio_pci_generic")


class Setup(Struct, frozen=True):
    """How a card is set up: its kernel driver, its virtual functions, and whether it is cut into
    partitions (where its maker has such).
    """

    kernel_driver: str
    virtual_functions: int
    is_cut: bool


class Card:
    """One card in a tree."""

    can_be_cut = False

    def __init__(
        self, root: Path, driver: DeviceDriver, vendor: int, class_code: int, files: dict[str, object]
    ) -> None:
        self.root, self.driver = root, driver
        write(root, {f"{FOLDER}/sriov_totalvfs": 8, **files})
        (root / FOLDER / "iommu_group").symlink_to("/sys/kernel/iommu_groups/41")
        function = PciDevice(address=ADDRESS, vendor=vendor, device=1, class_code=class_code, numa_node=0)
        node = NumaNode(id=0, cpus=CpuSet(0), memory_bytes=1)
        self.machine = Machine(node="n1", numa_nodes=(node,), cpus=(), pci_devices=(function,))

    @property
    def tree(self) -> Tree:
        """A tree that has seen nothing yet."""
        return Tree(HardwareSettings(root=str(self.root)))

    def set_up(self, setup: Setup) -> None:
        """Set the card up."""
        link = self.root / FOLDER / "driver"
        link.unlink(missing_ok=True)
        if setup.kernel_driver:
            link.symlink_to(f"/sys/bus/pci/drivers/{setup.kernel_driver}")
        write(self.root, {f"{FOLDER}/sriov_numvfs": setup.virtual_functions})
        if self.can_be_cut:
            self.cut(is_cut=setup.is_cut)

    def cut(self, *, is_cut: bool) -> None:
        """Cut the card into partitions, or make it whole."""


class NvidiaCard(Card):
    """A GPU that MIG may cut; without NVML, the kernel module's list of instances tells."""

    can_be_cut = True

    def __init__(self, root: Path) -> None:
        information = {f"proc/driver/nvidia/gpus/{ADDRESS}/information": "Model: GPU\nDevice Minor: 0"}
        super().__init__(root, NvidiaDriver(), 0x10DE, 0x030200, information)

    def cut(self, *, is_cut: bool) -> None:
        """Make an instance, or remove it."""
        folder = self.root / "proc/driver/nvidia/capabilities/gpu0/mig"
        shutil.rmtree(folder, ignore_errors=True)
        if is_cut:
            write(self.root, {"proc/driver/nvidia/capabilities/gpu0/mig/gi3/access": "DeviceFileMinor: 30"})


class AmdCard(Card):
    """A GPU that is whole in SPX, and four partitions in CPX."""

    can_be_cut = True

    def __init__(self, root: Path) -> None:
        self._kfd = KfdMachine(root, "mi308x-cpx", mode="CPX", memory_mode="NPS1")
        (root / FOLDER / "driver").unlink()
        super().__init__(root, AmdDriver(), 0x1002, 0x120000, {})

    def cut(self, *, is_cut: bool) -> None:
        """Change the mode; KFD lists the partitions that are."""
        self._kfd.set_mode(ADDRESS, "CPX" if is_cut else "SPX")
        for number in ("3", "4", "5"):
            if is_cut:
                node = self._kfd.nodes[number]
                self._kfd.write_node(number, node["properties"], {**node, "links": {}})
            else:
                shutil.rmtree(self.root / "sys/class/kfd/kfd/topology/nodes" / number, ignore_errors=True)


def _nic(root: Path) -> Card:
    return Card(root, PciNetdevDriver(), 0x15B3, 0x020000, {f"{FOLDER}/net/eth7/address": "02:00:00:00:00:01"})


def _intel(root: Path) -> Card:
    return Card(root, IntelDriver(), 0x8086, 0x038000, {f"{FOLDER}/drm/renderD128/dev": "226:128"})


def _xilinx(root: Path) -> Card:
    return Card(root, XilinxDriver(), 0x10EE, 0x120000, {f"{FOLDER}/user_pf": ""})


def _dfl(root: Path) -> Card:
    files: dict[str, object] = {f"{REGION}/dfl-fme.0/bitstream_id": "0x1", f"{REGION}/dfl-port.0/afu_id": "9a" * 16}
    card = Card(root, IntelDflDriver(), 0x8086, 0x120000, files)
    link = root / "sys/class/fpga_region/region0"
    link.parent.mkdir(parents=True)
    link.symlink_to(os.path.relpath(root / REGION, link.parent))
    return card


CARDS: dict[str, Callable[[Path], Card]] = {
    "nvidia": NvidiaCard,
    "amd": AmdCard,
    "intel": _intel,
    "nic": _nic,
    "xilinx": _xilinx,
    "dfl": _dfl,
}

setups = st.builds(
    Setup,
    st.sampled_from(["native", "native", "", *VFIO, *STUBS]),
    st.sampled_from([0, 0, 0, 2]),
    st.sampled_from([False, False, True]),
)


def offered(card: Card, setup: Setup, role: DeviceRole) -> tuple[DeviceRole, ...]:
    """Say with which role the card is offered as a whole, if it is."""
    is_nic = isinstance(card.driver, PciNetdevDriver)
    if role is DeviceRole.PASSTHROUGH:
        return (role,) if is_nic and setup.kernel_driver in VFIO else ()
    if role is DeviceRole.PARTITION_PARENT:
        is_given = (
            is_nic
            or isinstance(card.driver, IntelDriver)
            or (isinstance(card, AmdCard) and not setup.virtual_functions)
        )
        return (role,) if is_given and card.driver.host.offers_parents else ()
    return (role,)


@pytest.fixture(scope="module", params=sorted(CARDS))
def card(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Card:
    """Give a card of each maker; each history sets it up from anew."""
    return CARDS[request.param](tmp_path_factory.mktemp(request.param))


def role_of(card: Card, setup: Setup) -> DeviceRole:
    """Say what the card is for; who holds it for passthrough has it whole, whatever else is on."""
    if setup.kernel_driver in (*VFIO, *STUBS):
        return DeviceRole.PASSTHROUGH
    if setup.virtual_functions or (setup.is_cut and card.can_be_cut):
        return DeviceRole.PARTITION_PARENT
    return DeviceRole.COMPUTE


@settings(max_examples=examples(60), deadline=None)
@given(history=st.lists(setups, min_size=1, max_size=8), offers_parents=st.booleans())
def test_no_mode_is_offered_or_prepared_as_another(card: Card, history: list[Setup], *, offers_parents: bool) -> None:
    """A card is offered as what it is, or not at all with what it is for.

    A device of an earlier look is given as what it was then, or refused.
    """
    card.driver.configure(HostServices(partitions=PartitionSettings(parents="counted" if offers_parents else "hidden")))
    ever: dict[tuple[str, DeviceRole], Device] = {}
    for setup in history:
        card.set_up(setup)
        role = role_of(card, setup)

        discovery = card.driver.discover(card.tree, card.machine)
        devices = {device.name: device for device in discovery.devices}
        ever |= {(device.name, device.role): device for device in devices.values()}

        whole = [device.role for device in devices.values() if not device.partition_of]
        parts = [device.role for device in devices.values() if device.partition_of]
        wanted = offered(card, setup, role)
        has_parts = (
            isinstance(card, AmdCard)
            and setup.is_cut
            and not setup.virtual_functions
            and role is DeviceRole.PARTITION_PARENT
        )
        assert whole == list(wanted)
        assert parts == ([DeviceRole.COMPUTE] * 4 if has_parts else [])
        assert [(function.pci, function.role) for function in discovery.kept] == ([] if wanted else [(ADDRESS, role)])
        for (name, offered_for), device in ever.items():
            edits = card.driver.prepare(card.tree, [device], CONTEXT)
            assert not isinstance(edits, LongWork)
            is_offered_now = name in devices and devices[name].role is offered_for
            assert isinstance(edits, Refusal) is not is_offered_now
            if not isinstance(edits, Refusal):
                has_group = any(node.path == "/dev/vfio/41" for node in edits[name].device_nodes)
                assert has_group is (offered_for is DeviceRole.PASSTHROUGH)
