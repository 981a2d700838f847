"""Allocates simple claims with bit operations instead of a search: each request takes a number of
free devices, all with one value of one attribute.

A `BitsetPlan` gives for any set of devices in use the devices that the search would choose, or that
none fit. The requests of such claims select disjoint sets of devices, and no two of these devices
take from one counter. So only devices in use, what they leave of the counters, and the one
constraint can block a request, and the first devices of the first value with enough free devices
are the first solution of the search. Every other claim has no plan and is searched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from topobus.engine.allocation.constraints import attribute_values
from topobus.engine.allocation.cpu_policy import is_policy_cpu
from topobus.engine.allocation.node_table import NodeTable
from topobus.engine.allocation.pools import Candidate
from topobus.engine.allocation.tolerations import SILENT_TAINT
from topobus.engine.allocation.values import Mode
from topobus.engine.cel.seam import SelectorCompiler, SelectorError
from topobus.formats.kubernetes.limits import MAX_LIST
from topobus.formats.kubernetes.resource import (
    ClaimSpec,
    DeviceClassSpec,
    ExactRequest,
    Selector,
)
from topobus.formats.kubernetes.tolerations import tolerates
from topobus.values.idset import ids_of_bits

__all__ = ["BitsetPlan", "make_bitset_plan"]


class _Wanted(NamedTuple):
    """A request: the positions of devices that it selects, as bits, and how many it wants."""

    places: int
    number: int


class _Claim(NamedTuple):
    wanted: tuple[_Wanted, ...]
    matched: tuple[int, ...] = ()
    """Requests whose devices must have one value."""
    equals: Mapping[int, int] = {}
    """Place to the places with the same value, as bits; none for a device that has no value."""


class _Counter(NamedTuple):
    """A counter of the node."""

    total: int
    users: tuple[tuple[int, int], ...]
    """Positions of all devices that take from it, as bits, and how much each takes."""
    wanted: tuple[int, int] = (0, 0)
    """The same of the one device that the claims may select."""


class BitsetPlan(NamedTuple):
    """Simple claims on nodes of one kind."""

    claims: tuple[_Claim, ...]
    counters: tuple[_Counter, ...] = ()
    """All of the node, when the claims may select a device that takes from one of them."""

    def solve(self, taken: int) -> tuple[tuple[int, ...], ...] | None:
        """Return each claim's positions in the order of its requests. None when they do not fit.

        Cost: O(requests x values).
        """
        taken |= self._short(taken)
        placed: list[tuple[int, ...]] = []
        for claim in self.claims:
            within = _common(claim, taken)
            if within is None:
                return None
            places: list[int] = []
            for index, requested in enumerate(claim.wanted):
                free = requested.places & ~taken
                if index in claim.matched:
                    free &= within
                chosen = tuple(islice(ids_of_bits(free), requested.number))
                if len(chosen) < requested.number:
                    return None
                places += chosen
            placed.append(tuple(places))
        return tuple(placed)

    def _short(self, taken: int) -> int:
        """Find the devices that the claims may select and for which a counter has too little left.

        A counter of which more is taken than there is leaves nothing of any other, as in the search.
        """
        short, of_all, is_overdrawn = 0, 0, False
        for counter in self.counters:
            left = counter.total - sum(amount * (taken & users).bit_count() for users, amount in counter.users)
            place, amount = counter.wanted
            of_all |= place
            is_overdrawn |= left < 0
            if amount > left:
                short |= place
        return of_all if is_overdrawn else short


def make_bitset_plan(
    table: NodeTable,
    specs: Sequence[ClaimSpec],
    classes: Mapping[str, DeviceClassSpec],
    compiler: SelectorCompiler,
    mode: Mode = Mode.COMPATIBLE,
) -> BitsetPlan | None:
    """Turn claims into bits over a node's devices. None when any of them is not simple there.

    Shapes: mode — in mode `compatible` claims for devices that take from counters are searched, as
            upstream's counters depend on what a search tried before.
    """
    claims: list[_Claim] = []
    seen = 0
    for spec in specs:
        wanted: list[_Wanted] = []
        for request in spec.devices.requests:
            requested = (
                _read(request.exactly, table, classes, compiler)
                if request.exactly is not None and not request.first_available
                else None
            )
            if requested is None or requested.places & seen:
                return None
            seen |= requested.places
            wanted.append(requested)
        claim = _with_constraint(spec, tuple(wanted), table)
        if claim is None or sum(requested.number for requested in wanted) > MAX_LIST:
            return None
        claims.append(claim)
    counters = _counters(table, seen, mode)
    return BitsetPlan(tuple(claims), counters) if counters is not None else None


def _counters(table: NodeTable, places: int, mode: Mode) -> tuple[_Counter, ...] | None:
    """List the node's counters, if devices at these positions take from them.

    None when two of them take from one, when several pools have counters, when a device takes from
    one by shares, and in mode `compatible`.
    """
    paying = [place for place in ids_of_bits(places) if table.candidates[place].consumption]
    pools = [pool for pool in table.pools if pool.counters]
    if not paying:
        return ()
    if len(pools) > 1 or mode is Mode.COMPATIBLE:
        return None
    users: dict[tuple[str, str], dict[int, int]] = {}
    for place, candidate in enumerate(table.candidates):
        if candidate.consumption and candidate.device.allow_multiple_allocations:
            return None
        for key, amount in candidate.consumption.items():
            by_amount = users.setdefault(key, {})
            by_amount[amount] = by_amount.get(amount, 0) | 1 << place
    wanted: dict[tuple[str, str], tuple[int, int]] = {}
    for place in paying:
        for key, amount in table.candidates[place].consumption.items():
            if key in wanted:
                return None
            wanted[key] = 1 << place, amount
    totals = {
        (name, counter): total.nano
        for pool in pools
        for name, of_set in pool.counters.items()
        for counter, total in of_set.items()
    }
    return tuple(
        _Counter(
            total,
            tuple((bits, amount) for amount, bits in users.get(key, {}).items()),
            wanted.get(key, (0, 0)),
        )
        for key, total in totals.items()
    )


def _common(claim: _Claim, taken: int) -> int | None:
    """Find the first value that enough devices of all matched requests have.

    Shapes: result — the positions that have it; -1 without a constraint; None when there is none.
    """
    if not claim.matched:
        return -1
    free = claim.wanted[claim.matched[0]].places & ~taken
    while free:
        lowest = free & -free
        equal = claim.equals.get(lowest.bit_length() - 1, 0)
        if equal and all(
            (claim.wanted[index].places & ~taken & equal).bit_count() >= claim.wanted[index].number
            for index in claim.matched
        ):
            return equal
        free &= ~(equal | lowest)
    return None


def _read(
    exact_request: ExactRequest, table: NodeTable, classes: Mapping[str, DeviceClassSpec], compiler: SelectorCompiler
) -> _Wanted | None:
    device_class = classes.get(exact_request.device_class_name)
    count = 1 if exact_request.count is None else exact_request.count
    if (
        device_class is None
        or exact_request.allocation_mode not in ("", "ExactCount")
        or exact_request.admin_access is not None
        or exact_request.capacity
        or count < 1
    ):
        return None
    places = 0
    for place, candidate in enumerate(table.candidates):
        verdict = _is_selected((*device_class.selectors, *exact_request.selectors), candidate, compiler)
        if verdict is None:
            return None
        if verdict:
            if not _is_plain(candidate) or (table.node.cpus is not None and is_policy_cpu(candidate, table.node.name)):
                return None
            if all(
                any(tolerates(each, taint) for each in exact_request.tolerations) or taint.effect not in _BLOCKING
                for taint in candidate.device.taints
            ):
                places |= 1 << place
    return _Wanted(places, count)


_BLOCKING = ("NoSchedule", "NoExecute")


def _is_selected(selectors: Sequence[Selector], candidate: Candidate, compiler: SelectorCompiler) -> bool | None:
    """Evaluate selectors in order.

    None when one fails, because only a search shows whether it would reach that selector.
    """
    for selector in selectors:
        compiled = compiler.compile(selector.cel.expression) if selector.cel is not None else None
        verdict = (
            compiled.matches(candidate.facts)
            if compiled is not None and not isinstance(compiled, SelectorError)
            else None
        )
        if verdict is None or isinstance(verdict, SelectorError):
            return None
        if not verdict:
            return False
    return True


def _is_plain(candidate: Candidate) -> bool:
    """Say whether a device is allocated as a whole, and its own properties do not show in the
    result.
    """
    device = candidate.device
    return not (
        device.allow_multiple_allocations
        or device.binding_conditions
        or device.binding_failure_conditions
        or candidate.has_policies
        or any(taint.key == SILENT_TAINT for taint in device.taints)
    )


def _with_constraint(spec: ClaimSpec, wanted: tuple[_Wanted, ...], table: NodeTable) -> _Claim | None:
    """Add a claim's one constraint. None when it has other constraints, or values that are
    lists.
    """
    constraints = spec.devices.constraints
    if not constraints:
        return _Claim(wanted)
    constraint, *others = constraints
    attribute = constraint.match_attribute
    if others or attribute is None or constraint.distinct_attribute is not None:
        return None
    named = constraint.requests
    matched = tuple(index for index, request in enumerate(spec.devices.requests) if not named or request.name in named)
    bits: dict[object, int] = {}
    values = [attribute_values(candidate, attribute) for candidate in table.candidates]
    for place, equal in enumerate(values):
        if equal and not attribute_values(table.candidates[place], attribute, has_lists=False):
            return None
        bits[equal] = bits.get(equal, 0) | 1 << place
    return _Claim(wanted, matched, {place: bits[equal] for place, equal in enumerate(values) if equal})
