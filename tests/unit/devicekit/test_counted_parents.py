"""Cards that are offered beside their parts: counters in the slices keep both from being allocated,
and within Kubernetes' limits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from support.kfd_machines import MI300X_BYTES, KfdMachine
from support.sysfs_trees import write
from topobus.controller.state.inventory_slices import devices_of_class, slices_of_pool
from topobus.devicekit.driver import DeviceDriver, HostServices, PrepareContext
from topobus.devicekit.settings import PartitionSettings
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import Allocated, AllocationInput, ClaimToAllocate, DeviceId, Node, Usage
from topobus.engine.cel.selector import CelCompiler
from topobus.engine.health.health_machine import HealthSettings
from topobus.engine.health.inventory_merge import DriverView, MergedInventory, advance_inventory
from topobus.formats.kubernetes.built_in_classes import built_in_class
from topobus.formats.kubernetes.limits import check_slice
from topobus.formats.kubernetes.resource import ClaimSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.fpga.plugins.intel_dfl import IntelDflDriver
from topobus.gateway.device_plugins.rules.lists import plugin_lists
from topobus.gpu.plugins.amd import AmdDriver
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.sysfs.tree import Tree
from topobus.values.device import DeviceRole, Inventory
from topobus.values.dra_names import DRIVER
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine, NumaNode, PciDevice
from topobus.values.partitions import MAX_PARTS, PARTS
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind

CONTEXT = PrepareContext(owner=Owner(kind=OwnerKind.CLAIM, name="c", uid="u"))
PHYSICAL = PciAddress.parse("0000:3b:00.0")
VIRTUAL = (PciAddress.parse("0000:3b:01.0"), PciAddress.parse("0000:3b:01.1"))
CARD = PciAddress.parse("0000:5e:00.0")


class Parts:
    """A tree with a card in parts, its driver, and the names of the card and of its parts."""

    def __init__(self, driver: DeviceDriver, tree: Tree, functions: tuple[PciDevice, ...], parent: str) -> None:
        self.driver, self.tree, self.parent = driver, tree, parent
        node = NumaNode(id=0, cpus=CpuSet(0), memory_bytes=1)
        self.machine = Machine(node="n1", numa_nodes=(node,), cpus=(), pci_devices=functions)

    def inventory(self, *, is_counted: bool) -> Inventory:
        """What the service publishes."""
        self.driver.configure(HostServices(partitions=PartitionSettings(parents="counted" if is_counted else "hidden")))
        view = DriverView(devices=tuple(self.driver.discover(self.tree, self.machine).devices))
        device_class = self.driver.device_class
        merged = advance_inventory(
            MergedInventory(),
            {self.driver.name: view},
            device_class=device_class,
            machine=self.machine,
            held=(),
            now=datetime(2026, 1, 1, tzinfo=UTC),
            settings=HealthSettings(),
        )
        assert merged.warnings == ()
        return Inventory(
            node="n1", device_class=device_class, generation=1, devices=merged.devices, counter_sets=merged.counter_sets
        )


def _amd(root: Path) -> Parts:
    machine = KfdMachine(root, "mi308x-cpx", mode="CPX", memory_mode="NPS1")
    first = machine.addresses[0]
    return Parts(AmdDriver(), machine.tree, (machine.functions[first],), "gpu-0000-0a-00-0")


def _nic(root: Path) -> Parts:
    files: dict[str, object] = {
        f"sys/bus/pci/devices/{address}/net/e{index}/mtu": 1500 for index, address in enumerate((PHYSICAL, *VIRTUAL))
    }
    folder = f"sys/bus/pci/devices/{PHYSICAL}"
    tree = write(root, {**files, f"{folder}/sriov_totalvfs": 8, f"{folder}/sriov_numvfs": 2})
    physical = PciDevice(address=PHYSICAL, vendor=0x15B3, device=1, class_code=0x020000)
    virtual = (
        PciDevice(address=address, vendor=0x15B3, device=2, class_code=0x020000, physfn=PHYSICAL) for address in VIRTUAL
    )
    return Parts(PciNetdevDriver(), tree, (physical, *virtual), "nic-0000-3b-00-0")


def _dfl(root: Path) -> Parts:
    region = f"sys/bus/pci/devices/{CARD}/fpga_region/region0"
    files: dict[str, object] = {
        f"{region}/dfl-fme.0/ports_num": 2,
        **{f"{region}/dfl-port.{port}/id": port for port in (0, 1)},
    }
    tree = write(root, files)
    link = root / "sys/class/fpga_region/region0"
    link.parent.mkdir(parents=True)
    link.symlink_to(os.path.relpath(root / region, link.parent))
    return Parts(IntelDflDriver(), tree, (PciDevice(address=CARD, vendor=0x8086, device=0x0B30),), "fpga-0000-5e-00-0")


@pytest.fixture(params=[_amd, _nic, _dfl], ids=["amd", "nic", "dfl"])
def cut(request: pytest.FixtureRequest, tmp_path: Path) -> Parts:
    """A card in parts of each kind."""
    make: Callable[[Path], Parts] = request.param
    return make(tmp_path)


def _is_allocated(inventory: Inventory, name: str, *held: str) -> bool:
    """Say whether a claim can have exactly this device while others are held."""
    exactly = {"deviceClassName": inventory.device_class, "count": 1}
    spec = read_as({"devices": {"requests": [{"name": "r", "exactly": exactly}]}}, ClaimSpec, where="claim")
    others = {device.name for device in inventory.devices} - {name, *held}
    outcome = allocate(
        AllocationInput(
            node=Node(inventory.node),
            claims=(ClaimToAllocate("d/c", spec),),
            classes={inventory.device_class: built_in_class(inventory.device_class)},
            slices=slices_of_pool(inventory.node, [devices_of_class(inventory)]),
            usage=Usage(
                {DeviceId(DRIVER, inventory.node, device): "claim a/b" for device in held},
                excluded={DeviceId(DRIVER, inventory.node, device): "not asked for" for device in others},
            ),
        ),
        CelCompiler(),
    )
    return isinstance(outcome, Allocated)


def _listed(inventory: Inventory) -> list[str]:
    """Name what kubelet's device plugin is offered."""
    lists = plugin_lists(inventory.device_class, "topobus.dev/x", inventory, {})
    return [entry.id for entries in lists.values() for entry in entries]


def test_a_card_and_its_parts_are_never_allocated_together_when_both_are_offered(cut: Parts) -> None:
    """Any number of parts fit beside each other, the whole beside none, and no part beside the
    whole.

    The slices are Kubernetes' own.
    """
    inventory = cut.inventory(is_counted=True)
    parts = [device.name for device in inventory.devices if device.partition_of]

    assert [device.role for device in inventory.devices if device.name == cut.parent] == [DeviceRole.PARTITION_PARENT]
    assert {device.partition_of for device in inventory.devices if device.name != cut.parent} == {cut.parent}
    assert [(each.name, each.counters) for each in inventory.counter_sets] == [(cut.parent, {PARTS: MAX_PARTS})]
    assert [
        problem
        for each in slices_of_pool(inventory.node, [devices_of_class(inventory)])
        for problem in check_slice(each.spec)
    ] == []
    assert _is_allocated(inventory, cut.parent)
    assert all(_is_allocated(inventory, part, *[other for other in parts if other != part]) for part in parts)
    assert not any(_is_allocated(inventory, cut.parent, part) for part in parts)
    assert not any(_is_allocated(inventory, part, cut.parent) for part in parts)
    # kubelet's device plugin counts nothing, so it is offered none of them.
    assert _listed(inventory) == []


def test_parts_alone_are_offered_through_both_doors_when_parents_are_hidden(cut: Parts) -> None:
    """By default a card in parts is not there: no counters, and kubelet's device plugin has the
    parts.
    """
    counted = cut.inventory(is_counted=True)

    inventory = cut.inventory(is_counted=False)

    names = [device.name for device in inventory.devices]
    assert names == [device.name for device in counted.devices if device.name != cut.parent]
    assert inventory.counter_sets == ()
    assert _listed(inventory) == names


def test_prepare_gives_the_nodes_of_all_parts_when_the_card_is_asked_for(tmp_path: Path) -> None:
    """Whoever has an AMD card in CPX has its four partitions."""
    cut = _amd(tmp_path)
    (card,) = [device for device in cut.inventory(is_counted=True).devices if device.name == cut.parent]

    edits = cut.driver.prepare(cut.tree, [card], CONTEXT)

    assert (card.capacity["memory"], card.attributes["type"]) == (MI300X_BYTES, "card")
    assert isinstance(edits, dict)
    assert [node.path for node in edits[card.name].device_nodes] == [
        f"/dev/dri/{kind}{number + index}" for index in range(4) for kind, number in (("card", 0), ("renderD", 128))
    ]


def test_prepare_gives_all_ports_when_the_card_is_asked_for(tmp_path: Path) -> None:
    """Whoever has a DFL card has its ports, and not its engine."""
    cut = _dfl(tmp_path)
    (card,) = [device for device in cut.inventory(is_counted=True).devices if device.name == cut.parent]

    edits = cut.driver.prepare(cut.tree, [card], CONTEXT)

    assert isinstance(edits, dict)
    assert [node.path for node in edits[card.name].device_nodes] == ["/dev/dfl-port.0", "/dev/dfl-port.1"]


def test_use_sees_the_processes_of_all_parts_when_the_card_was_held(tmp_path: Path) -> None:
    """A process on the third partition is left on the card, and on that
    partition, and on no other.
    """
    cut = _amd(tmp_path)
    devices = cut.inventory(is_counted=True).devices
    # KFD's node 4, which is the third partition, has gpu_id 1004.
    tree = write(tmp_path, {"sys/class/kfd/kfd/proc/4711/vram_1004": 4096})
    assert isinstance(cut.driver, AmdDriver)

    users = {device.name: [process.pid for process in cut.driver.use(tree, device).processes] for device in devices}

    assert users == {
        "gpu-0000-0a-00-0": [4711],
        "gpu-0000-0a-00-0-cpx-0": [],
        "gpu-0000-0a-00-0-cpx-1": [],
        "gpu-0000-0a-00-0-cpx-2": [4711],
        "gpu-0000-0a-00-0-cpx-3": [],
    }
