"""Laws of shapes: on whatever machine, counters alone keep a shape from whoever has one of its parts,
and nothing of what the shapes are depends on more than the hardware.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from support.laws import examples
from support.shape_machines import NODE, at_level, device, inventories, own_parts
from topobus.engine.shapes.in_slices import published_shapes, slice_shapes, with_shapes
from topobus.engine.shapes.shapes import Shapes, is_shape, shapes_of
from topobus.formats.kubernetes.limits import check_slice
from topobus.formats.kubernetes.pool_slices import own_part, pool_slices
from topobus.formats.kubernetes.slices import shared_counters, slice_device
from topobus.values.device import Device, DeviceRole, Inventory
from topobus.values.dra_names import DRIVER
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.idset import NodeSet
from topobus.values.maintenance import DeviceVerb, Maintenance
from topobus.values.names import is_dns_label
from topobus.values.own_shapes import OwnShape, ShapePlace, fault_of_own_shapes
from topobus.values.partitions import Partitions, partitioned
from topobus.values.resource_names import SHAPE_LEVELS

SICK = DeviceHealth(
    state=HealthState.UNHEALTHY,
    conditions=(Condition(dimension=Dimension.COMPUTE, state=HealthState.UNHEALTHY, reason="xid"),),
)
WITHHELD = Maintenance(verb=DeviceVerb.MAINTAIN, why="fan", who="ada")


@st.composite
def machines(draw: st.DrawFn) -> tuple[Inventory, ...]:
    """A machine: a regular one from which devices are taken, or to which some are added."""
    nodes = draw(st.integers(1, 8))
    sockets = {node: node * draw(st.sampled_from((1, 2, 4))) // nodes for node in range(nodes)}
    switches, gpus, nics = draw(st.integers(0, 3)), draw(st.integers(0, 3)), draw(st.integers(0, 4))
    regular = [
        device(f"{device_class}-{node}-{bus}-{index}", node, switch=16 * node + bus, model=device_class)
        for node in range(nodes)
        for bus in range(1 if switches else 0, switches + 1)
        for device_class, count in (("gpu", gpus), ("nic", nics))
        for index in range(count)
    ]
    lost = draw(st.sets(st.sampled_from([each.name for each in regular]), max_size=6)) if regular else set()
    devices = [each for each in regular if each.name not in lost]
    for number in range(draw(st.integers(0, 6))):
        fields: dict[str, Any] = {
            "allows_multiple": draw(st.booleans()) and draw(st.booleans()),
            "role": draw(st.sampled_from([*[DeviceRole.COMPUTE] * 3, *DeviceRole])),
            "parent": draw(st.sampled_from(("", "", "nic-more-9"))),
            "capacity": draw(st.sampled_from(({}, {"memory": 1 << 30}))),
        }
        devices.append(
            device(
                f"{draw(st.sampled_from(('gpu', 'nic', 'fpga')))}-more-{number}",
                draw(st.none() | st.integers(0, nodes - 1)),
                switch=draw(st.integers(0, 3)),
                model=draw(st.sampled_from(("", "A", "B"))),
                **fields,
            )
        )
    parents = (
        st.lists(st.sampled_from(devices), max_size=3, unique_by=lambda each: each.name) if devices else st.just([])
    )
    for parent in draw(parents):
        devices += [
            structs.replace(parent, name=f"{parent.name}-part-{index}", partition_of=parent.name)
            for index in range(draw(st.integers(1, 3)))
        ]
    return tuple(_counted(inventory) for inventory in inventories(devices, sockets))


@st.composite
def own_shapes(draw: st.DrawFn) -> tuple[OwnShape, ...]:
    """Shapes that an operator adds, whatever the machine."""
    names = draw(st.lists(st.sampled_from(("duo", "trio", "a-1", "numa-0")), max_size=3, unique=True))
    parts = st.dictionaries(st.sampled_from(("gpu", "nic", "fpga", "npu")), st.integers(1, 4), min_size=1)
    shapes = tuple(
        OwnShape(name=name, parts=draw(parts), within=draw(st.sampled_from(get_args(ShapePlace)))) for name in names
    )
    return tuple(shape for shape in shapes if not fault_of_own_shapes([shape]))


def _counted(inventory: Inventory) -> Inventory:
    devices, counter_sets, _ = partitioned(inventory.devices, inventory.counter_sets)
    return structs.replace(inventory, devices=devices, counter_sets=counter_sets)


def _counters(machine: tuple[Inventory, ...], shapes: Shapes) -> Partitions:
    """What everything takes, as a scheduler reads it from the slices."""
    devices = [
        structs.replace(
            each, consumes=(*each.consumes, *([shapes.uses[each.name]] if each.name in shapes.uses else []))
        )
        for inventory in machine
        for each in inventory.devices
    ]
    own = [counter_set for inventory in machine for counter_set in inventory.counter_sets]
    return Partitions([*devices, *shapes.devices], [*own, *shapes.counter_sets])


@settings(max_examples=examples(200))
@given(machines(), own_shapes())
def test_two_can_be_held_at_once_exactly_when_they_share_no_part(
    machine: tuple[Inventory, ...], added: tuple[OwnShape, ...]
) -> None:
    """Two shapes, or a shape and a device: counters let both be held unless the device is a part, or is
    cut out of one.
    """
    shapes = shapes_of(machine, added)
    counters = _counters(machine, shapes)
    parts = {name: set(of_shape) for name, of_shape in shapes.parts.items()}
    devices = {each.name: {each.partition_of or each.name} for inventory in machine for each in inventory.devices}

    pairs = [*combinations(parts, 2), *((shape, name) for shape in parts for name in devices)]
    held_at_once = {pair: counters.shortage(pair[:1], pair[1:]) is None for pair in pairs}

    everything = parts | devices
    assert held_at_once == {(shape, other): everything[shape].isdisjoint(everything[other]) for shape, other in pairs}


@settings(max_examples=examples(200))
@given(machines())
def test_shapes_of_a_level_are_alike_and_apart(machine: tuple[Inventory, ...]) -> None:
    """Each has as many of each class, at least one GPU, and nothing of another one."""
    shapes = shapes_of(machine)

    for level in SHAPE_LEVELS:
        of_level = at_level(shapes, level)
        counts = [Counter(name.partition("-")[0] for name in parts) for parts in of_level]
        assert all(each == counts[0] and each["gpu"] for each in counts)
        assert sum(map(len, of_level)) == len({name for parts in of_level for name in parts})


@settings(max_examples=examples(200))
@given(machines(), own_shapes())
def test_own_shapes_of_a_level_are_alike_apart_and_within_one_place(
    machine: tuple[Inventory, ...], added: tuple[OwnShape, ...]
) -> None:
    """Each has what the operator lists, of one place of the level, and nothing of another one. The shapes
    of the machine's own tree stay as they are without them.
    """
    shapes, without = shapes_of(machine, added), shapes_of(machine)
    sockets = {node: each.socket for each in machine[-1].devices for node in each.numa_nodes or ()}
    devices = {each.name: each for inventory in machine for each in inventory.devices}

    for own in added:
        of_level = own_parts(shapes, own.name)
        assert all(Counter(name.partition("-")[0] for name in parts) == own.parts for parts in of_level)
        assert sum(map(len, of_level)) == len({name for parts in of_level for name in parts})
        for parts in of_level:
            places = {_place(devices[name], own.within, sockets) for name in parts}
            assert len(places) == 1
            assert None not in places
    of_tree = shapes.devices[: len(without.devices)]
    assert [(each.name, each.attributes) for each in of_tree] == [
        (each.name, each.attributes) for each in without.devices
    ]


def _place(of: Device, level: str, sockets: Mapping[int, int | None]) -> object:
    """Where a device lies at a level; None: unknown. Halves and quarters are not looked into."""
    nodes = of.numa_nodes or NodeSet()
    if level == "switch":
        return of.pcie_switch
    if level == "numa":
        return nodes.ids[0] if len(nodes) == 1 else None
    if level == "socket":
        of_nodes = {sockets.get(node) for node in nodes}
        return of_nodes.pop() if len(of_nodes) == 1 else None
    return "anywhere"


@settings(max_examples=examples(200))
@given(machines(), st.booleans(), own_shapes())
def test_slices_keep_the_limits_and_are_read_back_as_they_were(
    machine: tuple[Inventory, ...], are_sick: bool, added: tuple[OwnShape, ...]
) -> None:
    """A server takes them all, and a gateway that starts anew, and has not heard the services yet, finds
    the same shapes there.
    """
    shapes = shapes_of(machine, added)
    offered = [own_part(_all(inventory, sick=are_sick))[0] for inventory in machine if inventory.device_class != "cpu"]
    devices = [slice_device(each) for inventory in offered for each in inventory.devices]
    counter_sets = shared_counters(each for inventory in offered for each in inventory.counter_sets)

    specs = pool_slices(NODE, *with_shapes(slice_shapes(shapes), devices, counter_sets)).values()

    assert [problem for spec in specs for problem in check_slice(spec)] == []
    assert published_shapes(specs) == slice_shapes(shapes)


@settings(max_examples=examples(200))
@given(machines(), st.randoms(use_true_random=False), st.booleans(), st.booleans(), own_shapes())
def test_shapes_follow_the_hardware_and_the_setting_alone(
    machine: tuple[Inventory, ...], order: Any, are_sick: bool, are_withheld: bool, added: tuple[OwnShape, ...]
) -> None:
    """The order in which devices are found, their health, and what an operator withholds change no
    shape.
    """
    others = [_all(inventory, sick=are_sick, withheld=are_withheld) for inventory in machine]
    shuffled = [structs.replace(each, devices=tuple(order.sample(each.devices, len(each.devices)))) for each in others]
    order.shuffle(shuffled)

    shapes, same = shapes_of(machine, added), shapes_of(shuffled, added)

    assert (shapes.devices, shapes.counter_sets, shapes.uses, shapes.remarks) == (
        same.devices,
        same.counter_sets,
        same.uses,
        same.remarks,
    )


@settings(max_examples=examples(200))
@given(machines(), own_shapes())
def test_names_are_labels_of_shapes_and_differ(machine: tuple[Inventory, ...], added: tuple[OwnShape, ...]) -> None:
    """Each is a device's name, no other device has it, and it tells the class."""
    names = [shape.name for shape in shapes_of(machine, added).devices]

    assert all(is_dns_label(name) and is_shape(DRIVER, name) for name in names)
    assert len(set(names)) == len(names)


def _all(inventory: Inventory, *, sick: bool = False, withheld: bool = False) -> Inventory:
    state = {"health": SICK} if sick else {}
    state |= {"maintenance": WITHHELD} if withheld else {}
    return structs.replace(inventory, devices=tuple(structs.replace(each, **state) for each in inventory.devices))
