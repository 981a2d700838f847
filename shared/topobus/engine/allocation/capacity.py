"""Amounts of devices: shares of a device's capacity, and counters that the partitions of one card
share.

Source: docs/knowledge/dynamic-resource-allocation.md#consumable-capacity;
k8s.io/dynamic-resource-allocation/structured, 1.36.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from topobus.engine.allocation.pools import Candidate, Pool
from topobus.engine.allocation.values import DeviceId, Usage
from topobus.engine.shapes.shapes import is_shape
from topobus.formats.kubernetes.resource import (
    Capacity,
    CapacityRequirements,
    RequestPolicy,
    ValidRange,
)
from topobus.values.quantity import Quantity

__all__ = ["RemainingCounters", "amounts_taken", "fits_capacity", "rivals", "shortage"]


def amounts_taken(candidate: Candidate, asked: CapacityRequirements | None) -> dict[str, Quantity] | None:
    """Compute how much a grant takes of each capacity of the device.

    None when the device lacks the requested capacity, or its policy forbids the amount.
    """
    wanted = {name: Quantity.parse(value) for name, value in asked.requests.items()} if asked is not None else {}
    if wanted.keys() - candidate.device.capacity.keys():
        return None
    taken: dict[str, Quantity] = {}
    for name, capacity in candidate.device.capacity.items():
        amount = _rounded(wanted.get(name), capacity)
        if amount is None or _is_forbidden(amount, capacity.request_policy):
            return None
        taken[name] = amount
    return taken


def fits_capacity(candidate: Candidate, taken: Mapping[str, Quantity], *in_use: Mapping[str, Quantity]) -> bool:
    """Say whether the amounts fit into those that the others leave."""
    return all(
        amount.nano + sum(used[name].nano for used in in_use if name in used) <= candidate.capacity[name].nano
        for name, amount in taken.items()
    )


def shortage(candidate: Candidate, taken: Mapping[str, Quantity] | None, *in_use: Mapping[str, Quantity]) -> str:
    """Describe for people what is short: how much is wanted, what is left, what there is.

    Shapes: taken — None: the device never gives the amount that is asked for.
    """
    if taken is None:
        return "it has no such capacity, or gives no such amount"
    left = {
        name: candidate.capacity[name].nano - sum(used[name].nano for used in in_use if name in used)
        for name in sorted(taken)
    }
    # The first by name of those that are short.
    name = min(left, key=lambda name: left[name] >= taken[name].nano)
    whole = candidate.capacity[name]
    return (
        f"its free capacity is too small: {name}: {taken[name]} wanted, "
        f"{Quantity(max(0, left[name]), whole.form)} left of {whole}"
    )


def rivals(pool: Pool) -> frozenset[DeviceId]:
    """Find the devices of a pool that can exclude each other: they take from a counter that is not
    enough for all of its users. Counters of shapes do not count.
    """
    left = {
        (name, counter): amount.nano for name, counters in pool.counters.items() for counter, amount in counters.items()
    }
    users = [
        (candidate.id, candidate.consumption)
        for candidate in (*pool.candidates, *pool.elsewhere)
        if candidate.device.consumes_counters
    ]
    for _, consumption in users:
        for key, amount in consumption.items():
            left[key] = left.get(key, 0) - amount
    short = {key for key, amount in left.items() if amount < 0 and not is_shape(pool.id.driver, key[0])}
    return frozenset(device for device, consumption in users if not short.isdisjoint(consumption))


class RemainingCounters:
    """The counters of all pools during one search: the amounts that allocated devices and the
    search's own grants leave.

    kubernetes/kubernetes#140434: upstream knows pools by name alone, so two drivers whose pools
    share a name (that of the node, for example) share one account, that of the pool it meets first.
    Mode `compatible` does so as well.
    """

    def __init__(self, pools: tuple[Pool, ...], usage: Usage, *, is_corrected: bool) -> None:
        self._pools = pools
        self._usage = usage
        self._is_corrected = is_corrected
        self._accounts: dict[tuple[str, str] | str, dict[tuple[str, str], int]] = {}

    def take(self, candidate: Candidate) -> bool:
        """Take what the device consumes, or nothing when any counter of its pool would be short."""
        left = self._account(candidate)
        self._add(left, candidate, -1)
        if min(left.values(), default=0) >= 0:
            return True
        self._add(left, candidate, 1)
        return False

    def give_back(self, candidate: Candidate) -> None:
        """Undo a take."""
        self._add(self._account(candidate), candidate, 1)

    def users_of(self, candidate: Candidate) -> tuple[DeviceId, ...]:
        """Name the allocated devices that take what the device lacks, sorted."""
        left = self._account(candidate)
        short = {key for key, amount in candidate.consumption.items() if left.get(key, 0) < amount}
        pool = self._pool_of(candidate)
        return tuple(
            sorted(
                other.id
                for other in (*pool.candidates, *pool.elsewhere)
                if self._is_taken(other) and not short.isdisjoint(other.consumption)
            )
        )

    def count_at_most(self, candidates: Sequence[Candidate]) -> int:
        """Count how many of the devices the counters can serve at most: for each pool by the
        counter that is short first, those that take least of it first.
        """
        accounts: dict[int, tuple[dict[tuple[str, str], int], list[Candidate]]] = {}
        for candidate in candidates:
            left = self._account(candidate)
            accounts.setdefault(id(left), (left, []))[1].append(candidate)
        return sum(
            min((_count_served(users, key, amount) for key, amount in left.items()), default=len(users))
            for left, users in accounts.values()
        )

    def _account(self, candidate: Candidate) -> dict[tuple[str, str], int]:
        """Find what is left of a pool. It is computed when it is first needed."""
        name = candidate.id[:2] if self._is_corrected else candidate.id.pool
        left = self._accounts.get(name)
        if left is None:
            pool = self._pool_of(candidate)
            left = {
                (counters, counter): amount.nano
                for counters, quantities in pool.counters.items()
                for counter, amount in quantities.items()
            }
            for other in (*pool.candidates, *pool.elsewhere):
                if self._is_taken(other):
                    self._add(left, other, -1)
            self._accounts[name] = left
        return left

    def _is_taken(self, candidate: Candidate) -> bool:
        return candidate.id in self._usage.holders or candidate.id in self._usage.consumed

    def _pool_of(self, candidate: Candidate) -> Pool:
        return next(pool for pool in self._pools if pool.id == candidate.id[:2])

    def _add(self, left: dict[tuple[str, str], int], candidate: Candidate, factor: int) -> None:
        for key, amount in candidate.consumption.items():
            if key in left:
                left[key] += factor * amount


def _count_served(users: Sequence[Candidate], key: tuple[str, str], left: int) -> int:
    """Count how many devices a counter serves, those that take least of it first."""
    sums = accumulate(sorted(candidate.consumption.get(key, 0) for candidate in users))
    return sum(taken <= left for taken in sums)


def _rounded(asked: Quantity | None, capacity: Capacity) -> Quantity | None:
    policy = capacity.request_policy
    if asked is None:
        return Quantity.parse(policy.default if policy is not None and policy.default is not None else capacity.value)
    if policy is None:
        return asked
    if policy.valid_range is not None and policy.valid_range.min is not None:
        return _round_in_range(asked, policy.valid_range)
    return next((quantity for quantity in map(Quantity.parse, policy.valid_values) if asked <= quantity), asked)


def _round_in_range(asked: Quantity, span: ValidRange) -> Quantity | None:
    low = Quantity.parse(span.min or 0)
    if asked < low:
        return low
    if span.step is None:
        return asked
    step = Quantity.parse(span.step)
    if step.units <= 0:
        return None
    # Whole units, as upstream without DRAFractionalCapacityRange: fractions round up.
    steps = -(-(asked.units - low.units) // step.units)
    return Quantity.of(low.units + steps * step.units, step.form)


def _is_forbidden(amount: Quantity, policy: RequestPolicy | None) -> bool:
    if policy is None or (policy.default is not None and amount == Quantity.parse(policy.default)):
        return False
    if policy.valid_range is not None:
        span = policy.valid_range
        if span.max is not None and amount > Quantity.parse(span.max):
            return True
        if span.step is None:
            return False
        step = Quantity.parse(span.step).units
        return step <= 0 or (amount.units - Quantity.parse(span.min or 0).units) % step != 0
    return bool(policy.valid_values) and amount not in [
        Quantity.parse(valid_value) for valid_value in policy.valid_values
    ]
