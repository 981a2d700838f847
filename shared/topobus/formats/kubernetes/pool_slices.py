"""Cuts the devices of one pool into ResourceSlices, as the gateway publishes them, as `topobus
slices` prints them before the node exists, and as the stand-alone controller allocates from them.

Devices and counters lie in slices of their own (resource.k8s.io/v1 since Kubernetes 1.35). The
index of a slice is part of its name: kube-scheduler tries pools in the order of those names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from msgspec import structs

from topobus.formats.kubernetes.limits import check_slice
from topobus.formats.kubernetes.resource import CounterSet, Pool, SliceDevice, SliceSpec
from topobus.formats.kubernetes.slices import COUNTER_SETS_PER_SLICE, DEVICES_PER_SLICE
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import DRIVER, class_of_device, node_of_pool

__all__ = ["COUNTERS_INDEX", "name_prefix", "newest_of_pool", "own_part", "pool_slices", "publishable"]

COUNTERS_INDEX = 0xF00
"""Index of the first slice of counters: far behind the devices', so that a pool that grows changes
none of them."""


def pool_slices(
    pool: str, devices: Sequence[SliceDevice], counter_sets: Sequence[CounterSet] = (), generation: int = 1
) -> dict[int, SliceSpec]:
    """Cut a pool into slices, by index.

    A slice has devices of one class, so that a fault of one class changes no slice of another. A
    pool without devices has one empty slice, which states that there are none: without a slice a
    scheduler cannot know that the driver has looked.

    Shapes: devices — those of a class beside each other.

    >>> [*pool_slices("node-a", [SliceDevice(name=f"gpu-{n}") for n in range(65)] + [SliceDevice(name="nic-0")])]
    [0, 1, 2]
    """
    shown: dict[int, Sequence[SliceDevice]] = {}
    for _, of_class in groupby(devices, lambda device: class_of_device(DRIVER, device.name)):
        members = tuple(of_class)
        for start in range(0, len(members), DEVICES_PER_SLICE):
            shown[len(shown)] = members[start : start + DEVICES_PER_SLICE]
    shown = shown or {0: ()}
    counted = {
        index: counter_sets[start : start + COUNTER_SETS_PER_SLICE]
        for index, start in enumerate(range(0, len(counter_sets), COUNTER_SETS_PER_SLICE), start=COUNTERS_INDEX)
    }
    about = Pool(name=pool, generation=generation, resource_slice_count=len(shown) + len(counted))
    return {
        index: SliceSpec(
            driver=DRIVER,
            node_name=node_of_pool(pool),
            pool=about,
            devices=tuple(shown.get(index, ())),
            shared_counters=tuple(counted.get(index, ())),
        )
        for index in (*shown, *counted)
    }


def newest_of_pool(specs: Iterable[SliceSpec]) -> tuple[tuple[SliceDevice, ...], tuple[CounterSet, ...]]:
    """List the devices and counter sets of a pool's slices, each once: a write that was interrupted
    leaves a device also in a slice of an older generation.
    """
    devices: dict[str, SliceDevice] = {}
    counter_sets: dict[str, CounterSet] = {}
    for spec in sorted(specs, key=lambda spec: -spec.pool.generation):
        for device in spec.devices:
            devices.setdefault(device.name, device)
        for counter_set in spec.shared_counters:
            counter_sets.setdefault(counter_set.name, counter_set)
    return tuple(devices.values()), tuple(counter_sets.values())


def name_prefix(index: int, spec: SliceSpec) -> str:
    """Name a slice up to what the server adds.

    The server cuts a long name at its end before it adds five random characters, so the index is
    in front. Three hexadecimal digits are enough: 3,840 slices of 64 devices.
    """
    return f"{index:03x}-{spec.driver}-{spec.pool.name.replace('/', '-')}-"


def own_part(inventory: Inventory) -> tuple[Inventory, dict[str, str]]:
    """Leave out what could be taken for another class's, or would make the whole pool invalid and
    with it all classes of the node.

    Shapes: result — the inventory without it, and name to what is wrong with each other device.
    """
    device_class = inventory.device_class
    counter_sets = {
        counter_set.name: counter_set
        for counter_set in inventory.counter_sets
        if class_of_device(DRIVER, counter_set.name) == device_class
    }
    devices: dict[str, Device] = {}
    bad: dict[str, str] = {}
    for device in inventory.devices:
        strange = [
            f"{use.counter_set}/{use.counter}"
            for use in device.consumes
            if use.counter_set not in counter_sets or use.counter not in counter_sets[use.counter_set].counters
        ]
        if class_of_device(DRIVER, device.name) != device_class or device.device_class != device_class:
            bad[device.name] = f"its name and class are not those of a device of class {device_class}"
        elif device.name in devices:
            bad[device.name] = f"there are two devices named {device.name}"
        elif strange:
            bad[device.name] = f"it consumes from {', '.join(strange)}, which class {device_class} has not"
        else:
            devices[device.name] = device
    kept = structs.replace(inventory, devices=tuple(devices.values()), counter_sets=tuple(counter_sets.values()))
    return kept, bad


def publishable(devices: Iterable[SliceDevice]) -> tuple[tuple[SliceDevice, ...], dict[str, str]]:
    """Separate the devices that a server accepts from those that break one of its limits, for which
    it would refuse the whole slice.

    Shapes: result — the accepted ones, and name to what is wrong with each other one.
    """
    good: dict[str, SliceDevice] = {}
    bad: dict[str, str] = {}
    for device in devices:
        spec = SliceSpec(driver=DRIVER, node_name="a", pool=Pool(name="a", resource_slice_count=1), devices=(device,))
        problems = [str(problem).removeprefix("spec.devices[0].") for problem in check_slice(spec)]
        if problems:
            bad.setdefault(device.name, "; ".join(problems))
        else:
            good[device.name] = device
    return tuple(good.values()), bad
