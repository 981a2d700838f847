"""Adds a node's shapes to the devices of its pool, as slices list them.

A shape has the taints of its parts: a sick part makes it sick, a part held by a pod without a claim
occupies it. A shape of which a part is not listed is not listed either. Groups of CPUs that are counted
are in no pool: claims have their CPUs by shapes and places.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType

from msgspec import Struct, structs

from topobus.engine.shapes.shapes import Shapes, is_shape
from topobus.formats.kubernetes.limit_rules import MAX_CONSUMED_SETS
from topobus.formats.kubernetes.pool_slices import newest_of_pool
from topobus.formats.kubernetes.resource import Counter, CounterConsumption, CounterSet, SliceDevice, SliceSpec, Taint
from topobus.formats.kubernetes.slices import HEALTH_REASON, HEALTH_TAINT, consumption, shared_counters, slice_device
from topobus.values.counters import CounterSet as CountedSet
from topobus.values.dra_names import CPU_CLASS, DRIVER, class_of_device
from topobus.values.idset import CpuSet
from topobus.values.quantity import Quantity

__all__ = [
    "CHANGED_TAINT",
    "SliceShapes",
    "cpus_of_shape",
    "parts_of",
    "published_shapes",
    "slice_shapes",
    "with_shapes",
    "without_groups",
]

CHANGED_TAINT = "topobus.dev/changed"
"""On a shape that a claim has and that the machine no longer has."""


class SliceShapes(Struct, frozen=True, kw_only=True):
    """The shapes of a node as slices list them."""

    devices: tuple[SliceDevice, ...] = ()
    """Without the taints of their parts."""
    counter_sets: tuple[CounterSet, ...] = ()
    uses: dict[str, CounterConsumption] = {}
    """What each other device takes from the counter sets."""
    groups: dict[str, CpuSet] = {}
    """The groups of CPUs that are counted, with those of their CPUs that claims may have. As slices tell
    them, with none."""

    def keeping(self, published: Iterable[SliceDevice], held: AbstractSet[str]) -> SliceShapes:
        """Keep published shapes that the machine no longer has, as long as a claim holds one of their parts.

        Shapes: held — the devices that claims hold, and the groups of which they have CPUs.
        Without them a scheduler, which counts what allocated devices take, would see the parts as
        free. A part that no shape counts now is guarded by the node's ledger alone.
        """
        names = {device.name for device in self.devices}
        set_of = {counter: counter_set.name for counter_set in self.counter_sets for counter in counter_set.counters}
        kept = [
            structs.replace(device, consumes_counters=counted, taints=(Taint(key=CHANGED_TAINT, effect="NoSchedule"),))
            for device in published
            if device.name not in names
            and not held.isdisjoint(_counters_of(device))
            and (counted := _counted(device, set_of))
        ]
        return structs.replace(self, devices=(*self.devices, *kept))


def slice_shapes(shapes: Shapes) -> SliceShapes:
    """Convert a node's shapes."""
    return SliceShapes(
        devices=tuple(map(slice_device, shapes.devices)),
        counter_sets=shared_counters(shapes.counter_sets),
        uses={name: consumption((use,))[0] for name, use in shapes.uses.items()},
        groups=shapes.groups,
    )


def published_shapes(specs: Iterable[SliceSpec]) -> SliceShapes:
    """Read the shapes of a node from its slices, for when not all of its devices are known."""
    devices, counter_sets = newest_of_pool(specs)
    of_shapes = tuple(counter_set for counter_set in counter_sets if is_shape(DRIVER, counter_set.name))
    return SliceShapes(
        devices=tuple(map(_without_state, filter(lambda device: is_shape(DRIVER, device.name), devices))),
        counter_sets=of_shapes,
        groups={name: CpuSet() for counter_set in of_shapes for name in counter_set.counters if _is_group(name)},
        uses={
            device.name: consumed
            for device in devices
            if not is_shape(DRIVER, device.name)
            for consumed in device.consumes_counters
            if is_shape(DRIVER, consumed.counter_set)
        },
    )


def with_shapes(
    shapes: SliceShapes,
    devices: Sequence[SliceDevice],
    counter_sets: Sequence[CounterSet] = (),
    *,
    cpus: Sequence[SliceDevice] | None = None,
    left: Mapping[str, int] = MappingProxyType({}),
) -> tuple[tuple[SliceDevice, ...], tuple[CounterSet, ...]]:
    """Add shapes to the other devices of a pool.

    Shapes: devices, counter_sets — those of all classes; cpus — the devices of class `cpu`, with their state
            (None: they are not known now, and shapes with CPUs keep the state that they have); left — group
            to how many CPUs claims have or can have, where that is not all; result — the same, with shapes
            last.
    """
    if not shapes.devices:
        return tuple(devices), tuple(counter_sets)
    by_name = {device.name: device for device in (*devices, *(cpus or ()))}
    counting = [
        structs.replace(device, consumes_counters=(*device.consumes_counters, shapes.uses[device.name]))
        if device.name in shapes.uses
        else device
        for device in devices
    ]
    listed = [
        _with_state(shape, [by_name[part] for part in parts])
        for shape in shapes.devices
        if by_name.keys() >= set(parts := parts_of(shape) if cpus is None else _counters_of(shape))
    ]
    return (*counting, *listed), (*counter_sets, *(_with_left(each, left) for each in shapes.counter_sets))


def without_groups(devices: Iterable[SliceDevice], groups: Collection[str]) -> tuple[SliceDevice, ...]:
    """Leave out the groups of CPUs that are counted, whose CPUs claims have by shapes and places alone."""
    return tuple(device for device in devices if device.name not in groups)


def parts_of(shape: SliceDevice) -> tuple[str, ...]:
    """Name the devices that are parts of a shape, sorted: its counters have their names.

    CPUs are no such parts. A single CPU has none.
    """
    return tuple(name for name in _counters_of(shape) if not _is_group(name))


def cpus_of_shape(shape: SliceDevice) -> dict[str, int]:
    """Say how many CPUs of which groups a shape has."""
    return {
        name: Quantity.parse(counter.value).nano // 10**9
        for consumed in shape.consumes_counters
        for name, counter in consumed.counters.items()
        if _is_group(name)
    }


def _counters_of(shape: SliceDevice) -> tuple[str, ...]:
    return tuple(sorted(name for consumed in shape.consumes_counters for name in consumed.counters))


def _is_group(counter: str) -> bool:
    return class_of_device(DRIVER, counter) == CPU_CLASS


def _with_left(counter_set: CounterSet, left: Mapping[str, int]) -> CounterSet:
    changed = {name: left[name] for name in counter_set.counters if name in left}
    (counted,) = shared_counters([CountedSet(name=counter_set.name, counters=changed)])
    return structs.replace(counter_set, counters={**counter_set.counters, **counted.counters})


def _counted(shape: SliceDevice, set_of: Mapping[str, str]) -> tuple[CounterConsumption, ...]:
    """Let a shape take what it took from the counters that there are now."""
    by_set: dict[str, dict[str, Counter]] = {}
    for consumed in shape.consumes_counters:
        for name, counter in consumed.counters.items():
            if name in set_of:
                by_set.setdefault(set_of[name], {})[name] = counter
    # Parts that lie in more sets than a device may take from are guarded by the node's ledger alone.
    largest = sorted(by_set, key=lambda name: (-len(by_set[name]), name))[:MAX_CONSUMED_SETS]
    return tuple(CounterConsumption(counter_set=name, counters=by_set[name]) for name in sorted(largest))


def _without_state(shape: SliceDevice) -> SliceDevice:
    if cpus_of_shape(shape):
        return shape  # the state of its CPUs may not be known
    return structs.replace(
        shape,
        attributes={name: value for name, value in shape.attributes.items() if name != HEALTH_REASON},
        taints=tuple(taint for taint in shape.taints if taint.key == CHANGED_TAINT),
    )


def _with_state(shape: SliceDevice, parts: Iterable[SliceDevice]) -> SliceDevice:
    """Give a shape the taints of its parts, the stronger of two with one key, and the reason of that
    for its health.
    """
    taints = {taint.key: taint for taint in shape.taints}
    attributes = shape.attributes
    for part in parts:
        for taint in part.taints:
            same_key = taints.get(taint.key)
            if same_key is None or (taint.effect == "NoExecute" and same_key.effect != "NoExecute"):
                taints[taint.key] = taint
                if taint.key == HEALTH_TAINT:
                    reason = {name: value for name, value in part.attributes.items() if name == HEALTH_REASON}
                    attributes = shape.attributes | reason
    if not taints:
        return shape
    return structs.replace(shape, attributes=attributes, taints=tuple(taints[key] for key in sorted(taints)))
