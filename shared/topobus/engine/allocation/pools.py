"""Lists the devices that a node can reach, by pool, in the order in which the search tries them.

A pool is complete, incomplete, invalid or obsolete. Only its newest generation counts.
Order: pools without binding conditions by (driver, name), then those with; inside a pool slices by
        object name and devices as listed.
Source: docs/knowledge/dynamic-resource-allocation.md#pools;
k8s.io/dynamic-resource-allocation/structured, 1.36.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import chain

from topobus.engine.allocation.node_selectors import node_matches
from topobus.engine.allocation.values import DeviceId, Gate, Node, PoolId
from topobus.engine.cel.seam import DeviceFacts, facts_of, unreadable
from topobus.formats.kubernetes.resource import (
    SliceDevice,
    SliceSpec,
)
from topobus.values.quantity import Quantity

__all__ = ["Candidate", "DeviceViews", "Pool", "PoolState", "Slice", "gather_pools", "reasons_unreadable"]


class PoolState(StrEnum):
    """Whether a pool may be used."""

    READY = "ready"
    INCOMPLETE = "incomplete"
    """Slices of the newest generation are missing: the driver is publishing."""
    INVALID = "invalid"
    OBSOLETE = "obsolete"
    """Another node's slices are of a newer generation, so this node's view is out of date. The pool
    counts as absent, and the reason is reported."""


class DeviceViews:
    """Computes what a search needs of a device.

    A caller with equal devices on many nodes passes a subclass that computes it once for all of
    them.
    """

    def facts(self, driver: str, device: SliceDevice) -> DeviceFacts:
        """Return what selectors see.

        Errors: raises ValueError for a capacity that is no quantity.
        """
        return facts_of(driver, device)

    def unreadable(self, device: SliceDevice) -> tuple[str, str]:
        """Explain why every selector fails on the device, as `reasons_unreadable` does."""
        return reasons_unreadable(device)


_FRESH = DeviceViews()


@dataclass(frozen=True, eq=False)
class Candidate:
    """A device that the node may reach, with what is derived from it once."""

    id: DeviceId
    device: SliceDevice
    slice: SliceSpec
    views: DeviceViews = _FRESH

    @cached_property
    def facts(self) -> DeviceFacts:
        """What selectors see."""
        return self.views.facts(self.id.driver, self.device)

    @cached_property
    def unreadable(self) -> tuple[str, str]:
        """Why every selector fails on the device, without and with list attributes.

        Empty when they do not.
        """
        return self.views.unreadable(self.device)

    @cached_property
    def capacity(self) -> dict[str, Quantity]:
        """The amounts that the device has, by the names it publishes."""
        return {name: Quantity.parse(capacity.value) for name, capacity in self.device.capacity.items()}

    @cached_property
    def consumption(self) -> dict[tuple[str, str], int]:
        """What the device takes, in 1/10^9, by counter set and counter."""
        consumption: dict[tuple[str, str], int] = {}
        for counter_consumption in self.device.consumes_counters:
            for name, counter in counter_consumption.counters.items():
                key = (counter_consumption.counter_set, name)
                consumption[key] = consumption.get(key, 0) + Quantity.parse(counter.value).nano
        return consumption

    @cached_property
    def has_list(self) -> bool:
        """Say whether an attribute is a list: a constraint that upstream takes back stays narrowed by it."""
        return any(attribute.is_list for attribute in self.device.attributes.values())

    @cached_property
    def has_policies(self) -> bool:
        """Say whether a capacity of the device may only be asked for in certain amounts."""
        return any(capacity.request_policy is not None for capacity in self.device.capacity.values())

    def reaches(self, node: Node) -> bool:
        """Say whether a device of a slice with per-device node selection serves this node.

        True for any other slice.
        """
        if not self.slice.per_device_node_selection:
            return True
        return node_matches(
            node, self.device.node_name, self.device.node_selector, is_everywhere=bool(self.device.all_nodes)
        )


@dataclass(frozen=True)
class Slice:
    """A ResourceSlice under its object's name, which orders it in its pool."""

    name: str
    spec: SliceSpec

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The devices, as listed. They depend on no node, so that of several searches the first
        alone derives what all need of them.
        """
        return self.candidates_by(_FRESH)

    def candidates_by(self, views: DeviceViews) -> tuple[Candidate, ...]:
        """Give the devices with a caller's views of them."""
        spec = self.spec
        return tuple(
            [
                Candidate(DeviceId(spec.driver, spec.pool.name, device.name), device, spec, views)
                for device in spec.devices
            ]
        )


@dataclass(frozen=True, eq=False)
class Pool:
    """A pool as this node sees it."""

    id: PoolId
    state: PoolState = PoolState.READY
    why: str = ""
    candidates: tuple[Candidate, ...] = ()
    elsewhere: tuple[Candidate, ...] = ()
    """Devices of the same pool on other nodes: they use up shared counters too."""
    counters: dict[str, dict[str, Quantity]] = field(default_factory=dict)
    """Counter set to counter to the amount that the hardware has."""


def reasons_unreadable(device: SliceDevice) -> tuple[str, str]:
    """Explain why every selector fails on a device, without and with list attributes.

    Empty when they do not.
    """
    without_lists = unreadable(device, has_lists=False)
    # A device that can be read without lists can be read with them.
    return without_lists, without_lists and unreadable(device, has_lists=True)


def gather_pools(
    slices: Sequence[Slice], node: Node, gates: frozenset[Gate], views: DeviceViews = _FRESH
) -> tuple[Pool, ...]:
    """Sort slices into the pools that matter for a node."""
    has_partitions = Gate.PARTITIONABLE_DEVICES in gates
    newest: dict[PoolId, list[Slice]] = {}
    for resource_slice in slices:
        if not _is_relevant(resource_slice.spec, node, has_partitions=has_partitions):
            continue
        pool_id = PoolId(resource_slice.spec.driver, resource_slice.spec.pool.name)
        resource_slices = newest.get(pool_id)
        if resource_slices is None or resource_slices[0].spec.pool.generation < resource_slice.spec.pool.generation:
            newest[pool_id] = [resource_slice]
        elif resource_slices[0].spec.pool.generation == resource_slice.spec.pool.generation:
            resource_slices.append(resource_slice)
    plain: list[Pool] = []
    binding: list[Pool] = []
    obsolete: list[Pool] = []
    for pool_id in sorted(newest):
        pool = _build(pool_id, newest[pool_id], slices, views, has_partitions=has_partitions)
        has_binding = any(candidate.device.binding_conditions for candidate in pool.candidates)
        (obsolete if pool.state is PoolState.OBSOLETE else binding if has_binding else plain).append(pool)
    return (*plain, *binding, *obsolete)


def _is_relevant(spec: SliceSpec, node: Node, *, has_partitions: bool) -> bool:
    if not has_partitions and (spec.per_device_node_selection is not None or spec.shared_counters):
        return False
    if spec.shared_counters:
        return True  # a pool cannot be used without its counters, whatever node they name
    if spec.node_name or spec.all_nodes or spec.node_selector is not None:
        return node_matches(node, spec.node_name, spec.node_selector, is_everywhere=bool(spec.all_nodes))
    return bool(spec.per_device_node_selection) and any(
        node_matches(node, device.node_name, device.node_selector, is_everywhere=bool(device.all_nodes))
        for device in spec.devices
    )


def _build(
    pool_id: PoolId, relevant: list[Slice], slices: Sequence[Slice], views: DeviceViews, *, has_partitions: bool
) -> Pool:
    """Make one pool."""
    wanted = relevant[0].spec.pool.resource_slice_count
    generation = relevant[0].spec.pool.generation
    others: list[Slice] = []
    if len(relevant) != wanted:
        relevant_ids = {id(resource_slice) for resource_slice in relevant}
        for resource_slice in slices:
            if (
                resource_slice.spec.driver != pool_id.driver
                or resource_slice.spec.pool.name != pool_id.pool
                or id(resource_slice) in relevant_ids
            ):
                continue
            if resource_slice.spec.pool.generation > generation:
                why = f"generation {generation} is published here, {resource_slice.spec.pool.generation} elsewhere"
                return Pool(pool_id, PoolState.OBSOLETE, why)
            if resource_slice.spec.pool.generation == generation:
                others.append(resource_slice)
        if len(relevant) + len(others) != wanted:
            why = f"{len(relevant) + len(others)} of {wanted} slices of generation {generation} are published"
            return Pool(pool_id, PoolState.INCOMPLETE, why)
    relevant = sorted(relevant, key=lambda resource_slice: resource_slice.name)
    candidates = _candidates(
        [slice_ for slice_ in relevant if not (has_partitions and slice_.spec.shared_counters)], views
    )
    names = [candidate.id.device for candidate in candidates]
    if len(set(names)) != len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        return Pool(pool_id, PoolState.INVALID, f"two devices are named {twice}")
    if not has_partitions:
        return Pool(pool_id, candidates=candidates)
    elsewhere = _candidates(others, views)
    counters = _counters(relevant, (*candidates, *elsewhere))
    if isinstance(counters, str):
        return Pool(pool_id, PoolState.INVALID, counters)
    return Pool(pool_id, candidates=candidates, elsewhere=elsewhere, counters=counters)


def _counters(slices: Sequence[Slice], users: Sequence[Candidate]) -> dict[str, dict[str, Quantity]] | str:
    """Read a pool's counters, or say what is wrong with them or their users."""
    counters: dict[str, dict[str, Quantity]] = {}
    for resource_slice in slices:
        for counter_set in resource_slice.spec.shared_counters:
            if counter_set.name in counters:
                return f"two counter sets are named {counter_set.name}"
            counters[counter_set.name] = {
                name: Quantity.parse(counter.value) for name, counter in counter_set.counters.items()
            }
    for candidate in users:
        for consumption in candidate.device.consumes_counters:
            missing = consumption.counters.keys() - counters.get(consumption.counter_set, {}).keys()
            if consumption.counter_set not in counters or missing:
                what = f"{consumption.counter_set}/{min(missing)}" if missing else consumption.counter_set
                return f"device {candidate.id.device} uses counter {what}, which the pool has not"
    return counters


def _candidates(slices: Iterable[Slice], views: DeviceViews) -> tuple[Candidate, ...]:
    of_slices = [each.candidates if views is _FRESH else each.candidates_by(views) for each in slices]
    return tuple(chain.from_iterable(of_slices))
