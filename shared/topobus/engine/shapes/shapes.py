"""Derives the shapes of a node: devices that stand for several others, each guarded by counters.

Every whole device that is in a shape has a counter with its own name. It takes all of it, each
partition of it takes one, and each shape takes all of its parts' counters. So a part, its
partitions and its shapes exclude each other by counting alone, which kube-scheduler does. CPUs of
shapes are counted as well (`cpu_places`).
Source: resource.k8s.io/v1, 1.36, sharedCounters: at most 2 counter sets for a device and 32
counters in a set.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import groupby

from msgspec import Struct, structs

from topobus.engine.shapes.cpu_places import counted_groups, cpus_near, offered_cpus, places_of, why_uncounted
from topobus.engine.shapes.levels import PAIR, Region, regions
from topobus.formats.kubernetes.limit_rules import MAX_CONSUMED_SETS, MAX_COUNTERS
from topobus.values.counters import CounterSet, CounterUse
from topobus.values.cpu_groups import GROUP_CAPACITY
from topobus.values.device import AttributeValue, Device, DeviceRole, Inventory
from topobus.values.dra_names import CPU_CLASS, class_of_device
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.names import is_dns_label
from topobus.values.own_shapes import OwnShape
from topobus.values.partitions import MAX_PARTS
from topobus.values.resource_names import SHAPE_LEVELS

__all__ = ["SHAPE_CLASS", "Shapes", "attribute_of_level", "is_shape", "shapes_of"]

SHAPE_CLASS = "shape"
"""The class of devices that stand for several others. No service serves it."""
_CLASSES = frozenset({"fpga", "gpu", "nic"})
"""Counted by each shape, also where a node has none."""
_DIGITS = 6


class Shapes(Struct, frozen=True, kw_only=True):
    """The shapes of a node."""

    devices: tuple[Device, ...] = ()
    """Smallest level first, places of CPUs last. Their `consumes` names their parts: each counter has its
    part's name."""
    counter_sets: tuple[CounterSet, ...] = ()
    uses: dict[str, CounterUse] = {}
    """What each other device takes beside what it takes of its own class: parts and partitions of
    parts."""
    remarks: tuple[str, ...] = ()
    """What the machine has no shape for, and why, a sentence each."""
    groups: dict[str, CpuSet] = {}
    """The groups of CPUs that are counted, with those of their CPUs that claims may have: a claim has
    them by shapes and places alone."""

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """Map each shape to its parts, sorted: of CPUs the groups that they are of."""
        return {shape.name: tuple(sorted(use.counter for use in shape.consumes)) for shape in self.devices}

    @property
    def cpus(self) -> dict[str, dict[str, int]]:
        """Map each shape that has CPUs to how many it has of which groups."""
        counts = {
            shape.name: {use.counter: use.amount for use in shape.consumes if use.counter in self.groups}
            for shape in (self.devices if self.groups else ())
        }
        return {name: of_shape for name, of_shape in counts.items() if of_shape}


def is_shape(driver: str, device: str) -> bool:
    """Say whether a device of an allocation stands for several others.

    >>> is_shape("topobus.dev", "shape-half-0-5d41e2"), is_shape("topobus.dev", "gpu-0000-18-00-0")
    (True, False)
    """
    return class_of_device(driver, device) == SHAPE_CLASS


def attribute_of_level(level: str) -> str:
    """Name the attribute that says whether a shape is of a level.

    >>> attribute_of_level("half"), attribute_of_level("gpu-nic")
    ('half', 'gpuNic')
    """
    return "gpuNic" if level == PAIR else level


def shapes_of(inventories: Iterable[Inventory], own_shapes: Sequence[OwnShape] = ()) -> Shapes:
    """Derive the shapes of a node from its inventories, the CPUs' among them, and those that its
    operator adds.

    Health, holders and the operator's decisions make no difference: a machine has the same shapes as
    long as it has the same devices.
    Cost: O(GPUs × NICs).
    """
    of_node = sorted(inventories, key=lambda inventory: inventory.device_class)
    sockets = _socket_bits(of_node)
    groups = counted_groups(of_node, own_shapes)
    devices = [
        device
        for inventory in of_node
        # Another vendor's plugin hands its devices out by itself.
        if inventory.device_class != CPU_CLASS and not inventory.resource
        for device in inventory.devices
    ]
    units = _units(devices)
    faults = _faults(devices, units)
    whole = [
        device
        for device in devices
        if device.role is DeviceRole.COMPUTE
        and units[device.name] == device.name
        and not device.allows_multiple
        and device.name not in faults
    ]
    of_levels, remarks = regions(whole, sockets, own_shapes)
    by_parts: dict[tuple[str, tuple[str, ...]], list[Region]] = {}
    for region in of_levels:
        # An operator's shape is never one with another: a selector knows it by the attribute level alone.
        own_level = "" if region.level in SHAPE_LEVELS else region.level
        by_parts.setdefault((own_level, tuple(part.name for part in region.parts)), []).append(region)
    set_of, numbers = _sets(of_levels, sockets, groups)
    texts = [f"{name} is in no shape: {why}" for name, why in faults.items()]
    texts += [f"level {level}: {why}" for level, why in remarks.items()]
    classes = sorted(_CLASSES | {device.device_class for device in whole})
    shapes: list[Device] = []
    for same in by_parts.values():
        if same[-1].cpus and not groups:
            texts.append(f"level {same[-1].level}: {why_uncounted(of_node)}")
            continue
        cpus = cpus_near(same[-1].parts, same[-1].cpus, groups, sockets) if same[-1].cpus else {}
        shape = _shape(same, set_of, classes, cpus if not isinstance(cpus, str) else {})
        fault = cpus if isinstance(cpus, str) else _fault(shape)
        if fault:
            texts.append(f"level {same[-1].level}: {shape.name} is left out: {fault}")
        else:
            shapes.append(shape)
    shapes += [_named_place(place, set_of, group.name) for group in groups for place in places_of(group)]
    totals = {group.name: offered_cpus(group) for group in groups}
    used = {use.counter for shape in shapes for use in shape.consumes} - totals.keys()
    return Shapes(
        devices=tuple(shapes),
        counter_sets=_counter_sets(dict.fromkeys(used, MAX_PARTS) | totals, set_of, numbers),
        uses=_uses(units, used, set_of),
        remarks=tuple(dict.fromkeys(texts)),
        groups={group.name: group.near_cpus for group in groups},
    )


def _counter_sets(
    amounts: Mapping[str, int], set_of: Mapping[str, str], numbers: Iterable[str]
) -> tuple[CounterSet, ...]:
    """Return the counters in the sets that they are in, without the sets that have none."""
    in_sets = {name: sorted(counter for counter in amounts if set_of[counter] == name) for name in numbers}
    return tuple(
        CounterSet(name=name, counters={counter: amounts[counter] for counter in counters})
        for name, counters in in_sets.items()
        if counters
    )


def _uses(units: Mapping[str, str], used: Collection[str], set_of: Mapping[str, str]) -> dict[str, CounterUse]:
    """Return what each device takes of its unit's counter, where a shape counts that unit."""
    return {
        name: CounterUse(counter_set=set_of[unit], counter=unit, amount=MAX_PARTS if unit == name else 1)
        for name, unit in units.items()
        if unit in used
    }


def _units(devices: Iterable[Device]) -> dict[str, str]:
    """Map each device to the one that it is cut out of in the end, or to itself."""
    parents = {device.name: device.partition_of for device in devices}
    units: dict[str, str] = {}
    for name in parents:
        unit = name
        seen = {unit}
        while parents.get(unit) and parents[unit] not in seen:
            unit = parents[unit]
            seen.add(unit)
        units[name] = unit
    return units


def _faults(devices: Iterable[Device], units: Mapping[str, str]) -> dict[str, str]:
    """Explain which devices counters cannot guard, by name."""
    users: dict[tuple[str, str], set[str]] = {}
    faults: dict[str, str] = {}
    for device in devices:
        for use in device.consumes:
            users.setdefault((use.counter_set, use.counter), set()).add(units[device.name])
        # Its own and that of the shapes are too many.
        if len({use.counter_set for use in device.consumes}) >= MAX_CONSUMED_SETS:
            faults[units[device.name]] = f"{device.name} takes from {MAX_CONSUMED_SETS} counter sets already"
    for (counter_set, counter), names in sorted(users.items()):
        for name in sorted(names) if len(names) > 1 else ():
            faults.setdefault(name, f"it shares the counter {counter_set}/{counter} with other devices")
    return dict(sorted(faults.items()))


def _socket_bits(inventories: Iterable[Inventory]) -> dict[int, int]:
    bits: dict[int, int] = {}
    for inventory in inventories:
        for device in inventory.devices if inventory.device_class == CPU_CLASS else ():
            for node in device.numa_nodes or () if device.socket is not None else ():
                bits[node] = bits.get(node, 0) | 1 << (device.socket or 0)
    return bits


def _sets(
    of_levels: Iterable[Region], sockets: Mapping[int, int], groups: Iterable[Device]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Give each part a counter set: on two sockets each has its own, so that an autoscaler that looks at
    sets sees a machine of which one socket is free as half used.

    CPUs are counted in the set of their socket, else in one that has room, so that they never divide the
    parts of a shape that has none.
    """
    socket_of = {part.name: _socket(part, sockets) for region in of_levels for part in region.parts}
    ordered = sorted(socket_of, key=lambda name: (socket_of[name], name))
    first = min(filter(None, socket_of.values()), default=0)
    by_socket = groupby(ordered, lambda name: socket_of[name] or first)
    members = [list(names) for _, of_socket in by_socket for names in _chunks(list(of_socket))]
    if len(members) > MAX_CONSUMED_SETS:
        members = [list(names) for names in _chunks(ordered)]
    for group in groups:
        bit = _socket(group, sockets)
        room = [names for names in members if len(names) < MAX_COUNTERS]
        near = [names for names in room if any(socket_of.get(name) == bit for name in names)]
        if not room:
            room = [[]]
            members += room
        (near or room)[0].append(group.name)
    numbers = tuple(f"{SHAPE_CLASS}-{index}" for index in range(len(members)))
    return {name: number for number, names in zip(numbers, members, strict=True) for name in names}, numbers


def _chunks(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[start : start + MAX_COUNTERS] for start in range(0, len(names), MAX_COUNTERS)]


def _socket(part: Device, sockets: Mapping[int, int]) -> int:
    """Return the bit of a part's first socket, or of its first NUMA node where sockets are not known.

    0: neither is known.
    """
    bits = 0
    for node in part.numa_nodes or ():
        bits |= sockets.get(node, 1 << node)
    return bits & -bits


def _shape(
    same: Sequence[Region], set_of: Mapping[str, str], classes: Iterable[str], cpus: Mapping[str, int]
) -> Device:
    """Make the device of regions with the same parts. It is named after the largest of them."""
    largest = same[-1]
    parts = largest.parts
    levels = {region.level for region in same}
    attributes: dict[str, AttributeValue] = {"level": largest.level}
    # Of every level and class, so that a selector never asks for what a shape does not have.
    attributes |= {attribute_of_level(level): level in levels for level in SHAPE_LEVELS}
    capacity: dict[str, int] = {}
    for device_class in classes:
        of_class = [part for part in parts if part.device_class == device_class]
        attributes[f"{device_class}Count"] = len(of_class)
        models = {part.model for part in of_class}
        attributes[f"{device_class}Model"] = models.pop() if len(models) == 1 else ""
    memory = sum(part.capacity.get("memory", 0) for part in parts)
    if memory:
        capacity["memory"] = memory
    if cpus:
        capacity[GROUP_CAPACITY] = sum(cpus.values())
    nodes = NodeSet()
    for part in parts:
        nodes |= part.numa_nodes or NodeSet()
    roots = sorted({part.pcie_root for part in parts if part.pcie_root})
    where = largest.level if largest.level == "machine" else f"{largest.level}-{largest.id}"
    return Device(
        name=_name(where, [part.name for part in parts], cpus),
        device_class=SHAPE_CLASS,
        numa_nodes=nodes or None,
        pcie_root=roots[0] if len(roots) == 1 else "",
        pcie_roots=tuple(roots) if len(roots) > 1 else (),
        attributes=attributes,
        capacity=capacity,
        consumes=tuple(
            CounterUse(counter_set=set_of[name], counter=name, amount=amount)
            for name, amount in {**{part.name: MAX_PARTS for part in parts}, **cpus}.items()
        ),
    )


def _named_place(place: Device, set_of: Mapping[str, str], group: str) -> Device:
    """Make the device of a single CPU, or of a core: a shape whose only part it is."""
    cpus = {group: place.capacity[GROUP_CAPACITY]}
    return structs.replace(
        place,
        name=_name(f"{CPU_CLASS}-{place.name}", (), cpus),
        consumes=(CounterUse(counter_set=set_of[group], counter=group, amount=cpus[group]),),
    )


def _name(where: str, parts: Iterable[str], cpus: Mapping[str, int]) -> str:
    # A name always means exactly these parts. A claim whose shape has others, since a device service is not heard
    # yet or the machine was changed, is refused and not prepared with what is left.
    texts = (*parts, *(f"{group}={count}" for group, count in sorted(cpus.items())))
    digest = sha256(" ".join(texts).encode()).hexdigest()[:_DIGITS]
    return f"{SHAPE_CLASS}-{where}-{digest}"


def _fault(shape: Device) -> str:
    sets = {use.counter_set for use in shape.consumes}
    if len(sets) > MAX_CONSUMED_SETS:
        return f"its parts are in {len(sets)} counter sets, and a device may take from {MAX_CONSUMED_SETS}"
    return "" if is_dns_label(shape.name) else "its name has more than 63 characters"
