"""What is offered where nobody counts, and how a pool with counters is written."""

from __future__ import annotations

import msgspec

from support.partitioned_cards import card, counters_of
from topobus.formats.kubernetes.limits import check_slice
from topobus.formats.kubernetes.pool_slices import COUNTERS_INDEX, publishable
from topobus.formats.kubernetes.resource import SliceSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.kubernetes.slices import shared_counters
from topobus.gateway.cluster.rules.slices import (
    SlicePlan,
    SlicePool,
    pool_devices,
    slice_plan,
)
from topobus.gateway.cluster.rules.uncounted import COUNTER_FIELDS, countable
from topobus.values.device import Device, Inventory


def _inventory(cards: int = 1) -> Inventory:
    names = [f"gpu-{number:02d}" for number in range(cards)]
    devices = tuple(device for name in names for device in card(name))
    return Inventory(node="n1", device_class="gpu", generation=1, devices=devices, counter_sets=counters_of(*names))


def _plan(inventory: Inventory) -> SlicePlan:
    return slice_plan(
        SlicePool("n1", "u"),
        pool_devices(inventory, {}),
        (),
        counter_sets=shared_counters(inventory.counter_sets),
    )


def test_countable_keeps_all_when_the_server_keeps_counters() -> None:
    """Fields that have nothing to do with counters withhold nothing."""
    inventory = _inventory()

    assert countable(inventory, ("spec.devices.*.taints",)) == (inventory, {})


def test_countable_keeps_cards_and_partitions_that_exclude_nobody() -> None:
    """Of a card with partitions the card stays.

    Partitions that all fit together, without their card, stay.
    """
    parts = tuple(device for device in _inventory().devices if device.name in ("gpu-00-part-a", "gpu-00-part-b"))

    beside, withheld = countable(_inventory(), COUNTER_FIELDS)
    alone, nothing = countable(msgspec.structs.replace(_inventory(), devices=parts), COUNTER_FIELDS)

    assert [(device.name, device.consumes) for device in beside.devices] == [("gpu-00", ())]
    assert withheld.keys() == {f"gpu-00-part-{letter}" for letter in "abc"}
    assert [device.name for device in alone.devices] == ["gpu-00-part-a", "gpu-00-part-b"]
    assert nothing == {}


def test_plan_writes_counters_first_and_within_every_limit() -> None:
    """Twenty cards: the counters' slices come before the devices', have indexes of their own, and
    belong to the same pool.
    """
    plan = _plan(_inventory(20))

    specs = [read_as(created.spec, SliceSpec, where="test") for created in plan.creates]
    assert [(len(spec.devices), len(spec.shared_counters)) for spec in specs] == [
        (0, 8),
        (0, 8),
        (0, 4),
        (64, 0),
        (16, 0),
    ]
    assert [problem for spec in specs for problem in check_slice(spec)] == []
    assert {spec.pool.resource_slice_count for spec in specs} == {5}
    assert [int(created.metadata["generateName"][:3], 16) for created in plan.creates] == [
        *range(COUNTERS_INDEX, COUNTERS_INDEX + 3),
        0,
        1,
    ]


def test_publishable_leaves_out_what_breaks_a_limit_of_counters() -> None:
    """A message of an older or foreign service may say what ours would not: three counter sets of
    one device.
    """
    uses = tuple(use for name in ("a", "b", "c") for use in card(name)[0].consumes)

    (good, bad) = publishable(
        pool_devices(
            Inventory(
                node="n1",
                device_class="gpu",
                generation=1,
                devices=(Device(name="gpu-0", device_class="gpu", consumes=uses),),
            ),
            {},
        )
    )

    assert good == ()
    assert "consumesCounters" in bad["gpu-0"]
