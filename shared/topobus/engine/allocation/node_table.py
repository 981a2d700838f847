"""A node's devices as columns of small integers.

There is one integer for each property that a claim can observe: the values that a selector reads,
how the values of an attribute repeat over the devices, and everything else that is checked. A
claim's view of a node is a tuple of a few of them. Two nodes with equal integers give the same
result for the same claim, with other device names. So for a search a cluster of a thousand nodes of
three kinds is three nodes. Each column is computed at its first use and cached until a slice of the
node changes.

Only a node that shares no pool with other nodes is compared. Pools that nodes share, and incomplete
or invalid ones, are searched node by node.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from functools import cached_property

from topobus.engine.allocation.constraints import attribute_values, has_attribute
from topobus.engine.allocation.cpu_policy import is_policy_cpu
from topobus.engine.allocation.pools import Candidate, Pool, PoolState
from topobus.engine.allocation.values import DeviceId, Node
from topobus.engine.cel.seam import Reads, seen
from topobus.engine.shapes.shape_parts import Parts, counting_in, parts_in
from topobus.formats.messages.codec import encode

__all__ = ["NodeTable", "Numbers"]


class Numbers:
    """Gives equal values equal numbers."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, value: Hashable) -> int:
        """Number a value."""
        return self._known.setdefault(value, len(self._known))

    def __len__(self) -> int:
        return len(self._known)


class NodeTable:
    """The devices of one node, until a slice changes."""

    def __init__(self, node: Node, pools: tuple[Pool, ...], numbers: Numbers) -> None:
        self.node = node
        self.pools = pools
        self.candidates: tuple[Candidate, ...] = tuple(
            candidate for pool in pools if pool.state is PoolState.READY for candidate in pool.candidates
        )
        self._numbers = numbers
        self._columns: dict[Reads | str, int] = {}
        self._fingerprints: dict[Hashable, int] = {}

    @cached_property
    def places(self) -> dict[DeviceId, int]:
        """The position of each device."""
        return {candidate.id: place for place, candidate in enumerate(self.candidates)}

    @cached_property
    def parts(self) -> Parts:
        """The shapes, each with its parts."""
        return parts_in(self.pools)

    @cached_property
    def counting(self) -> frozenset[DeviceId]:
        """The shapes that have CPUs."""
        return counting_in(self.pools)

    @cached_property
    def is_own(self) -> bool:
        """Say whether every pool that the node can reach is its own, and complete."""
        name = self.node.name
        return all(
            pool.state in (PoolState.READY, PoolState.OBSOLETE) and not pool.elsewhere for pool in self.pools
        ) and all(
            candidate.slice.node_name == name and not candidate.slice.per_device_node_selection
            for candidate in self.candidates
        )

    def warm(self) -> None:
        """Compute in advance what the first claim would have to wait for: the facts of each device
        that selectors read.

        A malformed amount is ignored here. The search reports it.
        """
        with suppress(ValueError):
            for candidate in self.candidates:
                _ = candidate.facts
        _ = self._rest, self.places

    def fingerprint(self, reads: tuple[Reads, ...], attributes: tuple[str, ...]) -> int:
        """Number everything that a claim can observe of the node: what its selectors read, and the
        attributes that its constraints compare.

        Cost: a look-up for a claim like an earlier one. O(devices) for each property that is read
                for the first time.
        """
        asked = (reads, attributes)
        number = self._fingerprints.get(asked)
        if number is None:
            columns = [self._column(read) for read in reads]
            patterns = [self._pattern(attribute) for attribute in attributes]
            number = self._fingerprints[asked] = self._numbers.of((asked, self._rest, *columns, *patterns))
        return number

    def _column(self, reads: Reads) -> int:
        """Number the devices' values at one place, in order."""
        number = self._columns.get(reads)
        if number is None:
            number = self._columns[reads] = self._numbers.of(
                tuple([seen(reads, device.facts) for device in self.candidates])
            )
        return number

    def _pattern(self, attribute: str) -> int:
        """Number how an attribute's values repeat over the devices: a constraint asks only which
        are equal, so values are named by their first device.
        """
        number = self._columns.get(attribute)
        if number is None:
            names: dict[Hashable, int] = {}
            pattern: list[Hashable] = []
            for candidate in self.candidates:
                scalars = attribute_values(candidate, attribute, has_lists=False)
                values = scalars or attribute_values(candidate, attribute)
                renamed = tuple([names.setdefault(value, len(names)) for value in sorted(values, key=str)])
                pattern.append((bool(scalars), renamed) if values else has_attribute(candidate, attribute))
            number = self._columns[attribute] = self._numbers.of(tuple(pattern))
        return number

    @cached_property
    def _rest(self) -> int:
        """Number all that is checked besides attributes: pools, counters, capacity, taints,
        binding.

        Without the names of pools and devices.
        """
        names: dict[str, int] = {}
        pools = tuple(
            (pool.id.driver, names.setdefault(pool.id.pool, len(names)), len(pool.candidates), _counters_of(pool))
            for pool in self.pools
        )
        cpus = (
            self.node.cpus if any(is_policy_cpu(candidate, self.node.name) for candidate in self.candidates) else None
        )
        return self._numbers.of((pools, tuple([_rest_of(candidate) for candidate in self.candidates]), cpus))


def _rest_of(candidate: Candidate) -> Hashable:
    device = candidate.device
    if not (
        device.capacity
        or device.consumes_counters
        or device.taints
        or device.binding_conditions
        or device.binding_failure_conditions
    ):
        return candidate.unreadable, device.allow_multiple_allocations, device.binds_to_node
    return (
        candidate.unreadable,
        device.allow_multiple_allocations,
        device.binds_to_node,
        encode(device.capacity),
        encode(device.consumes_counters),
        tuple([(taint.key, taint.value, taint.effect) for taint in device.taints]),
        device.binding_conditions,
        device.binding_failure_conditions,
    )


def _counters_of(pool: Pool) -> Hashable:
    return tuple(
        [
            (name, counter, amount.nano)
            for name, quantities in sorted(pool.counters.items())
            for counter, amount in sorted(quantities.items())
        ]
    )
