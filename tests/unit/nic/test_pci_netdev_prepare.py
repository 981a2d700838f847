"""What a container gets with its NICs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec import structs

from topobus.devicekit.driver import PrepareContext
from topobus.nic.config import InterfaceSettings
from topobus.nic.host_services import NicServices
from topobus.nic.interfaces.interface_hands import InterfaceHands
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device, DeviceRole
from topobus.values.outcome import Refusal
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind

CONTEXT = PrepareContext(owner=Owner(kind=OwnerKind.CLAIM, name="c", uid="u"))
ADDRESSES = ("0000:3b:00.0", "0000:86:00.0")
NICS = tuple(
    Device(name=f"nic-{text.replace(':', '-').replace('.', '-')}", device_class="nic", pci=PciAddress.parse(text))
    for text in ADDRESSES
)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Two RDMA cards."""
    for number, address in enumerate(ADDRESSES):
        folder = tmp_path / f"sys/bus/pci/devices/{address}"
        for name in (
            f"net/eth{number}",
            f"infiniband/mlx5_{number}",
            f"infiniband_verbs/uverbs{number}",
            f"infiniband_mad/umad{number}",
        ):
            (folder / name).mkdir(parents=True)
    return Tree(HardwareSettings(root=str(tmp_path)))


def test_prepare_gives_each_card_its_own_nodes_when_there_are_two(tree: Tree) -> None:
    """A container with one card cannot open the other's.

    The connection manager comes once for both.
    """
    edits = PciNetdevDriver().prepare(tree, NICS, CONTEXT)

    assert not isinstance(edits, Refusal)
    nodes = {name: [node.path for node in edit.device_nodes] for name, edit in edits.items()}
    assert nodes == {
        NICS[0].name: ["/dev/infiniband/uverbs0", "/dev/infiniband/umad0"],
        NICS[1].name: ["/dev/infiniband/uverbs1", "/dev/infiniband/umad1"],
        "": ["/dev/infiniband/rdma_cm"],
    }


def test_prepare_lists_the_cards_in_variables_when_there_are_two(tree: Tree) -> None:
    """Addresses, interfaces and RDMA devices are listed in one order, whatever the order of the
    request.
    """
    edits = PciNetdevDriver().prepare(tree, tuple(reversed(NICS)), CONTEXT)

    assert not isinstance(edits, Refusal)
    assert edits[""].env == {
        "TOPOBUS_NIC_PCI_ADDRESSES": ",".join(ADDRESSES),
        "TOPOBUS_NIC_INTERFACES": "eth0,eth1",
        "TOPOBUS_NIC_RDMA_DEVICES": "mlx5_0,mlx5_1",
    }
    assert edits[NICS[0].name].env == {"TOPOBUS_NIC_0000_3B_00_0": "0000:3b:00.0"}


def test_prepare_gives_the_iommu_group_when_the_card_is_bound_to_vfio(tmp_path: Path) -> None:
    """A card for user-space networking comes with its group as it is now, not as it was at an
    earlier boot.
    """
    folder = tmp_path / f"sys/bus/pci/devices/{ADDRESSES[0]}"
    for name, target in (("driver", "sys/bus/pci/drivers/vfio-pci"), ("iommu_group", "sys/kernel/iommu_groups/41")):
        (tmp_path / target).mkdir(parents=True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(os.path.relpath(tmp_path / target, folder))

    card = structs.replace(NICS[0], role=DeviceRole.PASSTHROUGH)
    driver, tree = PciNetdevDriver(), Tree(HardwareSettings(root=str(tmp_path)))

    edits = driver.prepare(tree, [card], CONTEXT)
    refusal = driver.prepare(tree, NICS[:1], CONTEXT)

    assert not isinstance(edits, Refusal)
    assert [node.path for node in edits[card.name].device_nodes] == ["/dev/vfio/41"]
    assert [node.path for node in edits[""].device_nodes] == ["/dev/vfio/vfio"]
    # Who was given it as an interface wanted no group.
    assert isinstance(refusal, Refusal)
    assert [reason.code for reason in refusal.reasons] == ["device-not-offered"]


def test_prepare_refuses_when_a_card_is_no_longer_there(tmp_path: Path, tree: Tree) -> None:
    """A vanished card is named, and nothing is half prepared."""
    (tmp_path / f"sys/bus/pci/devices/{ADDRESSES[1]}").rename(tmp_path / "gone")

    refusal = PciNetdevDriver().prepare(tree, NICS, CONTEXT)

    assert isinstance(refusal, Refusal)
    assert [(reason.code, reason.facts) for reason in refusal.reasons] == [
        ("device-gone", {"devices": (NICS[1].name,)})
    ]


def test_unprepare_changes_nothing_when_the_card_was_never_prepared(tmp_path: Path, tree: Tree) -> None:
    """Undoing what was not done is no error and touches no file."""
    before = sorted(tmp_path.rglob("*"))

    PciNetdevDriver().unprepare(tree, NICS, CONTEXT)

    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("files", "driver", "config", "said"),
    [
        ([], "mlx5_core", {}, "kernel driver mlx5_core has made none; ask again in a moment"),
        (
            [],
            "mlx5_core",
            {"interface": {"name": "net1"}},
            "kernel driver mlx5_core has made none; ask again in a moment",
        ),
        ([], "", {"interface": {"name": "net1"}}, "no kernel driver is bound to it yet; ask again in a moment"),
        (["net"], "mlx5_core", {}, "in another network namespace"),
        (["infiniband/mlx5_0"], "mlx5_core", {"interface": {"name": "net1"}}, "has made none"),
        (["net/eth7"], "mlx5_core", {}, "its interface eth7 is new; ask again when the inventory shows it"),
        (
            ["net/eth7", "net/eth8"],
            "mlx5_core",
            {},
            "it has eth7, eth8, and neither phys_port_name nor dev_port distinguishes them",
        ),
        ([], "mlx5_core", {"mode": "host"}, ""),
        (["infiniband/mlx5_0"], "mlx5_core", {}, ""),
    ],
)
def test_prepare_refuses_a_claim_whose_pod_would_start_without_the_interface(
    tmp_path: Path, files: list[str], driver: str, config: dict[str, object], said: str
) -> None:
    """A function whose interface the inventory does not tell is given to who asked for none, or can
    have none: the RDMA device alone, mode host.
    """
    folder = tmp_path / f"sys/bus/pci/devices/{ADDRESSES[0]}"
    for name in files or ["power"]:
        (folder / name).mkdir(parents=True)
    if driver:
        (folder / "driver").symlink_to(f"../../drivers/{driver}")
    plugin = PciNetdevDriver()
    plugin.configure(NicServices(interfaces=InterfaceSettings(), hands=InterfaceHands()))
    entry = {"apiVersion": "nic.topobus.dev/v1", "kind": "Interface", **config}
    context = PrepareContext(owner=CONTEXT.owner, config=(entry,) if config else ())

    answer = plugin.prepare(Tree(HardwareSettings(root=str(tmp_path))), NICS[:1], context)

    reasons = answer.reasons if isinstance(answer, Refusal) else ()
    assert len(reasons) == (1 if said else 0)
    assert all(said in reason.message for reason in reasons)


def test_prepare_refuses_an_interface_of_a_function_that_vfio_holds(tmp_path: Path) -> None:
    """It was offered for passthrough: who configures an interface hears that there is none, instead
    of a pod without it.
    """
    folder = tmp_path / f"sys/bus/pci/devices/{ADDRESSES[0]}"
    folder.mkdir(parents=True)
    (folder / "driver").symlink_to("../../drivers/vfio-pci")
    (folder / "iommu_group").symlink_to("../../../kernel/iommu_groups/41")
    driver = PciNetdevDriver()
    driver.configure(NicServices(interfaces=InterfaceSettings(), hands=InterfaceHands()))
    entry = {"apiVersion": "nic.topobus.dev/v1", "kind": "Interface", "vf": {"vlan": 7}}
    card = structs.replace(NICS[0], role=DeviceRole.PASSTHROUGH)
    tree = Tree(HardwareSettings(root=str(tmp_path)))

    plain = driver.prepare(tree, [card], CONTEXT)
    configured = driver.prepare(tree, [card], PrepareContext(owner=CONTEXT.owner, config=(entry,)))

    assert not isinstance(plain, Refusal)
    assert isinstance(configured, Refusal)
    assert [reason.code for reason in configured.reasons] == ["interface-missing"]
