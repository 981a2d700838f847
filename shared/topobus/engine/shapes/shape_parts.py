"""Replaces shapes by their parts: in an allocation for the node's ledger and alignment, which know
parts only, and among the devices in use.

The parts are those that the node's slices name. An allocation may have a shape that they no longer
list: it stays a shape here. CPUs are no parts here: which ones a shape has is decided when its claim is
prepared, so there is nothing to hold before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import structs

from topobus.engine.allocation.pools import Pool, Slice
from topobus.engine.allocation.values import DeviceId
from topobus.engine.shapes.in_slices import cpus_of_shape, parts_of
from topobus.engine.shapes.shapes import is_shape
from topobus.formats.kubernetes.resource import AllocationResult, SliceDevice

__all__ = ["Parts", "counting_in", "in_parts", "in_use", "parts_in", "parts_in_slices", "shapes_left", "without_shapes"]

Parts = Mapping[DeviceId, tuple[DeviceId, ...]]
"""Shape to its parts, sorted. A single CPU has none."""


def parts_in(pools: Iterable[Pool]) -> Parts:
    """Find the shapes of pools, with their parts."""
    return _parts((candidate.id, candidate.device) for pool in pools for candidate in pool.candidates)


def parts_in_slices(slices: Iterable[Slice]) -> Parts:
    """Find the shapes that slices list, with their parts."""
    return _parts(
        (DeviceId(each.spec.driver, each.spec.pool.name, device.name), device)
        for each in slices
        for device in each.spec.devices
        if device.consumes_counters
    )


def without_shapes(allocation: AllocationResult, parts: Parts) -> AllocationResult:
    """Grant the parts of each shape as the shape was granted."""
    results = tuple(
        structs.replace(granted, device=part.device)
        for granted in allocation.devices.results
        for part in parts.get(DeviceId.of(granted), (DeviceId.of(granted),))
    )
    return structs.replace(allocation, devices=structs.replace(allocation.devices, results=results))


def shapes_left(allocation: AllocationResult, parts: Parts) -> tuple[str, ...]:
    """Name the shapes of an allocation whose parts are unknown."""
    return tuple(
        granted.device
        for granted in allocation.devices.results
        if is_shape(granted.driver, granted.device) and DeviceId.of(granted) not in parts
    )


def in_parts(holders: Mapping[DeviceId, str], parts: Parts) -> dict[DeviceId, str]:
    """Let the holder of a shape hold its parts in its place.

    A shape in use and its parts in use would take the same counters twice.
    """
    return {part: holder for device, holder in holders.items() for part in parts.get(device, (device,))}


def counting_in(pools: Iterable[Pool]) -> frozenset[DeviceId]:
    """Find the shapes of pools that have CPUs."""
    return frozenset(
        candidate.id
        for pool in pools
        for candidate in pool.candidates
        if is_shape(candidate.id.driver, candidate.id.device) and cpus_of_shape(candidate.device)
    )


def in_use(
    allocated: Mapping[DeviceId, str], held: Mapping[DeviceId, str], parts: Parts, counting: Collection[DeviceId]
) -> dict[DeviceId, str]:
    """Join what claims were allocated with what the node's ledger holds.

    Shapes: allocated, held — device to holder; counting — the shapes that have CPUs.
    A shape with CPUs is in use itself and its parts are not, because nothing else takes its CPUs from
    their counter. Every other shape is in use by its parts, as the ledger holds it.
    """
    whole = {device: holder for device, holder in allocated.items() if device in counting}
    of_parts = in_parts({device: holder for device, holder in allocated.items() if device not in whole}, parts)
    covered = {part for device in whole for part in parts.get(device, ())}
    return {**of_parts, **{device: holder for device, holder in held.items() if device not in covered}, **whole}


def _parts(devices: Iterable[tuple[DeviceId, SliceDevice]]) -> Parts:
    return {
        device_id: tuple(device_id._replace(device=part) for part in parts_of(device))
        for device_id, device in devices
        if is_shape(device_id.driver, device_id.device)
    }
