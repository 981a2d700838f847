"""What a nic driver attaches, and what it says where it cannot: on recorded trees, where the kernel
must not be touched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.sysfs_trees import write
from topobus.devicekit.device_record import DeviceRecord, RecordState
from topobus.devicekit.driver import Capabilities, DeviceDriver, PrepareContext
from topobus.nic.config import InterfaceSettings
from topobus.nic.host_services import NicServices
from topobus.nic.interfaces.interface_hands import InterfaceHands
from topobus.nic.netlink.vf_settings import VfPlace
from topobus.nic.plugins.linux_netdev import LinuxNetdevDriver
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.simulation.machines import RecordedMachine, build
from topobus.sysfs.boot import BOOT_ID_FILE, read_boot_id
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind
from topobus.values.sandbox import Sandbox

OWNER = Owner(kind=OwnerKind.CLAIM, name="claim", uid="uid")
SANDBOX = Sandbox(id="s", uid="p", namespace="a", name="b", network_namespace="/run/netns/none")


def context(device: str = "", **config: Any) -> PrepareContext:
    """A claim with this configuration."""
    entry = {"apiVersion": "nic.topobus.dev/v1", "kind": "Interface", **config}
    records = {device: DeviceRecord(RecordState(owner=OWNER))} if device else {}
    return PrepareContext(owner=OWNER, config=(entry,) if config else (), records=records)


class Watched(PciNetdevDriver):
    """The driver of cards, whose parts a test may look at."""

    def vf_of(self, tree: Tree, device: Device) -> VfPlace | Refusal | None:
        """Find the physical function."""
        return self._find_vf(tree, device)


@pytest.fixture(scope="module")
def epyc(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tree, tuple[Device, ...]]:
    """A machine with virtual functions."""
    machine: RecordedMachine = build("epyc-8numa", tmp_path_factory.mktemp("epyc") / "machine")
    tree = Tree(HardwareSettings(root=str(machine.root)))
    return tree, tuple(PciNetdevDriver().discover(tree, read_machine(tree, "n")).devices)


@pytest.fixture(scope="module")
def dgx(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tree, tuple[Device, ...]]:
    """A machine with RDMA cards."""
    machine: RecordedMachine = build("dgx", tmp_path_factory.mktemp("dgx") / "machine")
    tree = Tree(HardwareSettings(root=str(machine.root)))
    return tree, tuple(PciNetdevDriver().discover(tree, read_machine(tree, "n")).devices)


def codes(answer: object) -> list[tuple[str, object]]:
    """Code and device of each reason."""
    assert isinstance(answer, Refusal), answer
    return [(reason.code, reason.facts.get("device")) for reason in answer.reasons]


@pytest.mark.parametrize("driver", [PciNetdevDriver(), LinuxNetdevDriver()], ids=["pci-netdev", "linux-netdev"])
def test_driver_has_the_hands_that_the_host_looks_for(driver: DeviceDriver) -> None:
    """The host calls what it finds; a method that is missing would never be missed."""
    assert driver.capabilities == Capabilities(attaches=True, checks=True, only_reads=True, measures=True)


def test_driver_without_hands_attaches_nothing_and_refuses_what_it_cannot_keep(
    dgx: tuple[Tree, tuple[Device, ...]],
) -> None:
    """A plain claim has nodes and variables as ever.

    One that configures its interface is not started without it.
    """
    tree, (device, *_) = dgx
    driver = PciNetdevDriver()
    driver.configure(NicServices(interfaces=InterfaceSettings(), hands=None, why_not="the process lacks CAP_NET_ADMIN"))

    refusal = driver.check(tree, [device], context(interface={"mtu": 9000}))

    assert driver.to_attach([device], context()) == ()
    assert (driver.check(tree, [device], context()), driver.check(tree, [device], context(mode="host"))) == (None, None)
    assert codes(refusal) == [("attach-unsupported", device.name)]
    assert isinstance(refusal, Refusal)
    assert "CAP_NET_ADMIN" in refusal.reasons[0].message
    assert codes(driver.attach(tree, device, context(), SANDBOX, DeviceRecord())) == [
        ("attach-unsupported", device.name)
    ]


def test_to_attach_leaves_out_a_function_without_an_interface(dgx: tuple[Tree, tuple[Device, ...]]) -> None:
    """One that vfio-pci holds gives its nodes, as before."""
    _, (device, *_) = dgx
    held = Device(
        name="nic-vfio",
        device_class="nic",
        driver="pci-netdev",
        pci=device.pci,
        attributes={"kernelDriver": "vfio-pci"},
    )
    driver = PciNetdevDriver()
    driver.configure(NicServices(interfaces=InterfaceSettings(), hands=InterfaceHands()))

    assert driver.to_attach([device, held], context()) == (device.name,)


def test_virtual_function_is_found_at_its_physical_one(epyc: tuple[Tree, tuple[Device, ...]]) -> None:
    """The physical function's interface and the number under which it knows this one: what the
    kernel is asked by.
    """
    tree, devices = epyc
    virtual = [device for device in devices if device.attributes["sriovVf"]]
    driver = Watched()

    places = {device.name: driver.vf_of(tree, device) for device in devices}

    wanted = {device.name: tree.link_name(f"sys/bus/pci/devices/{device.pci}/physfn") for device in virtual}
    for name, parent in wanted.items():
        place = places[name]
        assert isinstance(place, VfPlace)
        assert tree.names(f"sys/bus/pci/devices/{parent}/net") == (place.physical,)
        assert (
            f"nic-{tree.link_name(f'sys/bus/pci/devices/{parent}/virtfn{place.index}').replace(':', '-').replace('.', '-')}"  # noqa: E501
            == name
        )
    assert [name for name, place in places.items() if place is None] == [
        device.name for device in devices if device not in virtual
    ]


def test_prepare_answers_the_same_when_the_rdma_device_went_along(
    dgx: tuple[Tree, tuple[Device, ...]], tmp_path: Path
) -> None:
    """In exclusive mode nodes and names are out of sight while a pod has them.

    Kubelet asks again, and unprepare forgets what was noted.
    """
    tree, (device, *_) = dgx
    driver = PciNetdevDriver()
    driver.configure(NicServices(interfaces=InterfaceSettings(), hands=InterfaceHands()))
    wanted = context(device.name, rdma={"mode": "exclusive"}, interface={"name": "rdma0"})
    empty = tmp_path / "away"
    write(empty, {f"sys/bus/pci/devices/{device.pci}/vendor": "", BOOT_ID_FILE: read_boot_id(tree)})

    before = driver.prepare(tree, [device], wanted)
    away = driver.prepare(Tree(HardwareSettings(root=str(empty))), [device], wanted)
    noted = [step.name for step in wanted.records[device.name].steps]
    driver.unprepare(tree, [device], wanted)

    assert isinstance(before, dict)
    assert [node.path for node in before[device.name].device_nodes]
    assert before[""].env["TOPOBUS_NIC_INTERFACES"] == "rdma0"
    assert away == before
    assert (noted, wanted.records[device.name].steps) == (["rdma-nodes"], ())


def test_prepare_reads_the_nodes_anew_when_they_were_noted_in_another_boot(
    dgx: tuple[Tree, tuple[Device, ...]],
) -> None:
    """After a reboot the RDMA device is on the host again, and its nodes may have other numbers:
    those of before may be another card's.
    """
    tree, (device, *_) = dgx
    driver = PciNetdevDriver()
    driver.configure(NicServices(interfaces=InterfaceSettings(), hands=InterfaceHands()))
    wanted = context(device.name, rdma={"mode": "exclusive"}, interface={"name": "rdma0"})
    fresh = driver.prepare(tree, [device], wanted)
    record = wanted.records[device.name]
    record.undone("rdma-nodes")
    record.intend("rdma-nodes", {"boot": "of another boot", "names": ["mlx5_9"], "nodes": ["infiniband/uverbs9"]})

    edits = driver.prepare(tree, [device], wanted)

    assert edits == fresh
    assert [step.before["boot"] for step in record.steps] == [read_boot_id(tree)]


def test_prepare_notes_nothing_when_the_rdma_device_is_shared(dgx: tuple[Tree, tuple[Device, ...]]) -> None:
    """Nodes stay in sight; there is nothing to remember."""
    tree, (device, *_) = dgx
    driver = PciNetdevDriver()
    driver.configure(NicServices(interfaces=InterfaceSettings(), hands=InterfaceHands()))
    wanted = context(device.name)

    edits = driver.prepare(tree, [device], wanted)

    assert isinstance(edits, dict)
    assert isinstance(edits[device.name], ContainerEdits)
    assert wanted.records[device.name].steps == ()
