"""Hints as a rule instead of a list: how much of a resource is where, and how much is wanted.

A list of hints has up to 2^n - 1 entries; the rule behind it is a handful of numbers. Everything the merge needs follows from the rule: whether a mask is
feasible, how narrow a feasible mask can be, how narrow the capacity allows. The lists that kubelet would make come out of `list_hints`.
Source: as `hints`, whose rules these are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations, islice

from msgspec import Struct

from topobus.domain.alignment.merge.mask_algebra import MaskAlgebra, members
from topobus.domain.hint import Hint
from topobus.domain.idset import NodeSet

__all__ = ["BITSET_LIMIT", "HintRule", "Unit", "feasible_masks", "list_hints", "pack", "positions", "sample_hints", "unpack"]

BITSET_LIMIT = 16
"""Nodes up to which families are computed as bitsets (2^16 bits are 8 KiB)."""

# Beyond BITSET_LIMIT and with devices on several nodes, the narrowest feasible mask is searched by trying so many masks at most.
_TRIES = 100_000
# Nodes up to which a record lists all hints (63), and masks looked at for a record beyond.
_SMALL = 6
_SAMPLE_TRIES = 500


class Unit(Struct, frozen=True):
    """Amounts of one resource in one place: on the NUMA nodes `where` (bits of ids); on several nodes it counts when any is in the mask."""

    where: int
    total: int
    free: int


class HintRule(Struct, frozen=True, kw_only=True):
    """The hints of one resource: all masks of candidate nodes that touch enough free units and every place that must be touched."""

    units: tuple[Unit, ...]
    request: int
    candidates: int
    """Bits of the ids of candidate nodes."""
    musts: tuple[int, ...] = ()
    """Places (bits of ids) of reusable units; each must be touched; an empty place cannot be."""
    sockets: tuple[int, ...] = ()
    """Bits of the ids of each socket's nodes, with option align-by-socket only: masks on as few sockets as the narrowest masks need on average are
    preferred, too."""

    def free_in(self, mask: int) -> int:
        """Free units that the mask touches."""
        return sum(unit.free for unit in self.units if unit.where & mask)

    def has(self, mask: int) -> bool:
        """Say whether the mask (bits of ids) is one of the hints."""
        return (
            bool(mask) and mask & ~self.candidates == 0 and self.free_in(mask) >= self.request and all(must & mask for must in self.musts)
        )

    @property
    def is_empty(self) -> bool:
        """Say whether there is no hint at all. The widest mask decides, for hints only get more feasible with width."""
        return not self.has(self.candidates)

    @property
    def is_simple(self) -> bool:
        """Say whether every unit is on one node: then sums over nodes are all there is to it."""
        return all(unit.where & (unit.where - 1) == 0 for unit in self.units)

    def narrowest(self) -> int:
        """The width that makes a hint preferred: the fewest nodes that have enough in total; all candidates when none have."""
        found = self._fewest([(unit.where, unit.total) for unit in self.units], ())
        return self.candidates.bit_count() if found is None else found

    def wanted_sockets(self, narrowest: int) -> int:
        """On how many sockets a mask may lie to be preferred by align-by-socket."""
        nodes = self.candidates.bit_count()
        # kubelet divides by this; more sockets than nodes makes it zero, and kubelet refuses the option there.
        return -(-narrowest // max(nodes // len(self.sockets), 1))

    def is_preferred(self, mask: int, narrowest: int) -> bool:
        """Say whether a hint is preferred; `narrowest` is passed in, for it is asked of many masks."""
        if mask.bit_count() == narrowest:
            return True
        return bool(self.sockets) and sum(1 for socket in self.sockets if socket & mask) == self.wanted_sockets(narrowest)

    def width(self) -> int | None:
        """The fewest nodes of any hint; None when there is none."""
        return self._fewest([(unit.where, unit.free) for unit in self.units], self.musts)

    def _fewest(self, amounts: Sequence[tuple[int, int]], musts: Sequence[int]) -> int | None:
        if sum(amount for where, amount in amounts if where & self.candidates) < self.request or not all(
            must & self.candidates for must in musts
        ):
            return None
        inside = [(where & self.candidates, amount) for where, amount in amounts if where & self.candidates and amount]
        if all(where & (where - 1) == 0 for where, _ in inside) and all(must & (must - 1) == 0 for must in musts):
            return _fewest_simple(inside, musts, self.request)
        order = positions(self.candidates)
        if len(order) <= BITSET_LIMIT:
            universe = MaskAlgebra(len(order))
            family = universe.at_least([(pack(where, order), amount) for where, amount in inside], self.request)
            for must in musts:
                family &= universe.touching(pack(must, order))
            return next((size for size, layer in enumerate(universe.layers) if size and layer & family), None)
        return self._fewest_by_trying(inside, musts)

    def _fewest_by_trying(self, inside: Sequence[tuple[int, int]], musts: Sequence[int]) -> int:
        """Devices on several nodes and more nodes than a bitset holds: narrow masks first, within a budget; then all candidates."""
        tries = _TRIES
        bits = [1 << position for position in positions(self.candidates)]
        for size in range(1, len(bits)):
            for chosen in combinations(bits, size):
                tries -= 1
                if tries < 0:
                    return len(bits)
                mask = sum(chosen)
                if sum(amount for where, amount in inside if where & mask) >= self.request and all(must & mask for must in musts):
                    return size
        return len(bits)


def _fewest_simple(inside: Sequence[tuple[int, int]], musts: Sequence[int], request: int) -> int:
    by_node: dict[int, int] = {}
    for where, amount in inside:
        by_node[where] = by_node.get(where, 0) + amount
    forced = set(musts)
    have = sum(by_node.pop(must, 0) for must in forced)
    count = len(forced)
    for amount in sorted(by_node.values(), reverse=True):
        if have >= request and count:
            break
        have += amount
        count += 1
    return max(count, 1)


def positions(bits: int) -> tuple[int, ...]:
    """Ids in a bitset, ascending: the position of an id in the tuple is its position in packed masks."""
    return NodeSet.from_bits(bits).ids


def pack(bits: int, order: Sequence[int]) -> int:
    """Turn bits of ids into bits of positions; ids that have no position are dropped."""
    packed = 0
    for position, one in enumerate(order):
        packed |= (bits >> one & 1) << position
    return packed


def unpack(packed: int, order: Sequence[int]) -> int:
    """Turn bits of positions into bits of ids."""
    bits = 0
    for position, one in enumerate(order):
        bits |= (packed >> position & 1) << one
    return bits


def feasible_masks(family: HintRule) -> Iterator[int]:
    """All hints' masks (bits of ids), by width, then by ids, as kubelet lists them.

    Beyond BITSET_LIMIT nodes the list is cut: the narrowest ones that a bounded walk finds, then the widest. Merging never needs the list.
    """
    order = positions(family.candidates)
    if len(order) <= BITSET_LIMIT:
        universe = MaskAlgebra(len(order))
        found = universe.at_least([(pack(unit.where, order), unit.free) for unit in family.units], family.request)
        for must in family.musts:
            found &= universe.touching(pack(must, order))
        for layer in universe.layers[1:]:
            yield from sorted((unpack(member, order) for member in members(found & layer)), key=lambda bits: NodeSet.from_bits(bits).ids)
        return
    if family.is_empty:
        return
    tries = _TRIES
    for size in range(family.width() or 1, len(order)):
        for chosen in combinations(order, size):
            tries -= 1
            mask = sum(1 << one for one in chosen)
            if family.has(mask):
                yield mask
            if tries < 0:
                yield family.candidates
                return
    yield family.candidates


def list_hints(family: HintRule) -> tuple[Hint, ...]:
    """Make the list that kubelet would make."""
    width = family.narrowest()
    return tuple(Hint(NodeSet.from_bits(mask), family.is_preferred(mask, width)) for mask in feasible_masks(family))


def sample_hints(family: HintRule, limit: int) -> tuple[tuple[Hint, ...], int]:
    """Give the first hints of kubelet's list, and at most how many there are beyond; cheap on any machine."""
    nodes = family.candidates.bit_count()
    if nodes <= _SMALL:
        hints = list_hints(family)
        return hints[:limit], len(hints[limit:])
    width = family.narrowest()
    order = positions(family.candidates)
    masks: list[int] = []
    for chosen in islice(
        chain.from_iterable(combinations(order, size) for size in range(family.width() or nodes + 1, nodes + 1)), _SAMPLE_TRIES
    ):
        mask = sum(1 << one for one in chosen)
        if family.has(mask):
            masks.append(mask)
            if len(masks) == limit:
                break
    hints = tuple(Hint(NodeSet.from_bits(mask), family.is_preferred(mask, width)) for mask in masks)
    return hints, 0 if family.is_empty else (1 << nodes) - 1 - len(hints)
