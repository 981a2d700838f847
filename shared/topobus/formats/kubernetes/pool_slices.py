"""Cuts the devices of one driver and node into ResourceSlices, as the gateway publishes them and as
`topobus slices` prints them before the node exists.

Devices and counters lie in slices of their own (resource.k8s.io/v1 since Kubernetes 1.35). The
index of a slice is part of its name: kube-scheduler tries pools in the order of those names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from topobus.formats.kubernetes.limits import check_slice
from topobus.formats.kubernetes.resource import CounterSet, Pool, SliceDevice, SliceSpec
from topobus.formats.kubernetes.slices import COUNTER_SETS_PER_SLICE, DEVICES_PER_SLICE

__all__ = ["COUNTERS_INDEX", "name_prefix", "pool_slices", "publishable"]

COUNTERS_INDEX = 0xF00
"""Index of the first slice of counters: far behind the devices', so that a pool that grows changes
none of them."""


def pool_slices(
    driver: str, node: str, devices: Sequence[SliceDevice], counter_sets: Sequence[CounterSet] = (), generation: int = 1
) -> dict[int, SliceSpec]:
    """Cut a pool into slices, by index.

    A pool without devices has one empty slice, which states that there are none: without a slice
    a scheduler cannot know that the driver has looked.

    >>> [*pool_slices("gpu.topobus.dev", "node-a", [SliceDevice(name=f"gpu-{n}") for n in range(65)])]
    [0, 1]
    """
    starts = range(0, max(len(devices), 1), DEVICES_PER_SLICE)
    shown = {index: devices[start : start + DEVICES_PER_SLICE] for index, start in enumerate(starts)}
    counted = {
        index: counter_sets[start : start + COUNTER_SETS_PER_SLICE]
        for index, start in enumerate(range(0, len(counter_sets), COUNTER_SETS_PER_SLICE), start=COUNTERS_INDEX)
    }
    pool = Pool(name=node, generation=generation, resource_slice_count=len(shown) + len(counted))
    return {
        index: SliceSpec(
            driver=driver,
            node_name=node,
            pool=pool,
            devices=tuple(shown.get(index, ())),
            shared_counters=tuple(counted.get(index, ())),
        )
        for index in (*shown, *counted)
    }


def name_prefix(index: int, spec: SliceSpec) -> str:
    """Name a slice up to what the server adds.

    The server cuts a long name at its end before it adds five random characters, so the index is
    in front. Three hexadecimal digits are enough: 3,840 slices of 64 devices.
    """
    return f"{index:03x}-{spec.driver}-{spec.node_name}-"


def publishable(devices: Iterable[SliceDevice]) -> tuple[tuple[SliceDevice, ...], dict[str, str]]:
    """Separate the devices that a server accepts from those that break one of its limits, for which
    it would refuse the whole slice.

    Shapes: result — the accepted ones, and name to what is wrong with each other one.
    """
    good: dict[str, SliceDevice] = {}
    bad: dict[str, str] = {}
    for device in devices:
        spec = SliceSpec(
            driver="a.topobus.dev", node_name="a", pool=Pool(name="a", resource_slice_count=1), devices=(device,)
        )
        problems = [str(problem).removeprefix("spec.devices[0].") for problem in check_slice(spec)]
        if device.name in good:
            problems.append(f"there are two devices named {device.name}")
        if problems:
            bad.setdefault(device.name, "; ".join(problems))
        else:
            good[device.name] = device
    return tuple(good.values()), bad
