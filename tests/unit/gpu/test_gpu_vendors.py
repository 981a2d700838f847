"""AMD and Intel GPUs, and the product table, on recorded machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.devicekit.driver import DeviceDriver, PrepareContext
from topobus.gpu.plugins.amd import AmdDriver
from topobus.gpu.plugins.intel import IntelDriver
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.gpu.products import ProductTable
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device, LinkClass
from topobus.values.idset import NodeSet
from topobus.values.machine import PciDevice
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind

_PROFILES = Path(__file__).parent.parent.parent / "data" / "profiles"
_CONTEXT = PrepareContext(owner=Owner(kind=OwnerKind.CLAIM, name="c", uid="u"))


def _tree(recorded: RecordedMachine) -> Tree:
    return Tree(HardwareSettings(root=str(recorded.root)))


def _discover(driver: DeviceDriver, recorded: RecordedMachine) -> tuple[Device, ...]:
    tree = _tree(recorded)
    return tuple(driver.discover(tree, read_machine(tree, "n1")).devices)


@pytest.fixture
def amd(tmp_path: Path) -> RecordedMachine:
    """Give two MI210."""
    return build(_PROFILES / "mi210-pair.toml", tmp_path / "machine")


def test_amd_tells_memory_and_identity_when_amdgpu_does(amd: RecordedMachine) -> None:
    """Memory, product and unique id come from amdgpu's files.

    A GPU without a NUMA node has none, not node 0.
    """
    first, second = _discover(AmdDriver(), amd)

    assert (first.model, first.capacity) == ("AMD Instinct MI210", {"memory": 68_702_699_520})
    assert first.uuid.startswith("GPU-")
    assert (first.numa_nodes, second.numa_nodes) == (NodeSet(0), None)


def test_amd_gives_the_nodes_that_rocm_opens_when_preparing(amd: RecordedMachine) -> None:
    """Each GPU has its card and render node; kfd comes once for all."""
    driver = AmdDriver()
    devices = _discover(driver, amd)

    edits = driver.prepare(_tree(amd), devices, _CONTEXT)

    assert isinstance(edits, dict)
    assert [node.path for node in edits[devices[0].name].device_nodes] == ["/dev/dri/card0", "/dev/dri/renderD128"]
    assert [node.path for node in edits[""].device_nodes] == ["/dev/kfd"]


def test_amd_tells_xgmi_peers_when_kfd_lists_links(amd: RecordedMachine) -> None:
    """A link of type XGMI makes the two GPUs fabric peers, with its bandwidth in Gbit/s."""
    nodes = "sys/devices/virtual/kfd/kfd/topology/nodes"
    first, second = sorted(
        path for path in (amd.root / nodes).iterdir() if "simd_count 416" in (path / "properties").read_text()
    )
    amd.write(
        f"{nodes}/{first.name}/io_links/0/properties",
        f"type 11\nnode_from {first.name}\nnode_to {second.name}\nmax_bandwidth 100000",
    )

    device, other = _discover(AmdDriver(), amd)

    assert [(link.peer, link.kind, link.bandwidth_gbps) for link in device.links] == [
        (other.name, LinkClass.FABRIC, 800.0)
    ]
    assert other.links == ()


def test_amd_finds_gpus_when_kfd_is_missing(amd: RecordedMachine) -> None:
    """Without KFD the GPUs are found all the same."""
    (amd.root / "sys/class/kfd/kfd").unlink()

    assert len(_discover(AmdDriver(), amd)) == 2


def test_intel_marks_integrated_graphics_when_they_sit_on_the_root_bus(tmp_path: Path) -> None:
    """A laptop's own graphics are a device, told apart by an attribute, and never left out
    silently.
    """
    recorded = build("laptop", tmp_path / "machine")
    driver = IntelDriver()

    (device,) = _discover(driver, recorded)
    edits = driver.prepare(_tree(recorded), [device], _CONTEXT)

    assert (device.vendor, device.attributes["integrated"]) == ("intel", True)
    assert isinstance(edits, dict)
    assert [node.path for node in edits[device.name].device_nodes] == ["/dev/dri/card0", "/dev/dri/renderD128"]


@pytest.mark.parametrize("driver", [NvidiaDriver(), AmdDriver(), IntelDriver()], ids=lambda driver: driver.name)
def test_drivers_leave_the_management_display_alone_when_a_server_has_one(driver: DeviceDriver, tmp_path: Path) -> None:
    """The display controller of a server's management processor is no accelerator: nobody claims
    it.
    """
    profile = tmp_path / "display.toml"
    profile.write_text(
        'title = "A display"\nbase = "laptop"\n[[roots]]\nbus = "0000:15"\nnuma_node = 0\nslots = [{ card = '
        '"aspeed-bmc" }]\n'
    )

    assert _discover(driver, build(profile, tmp_path / "machine")) == ()


@pytest.mark.parametrize(
    ("vendor", "device", "name", "memory_gib"),
    [
        pytest.param(0x10DE, 0x2330, "NVIDIA H100 80GB HBM3", 80, id="known"),
        pytest.param(0x10DE, 0x25B6, "NVIDIA A2 / A16", 0, id="one id, two memory sizes"),
        pytest.param(0x10DE, 0x0001, "", 0, id="unknown device"),
        pytest.param(0x1234, 0x2330, "", 0, id="unknown vendor"),
    ],
)
def test_product_table_tells_what_it_knows_when_asked(vendor: int, device: int, name: str, memory_gib: int) -> None:
    """A product's name and memory come from the table.

    What it does not know is empty, not guessed.
    """
    product = ProductTable().product(PciDevice(address=PciAddress(0, 1, 0, 0), vendor=vendor, device=device))

    assert (product.name, product.memory_bytes) == (name, memory_gib << 30)
