"""From a driver to an allocation: a real device service with the sample driver of shares and
partitions, and what is published of it.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from support.device_bench import DeviceBench
from topobus.controller.state.inventory_slices import devices_of_class, slices_of_pool
from topobus.devicekit.driver import Discovery
from topobus.devicekit.settings import PartitionSettings
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import (
    Allocated,
    AllocationInput,
    ClaimToAllocate,
    DeviceId,
    Node,
    NoFit,
    Outcome,
    Usage,
)
from topobus.engine.cel.selector import CelCompiler
from topobus.formats.kubernetes.built_in_classes import built_in_class
from topobus.formats.kubernetes.limits import check_slice
from topobus.formats.kubernetes.resource import ClaimSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.sysfs.tree import Tree
from topobus.testing.drivers.card_driver import CardDriver
from topobus.values.device import Inventory
from topobus.values.dra_names import DRIVER
from topobus.values.machine import Machine
from topobus.values.partitions import MAX_PARTS, PARTS

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]


def _allocate(inventory: Inventory, name: str, *held: str) -> Outcome:
    """Allocate exactly this device while others are held."""
    exactly = {"deviceClassName": "gpu", "count": 1}
    spec = read_as({"devices": {"requests": [{"name": "r", "exactly": exactly}]}}, ClaimSpec, where="claim")
    only = {device.name: "not asked for" for device in inventory.devices if device.name != name}
    return allocate(
        AllocationInput(
            node=Node(inventory.node),
            claims=(ClaimToAllocate("d/c", spec),),
            classes={"gpu": built_in_class("gpu")},
            slices=slices_of_pool(inventory.node, [devices_of_class(inventory)]),
            usage=Usage(
                {DeviceId(DRIVER, inventory.node, device): "claim a/b" for device in held},
                excluded={
                    DeviceId(DRIVER, inventory.node, device): why for device, why in only.items() if device not in held
                },
            ),
        ),
        CelCompiler(),
    )


async def test_inventory_and_slices_say_what_a_driver_says_of_shares_and_partitions(bench: DeviceBench) -> None:
    """Counters of the driver and those that follow from `partition_of`, within the limits of
    Kubernetes, and allocated as hardware allows.
    """
    await bench.publish_machine()
    async with bench.service(CardDriver()):
        inventory = await bench.inventory(lambda it: len(it.devices) > 0)

    assert inventory.warnings == ()
    assert [(counter_set.name, sorted(counter_set.counters)) for counter_set in inventory.counter_sets] == [
        ("gpu-card-0", ["memory", "slices"]),
        ("gpu-function-0", [PARTS]),
    ]
    parts = {
        device.name: [use.amount for use in device.consumes]
        for device in inventory.devices
        if device.name.startswith("gpu-function")
    }
    assert parts == {"gpu-function-0": [MAX_PARTS], "gpu-function-0-0": [1], "gpu-function-0-1": [1]}
    assert [
        problem
        for each in slices_of_pool(inventory.node, [devices_of_class(inventory)])
        for problem in check_slice(each.spec)
    ] == []
    assert isinstance(_allocate(inventory, "gpu-function-0-0", "gpu-function-0-1"), Allocated)
    assert isinstance(_allocate(inventory, "gpu-function-0", "gpu-function-0-1"), NoFit)
    assert isinstance(_allocate(inventory, "gpu-function-0-1", "gpu-function-0"), NoFit)
    assert isinstance(_allocate(inventory, "gpu-card-0-3-1", "gpu-card-0-4-0"), Allocated)
    assert isinstance(_allocate(inventory, "gpu-card-0-3-2", "gpu-card-0-4-0", "gpu-card-0-3-1"), NoFit)
    shared = _allocate(inventory, "gpu-port-0")
    assert isinstance(shared, Allocated)
    (granted,) = shared.results[0].devices.results
    assert (granted.share_id is not None, granted.consumed_capacity) == (True, {"bandwidth": "1k"})


async def test_counters_are_taken_up_again_when_the_service_restarts_without_its_driver(bench: DeviceBench) -> None:
    """Devices of a driver that is not loaded any more stay listed and go on to count."""
    await bench.publish_machine()
    async with bench.service(CardDriver(parts=0)):
        before = await bench.inventory(lambda it: len(it.devices) > 0)
    async with bench.service():
        after = await bench.inventory(lambda it: it.generation > before.generation)

    assert after.counter_sets == before.counter_sets
    assert [device.consumes for device in after.devices] == [device.consumes for device in before.devices]


class _Parent(CardDriver):
    """A driver that offers its card beside the parts when the service says so."""

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """Leave the whole function out, unless it is wanted."""
        whole = super().discover(tree, machine)
        devices = [device for device in whole.devices if self.host.offers_parents or device.name != "gpu-function-0"]
        return msgspec.structs.replace(whole, devices=devices)


@pytest.mark.parametrize(("parents", "is_offered"), [("hidden", False), ("counted", True)])
async def test_service_tells_its_drivers_whether_cards_are_offered_beside_their_parts(
    bench: DeviceBench, parents: Literal["hidden", "counted"], *, is_offered: bool
) -> None:
    """`partitions.parents` reaches a driver before its first look."""
    await bench.publish_machine()
    async with bench.service(_Parent(), partitions=PartitionSettings(parents=parents)):
        inventory = await bench.inventory(lambda it: len(it.devices) > 0)

    assert (inventory.device("gpu-function-0") is not None) is is_offered
    assert inventory.device("gpu-function-0-0") is not None
