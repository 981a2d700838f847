"""Values of many nodes that are kept once: nobody can tell them from the nodes' own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from support.alignment_nodes import dgx_facts
from topobus.controller.state import shared_values
from topobus.controller.state.shared_values import SharedValues, shape_key
from topobus.engine.allocation.pools import reasons_unreadable
from topobus.engine.cel.seam import facts_of
from topobus.engine.shapes.in_slices import SliceShapes
from topobus.formats.kubernetes.resource import Capacity, CounterConsumption
from topobus.formats.kubernetes.slices import slice_device
from topobus.formats.messages.codec import decode, encode
from topobus.values.device import Device, DeviceVerb, Inventory, Maintenance
from topobus.values.dra_names import DRIVER
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.idset import NodeSet
from topobus.values.machine import Machine

MACHINE, INVENTORIES = dgx_facts()
SICK = DeviceHealth(
    state=HealthState.UNHEALTHY,
    since="2026-01-01T00:00:00Z",
    conditions=(
        Condition(dimension=Dimension.PRESENCE, state=HealthState.UNHEALTHY, reason="gone", evidence={"path": "x"}),
    ),
)

HEALTHS = st.sampled_from(
    [
        DeviceHealth(),
        DeviceHealth(since="2026-01-01T00:00:00Z"),
        SICK,
        DeviceHealth(state=HealthState.DEGRADED, conditions=SICK.conditions),
        DeviceHealth(state=HealthState.UNKNOWN, since="2026-01-02T00:00:00Z"),
    ]
)
DEVICES = st.builds(
    Device,
    name=st.sampled_from(["d-0", "d-1"]),
    device_class=st.sampled_from(["gpu", "cpu"]),
    uuid=st.sampled_from(["", "", "GPU-1"]),
    model=st.sampled_from(["", "T4"]),
    numa_nodes=st.sampled_from([None, NodeSet(0), NodeSet(0, 1)]),
    attributes=st.sampled_from([{}, {"core": 1}, {"core": 2, "driverVersion": "1.2.3"}]),
    capacity=st.sampled_from([{}, {"memory": 16}]),
    health=HEALTHS,
    maintenance=st.sampled_from(
        [None, None, Maintenance(verb=DeviceVerb.EXCLUDE, who="me", why="fan", since="2026-01-01T00:00:00Z")]
    ),
    is_spare=st.booleans(),
)


def _copy(inventory: Inventory, node: str) -> Inventory:
    """Read an inventory of another node from its bytes: no part of it is a part of the first."""
    return structs.replace(decode(encode(inventory), Inventory), node=node)


@given(devices=st.lists(DEVICES, max_size=6))
def test_inventory_is_equal_and_shown_alike_when_its_parts_are_shared(devices: list[Device]) -> None:
    """Whatever came before it from other nodes, sick or well: equal devices, equal slices, equal
    facts.
    """
    shared = SharedValues()
    for node in ("n1", "n2", "n3"):
        inventory = _copy(Inventory(node=node, device_class="gpu", generation=1, devices=tuple(devices)), node)

        kept = shared.inventory(inventory)
        shown = [shared.slice_device(device) for device in kept.devices]

        assert kept == inventory
        assert shown == [slice_device(device) for device in inventory.devices]
        for form in shown:
            assert shared.facts(DRIVER, form) == facts_of(DRIVER, form)
            assert shared.facts("other.example.com", form) == facts_of("other.example.com", form)
            assert shared.unreadable(form) == reasons_unreadable(form)


def test_machine_is_equal_when_its_parts_are_shared() -> None:
    """Two machines that differ by their names are made of the same parts."""
    shared = SharedValues()
    first = shared.machine(decode(encode(MACHINE), Machine))

    second = shared.machine(structs.replace(decode(encode(MACHINE), Machine), node="other"))

    assert (first, second) == (MACHINE, structs.replace(MACHINE, node="other"))
    assert second.cpus is first.cpus


def test_cpus_of_two_nodes_are_made_of_the_same_parts() -> None:
    """What makes a fleet large is kept once: attributes, the form in slices, and what selectors
    see.
    """
    shared = SharedValues()
    first, second = (shared.inventory(_copy(INVENTORIES["cpu"], node)) for node in ("n1", "n2"))
    forms = [[shared.slice_device(device) for device in inventory.devices] for inventory in (first, second)]

    assert all(
        first_cpu.attributes is second_cpu.attributes
        for first_cpu, second_cpu in zip(first.devices, second.devices, strict=True)
    )
    assert all(first_form is second_form for first_form, second_form in zip(*forms, strict=True))
    assert shared.facts(DRIVER, forms[0][0]) is shared.facts(DRIVER, forms[1][0])


def test_sick_device_is_shown_as_sick_when_its_likes_are_well() -> None:
    """And it is well in the next inventory, when it is."""
    shared = SharedValues()
    well = Device(name="d", device_class="gpu", attributes={"a": 1})
    inventory = Inventory(node="n1", device_class="gpu", generation=1, devices=(well,))
    sick = structs.replace(inventory, node="n2", devices=(structs.replace(well, health=SICK),))
    forms = [
        shared.slice_device(shared.inventory(_copy(each, each.node)).devices[0])
        for each in (inventory, sick, inventory)
    ]

    assert [[taint.effect for taint in form.taints] for form in forms] == [[], ["NoExecute"], []]


def test_values_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nodes had once does not stay; what comes then is right all the same."""
    monkeypatch.setattr(shared_values, "_MOST_VALUES", 3)
    shared = SharedValues()
    inventories = [
        Inventory(
            node=f"n{number}",
            device_class="gpu",
            generation=1,
            devices=(Device(name=f"d-{number}", device_class="gpu", attributes={"number": number}),),
        )
        for number in range(10)
    ]

    kept = [shared.inventory(inventory) for inventory in inventories]

    assert kept == inventories
    assert len(shared._kinds) <= 4
    assert [shared.slice_device(inventory.devices[0]) for inventory in kept] == [
        slice_device(each.devices[0]) for each in inventories
    ]


def test_shapes_are_derived_once_when_nodes_differ_in_names_and_health_alone() -> None:
    """What makes no difference to shapes makes none to whether they are shared."""
    shared = SharedValues()
    first = list(INVENTORIES.values())
    second = [
        structs.replace(
            inventory,
            node="other",
            devices=tuple(
                structs.replace(device, health=SICK, uuid=f"u-{device.name}", attributes={"serial": device.name})
                for device in inventory.devices
            ),
        )
        for inventory in reversed(first)
    ]
    fewer = [structs.replace(inventory, devices=inventory.devices[1:]) for inventory in first]

    def derived(inventories: list[Inventory]) -> SliceShapes:
        """Derive the shapes of a node."""
        return shared.shapes({shape_key(inventory): inventory for inventory in inventories})

    assert len(derived(first).devices) > 0
    assert derived(second) is derived(first)
    assert derived(fewer) != derived(first)


def test_facts_are_shared_when_a_device_differs_in_counters_and_taints_alone() -> None:
    """Devices take from the counters of shapes beside their own, and selectors see neither."""
    shared = SharedValues()
    (device, *_) = shared.inventory(INVENTORIES["nic"]).devices
    shown = shared.slice_device(device)
    counting = structs.replace(shown, consumes_counters=(CounterConsumption(counter_set="shape-0"),))
    larger = structs.replace(shown, capacity={"memory": Capacity(value="1")})

    assert shared.facts(DRIVER, counting) is shared.facts(DRIVER, shown)
    assert shared.facts(DRIVER, larger) == facts_of(DRIVER, larger)
    assert shared.unreadable(larger) == reasons_unreadable(larger)
