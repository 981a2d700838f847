"""Hints as a rule instead of a list: how much of a resource each node has, and how much is wanted.

A list of hints has up to 2^n - 1 entries. The rule behind it is a handful of numbers, from which
everything that the merge needs can be computed: whether a mask is a hint, how narrow hints can be,
how narrow the capacity allows, and all hints inside a set of nodes as one bitset.

The masks of a rule are the sets of *combinable* nodes that hold enough (they only get more with
width), and a few *extras* besides. CPUs and devices have no extras. Memory has them for nodes that
hold something already (docs/knowledge/topology-merge.md#lemma-c). Memory asks for several kinds at
once: their amounts are side by side in one integer, a lane each, with one bit above every lane but
the last that shows where a subtraction went below zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, combinations, islice
from math import comb
from typing import Any, Self, TypeVar, overload

from msgspec import Struct

from topobus.engine.alignment.merge.mask_algebra import BITSET_LIMIT, MaskAlgebra, members, pack, positions, unpack
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet

__all__ = ["HintRule", "Unit", "list_hints", "sample_hints"]

# Sets of nodes of one size that are tried beyond BITSET_LIMIT, where sums do not give the narrowest
# one. After them a greedy choice decides.
_TRIES = 20_000
# Sets listed beyond BITSET_LIMIT at most: kubelet's own list would have 2^17 and more.
_LISTED = 100_000
# Nodes up to which a record lists all hints (63), and sets looked at for a record beyond.
_SMALL = 6
_SAMPLED = 500


T = TypeVar("T")


class _lazy(cached_property[T]):  # noqa: N801
    """A `cached_property` without the lock that Python 3.11 takes each time one is made (3.12 has
    none): the lock costs as much as most of what is computed here.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...

    def __get__(self, instance: object, owner: type[Any] | None = None) -> Self | T:
        if instance is None or self.attrname is None:
            return self
        value = instance.__dict__[self.attrname] = self.func(instance)
        return value


class Unit(Struct, frozen=True):
    """Amounts of one resource in one place: on the NUMA nodes `where` (bits of ids).

    On several nodes it counts when any is in the mask.
    """

    where: int
    total: int
    free: int


class HintRule(Struct, frozen=True, kw_only=True, dict=True):
    """The hints of one resource: all sets of combinable nodes that touch enough free units and
    every place that must be touched, and the extras.
    """

    units: tuple[Unit, ...]
    request: int
    candidates: int
    """Bits of the ids of the nodes that kubelet looks at for this resource."""
    musts: tuple[int, ...] = ()
    """Places (bits of ids) of reusable units; each must be touched; an empty place cannot be."""
    sockets: tuple[int, ...] = ()
    """Bits of the ids of each socket's nodes, with option align-by-socket only: masks on as few
    sockets as the narrowest masks need on average are also preferred."""
    combinable: int = -1
    """Bits of the candidates that may be combined freely (-1: all of them)."""
    least: int = 1
    """Nodes of a combination at least."""
    extras: tuple[int, ...] = ()
    """Masks that are hints although their nodes cannot be combined freely."""
    kinds: int = 1
    lane_bits: int = 0
    """Bits of a lane where there are several kinds; amounts take one less."""

    @_lazy
    def nodes(self) -> int:
        """Bits of the candidates that may be combined."""
        return self.candidates & self.combinable

    @property
    def guards(self) -> int:
        """The top bits of all lanes but the last, whose sign is that of the integer."""
        return self._guards if self.kinds > 1 else 0

    @_lazy
    def _guards(self) -> int:
        return sum(1 << self.lane_bits * lane - 1 for lane in range(1, self.kinds))

    def spare_of(self, amount: int) -> int:
        """What is left of an amount after the request, guards set. `is_left` tests whether it is
        negative.
        """
        return (amount | self.guards) - self.request

    def is_left(self, spare: int) -> bool:
        """Say whether no kind went below zero."""
        return spare >= 0 and spare & self.guards == self.guards

    def lanes(self, amount: int) -> list[int]:
        """An amount by kind, without guards."""
        if self.kinds == 1:
            return [amount]
        lane = (1 << self.lane_bits - 1) - 1
        return [amount >> self.lane_bits * kind & lane for kind in range(self.kinds)]

    def free_in(self, mask: int) -> int:
        """Free amounts of the units that the mask touches."""
        return sum([unit.free for unit in self.units if unit.where & mask])

    @_lazy
    def free_by_node(self) -> dict[int, int]:
        """Node id to the free amounts that it touches, combinable nodes only."""
        by_node = dict.fromkeys(positions(self.nodes), 0)
        for unit in self.units:
            where = unit.where & self.nodes
            for node in positions(where) if where & (where - 1) else (where.bit_length() - 1,) if where else ():
                by_node[node] += unit.free
        return by_node

    @_lazy
    def is_additive(self) -> bool:
        """Say whether every unit and every must is on one node, so that sums over nodes describe
        all combinations.
        """
        if self.least > 1 or any(must & (must - 1) for must in self.musts):
            return False
        nodes = self.nodes
        for unit in self.units:
            where = unit.where & nodes
            if where & (where - 1):
                return False
        return True

    def combines(self, mask: int) -> bool:
        """Say whether the mask is a combination with enough of every kind."""
        if mask & ~self.nodes or mask.bit_count() < self.least:
            return False
        left = (self.free_in(mask) | self.guards) - self.request
        if left < 0 or left & self.guards != self.guards:
            return False
        return not self.musts or all(must & mask for must in self.musts)

    def has(self, mask: int) -> bool:
        """Say whether the mask (bits of ids) is one of the hints."""
        return self.combines(mask) or mask in self.extras

    def prefers(self, mask: int) -> bool:
        """Say whether the mask is a preferred hint."""
        return self.has(mask) and self.is_preferred(mask)

    @property
    def is_combining(self) -> bool:
        """Say whether there is any combination."""
        return self.combination_width is not None

    @_lazy
    def reach(self) -> int:
        """Bits of the nodes that are in any hint."""
        reach = self.nodes if self.is_combining else 0
        for mask in self.extras:
            reach |= mask
        return reach

    @property
    def is_empty(self) -> bool:
        """Say whether there is no hint at all."""
        return not self.reach

    @_lazy
    def singles(self) -> int:
        """Bits of the nodes that are hints by themselves."""
        singles = sum(mask for mask in self.extras if mask & (mask - 1) == 0)
        if self.least > 1:
            return singles
        guards = self.guards
        for node, amount in self.free_by_node.items():
            left = (amount | guards) - self.request
            if (
                left >= 0
                and left & guards == guards
                and (not self.musts or all(must >> node & 1 for must in self.musts))
            ):
                singles |= 1 << node
        return singles

    @_lazy
    def narrowest(self) -> int:
        """The width that makes a hint preferred: the fewest candidates that have enough in total.

        All of them when none have.
        """
        among = self.candidates
        inside = [(where, unit.total) for unit in self.units if (where := unit.where & among) and unit.total]
        fewest = self._fewest(inside, among, (), 1)
        return self.candidates.bit_count() if fewest is None else fewest

    @_lazy
    def width(self) -> int | None:
        """The fewest nodes of any hint. None when there is none."""
        if not self.extras:
            return self.combination_width
        widths = [mask.bit_count() for mask in self.extras]
        return min(widths if self.combination_width is None else [*widths, self.combination_width])

    @_lazy
    def combination_width(self) -> int | None:
        """The fewest nodes of any combination. None when there is none."""
        among = self.nodes
        inside = [(where, unit.free) for unit in self.units if (where := unit.where & among) and unit.free]
        return self._fewest(inside, among, self.musts, self.least)

    @_lazy
    def wanted_sockets(self) -> int:
        """On how many sockets a mask may lie to be preferred by align-by-socket."""
        # kubelet divides by this; more sockets than nodes makes it zero, and
        # kubelet refuses the option there.
        return -(-self.narrowest // max(self.candidates.bit_count() // len(self.sockets), 1))

    def is_preferred(self, mask: int) -> bool:
        """Say whether a hint is as narrow as the capacity allows, or lies on few enough sockets."""
        if mask.bit_count() == self.narrowest:
            return True
        return bool(self.sockets) and sum(1 for socket in self.sockets if socket & mask) == self.wanted_sockets

    def inside(self, algebra: MaskAlgebra, order: Sequence[int]) -> int:
        """The hints that lie inside the nodes of `order`, as a family over its positions."""
        family = self._combinations(algebra, order, self.nodes & unpack(algebra.full, order), 0)
        for mask in self.extras:
            packed = pack(mask, order)
            if packed.bit_count() == mask.bit_count():
                family |= 1 << packed
        return family

    def clipped(self, algebra: MaskAlgebra, order: Sequence[int]) -> int:
        """All hints, clipped to the nodes of `order`, as a family over its positions."""
        window = unpack(algebra.full, order)
        return self._combinations(algebra, order, self.nodes & window, self.nodes & ~window) | self.clipped_extras(
            order
        )

    def clipped_extras(self, order: Sequence[int]) -> int:
        """The extras alone, clipped likewise."""
        family = 0
        for mask in self.extras:
            family |= 1 << pack(mask, order)
        return family

    def preferred_inside(self, algebra: MaskAlgebra, order: Sequence[int]) -> int:
        """The preferred hints inside the nodes of `order`."""
        family = algebra.layers[self.narrowest] if self.narrowest <= algebra.n else 0
        if self.sockets:
            on = [(pack(socket, order), 1) for socket in self.sockets]
            family |= algebra.at_least(on, self.wanted_sockets) & ~algebra.at_least(on, self.wanted_sockets + 1)
        return family & self.inside(algebra, order) if family else 0

    def _combinations(self, algebra: MaskAlgebra, order: Sequence[int], within: int, outside: int) -> int:
        """Combinations of the nodes `within`, given that all nodes `outside` are in them as
        well.
        """
        if not self.is_combining:
            return 0
        rest = [
            (pack(unit.where & within, order), unit.free)
            for unit in self.units
            if unit.free and not unit.where & outside
        ]
        family = self._enough(algebra, rest, self.request, self.free_in(outside) if outside else 0)
        for must in self.musts:
            if not must & outside:
                family &= algebra.touching(pack(must, order))
        for position, node in enumerate(order):
            if not within >> node & 1:
                family &= ~algebra.having[position]
        for size in range(min(self.least - outside.bit_count(), len(algebra.layers))):
            family &= ~algebra.layers[size]
        return family

    def _enough(self, algebra: MaskAlgebra, units: Sequence[tuple[int, int]], request: int, base: int) -> int:
        """Masks over positions that touch enough of every kind, given a base amount."""
        if self.kinds == 1:
            return algebra.at_least(units, request - base)
        split = [(where, self.lanes(amount)) for where, amount in units]
        family = algebra.everything
        for kind, (wanted, have) in enumerate(zip(self.lanes(request), self.lanes(base), strict=True)):
            family &= algebra.at_least([(where, amounts[kind]) for where, amounts in split], wanted - have)
        return family

    def _fewest(self, inside: Sequence[tuple[int, int]], among: int, musts: Sequence[int], least: int) -> int | None:
        """The fewest of these nodes that touch enough of every kind and all musts.

        None when even all of them do not.
        """
        have = sum([amount for _, amount in inside])
        if (
            among.bit_count() < least
            or not self.is_left(self.spare_of(have))
            or (musts and not all(must & among for must in musts))
        ):
            return None
        by_node: dict[int, int] = {}
        is_simple = True
        for where, amount in inside:
            if where & (where - 1):
                is_simple = False
                for node in positions(where):
                    by_node[1 << node] = by_node.get(1 << node, 0) + amount
            else:
                by_node[where] = by_node.get(where, 0) + amount
        forced = {must for must in musts if must & (must - 1) == 0}
        bound = max(least, *[self._fewest_of_kind(kind, by_node, forced) for kind in range(self.kinds)])
        if is_simple and self.kinds == 1 and len(forced) == len(set(musts)):
            return bound
        order = positions(among)
        if len(order) <= BITSET_LIMIT:
            algebra = MaskAlgebra(len(order))
            family = self._enough(algebra, [(pack(where, order), amount) for where, amount in inside], self.request, 0)
            for must in musts:
                family &= algebra.touching(pack(must, order))
            return next(size for size in range(bound, len(order) + 1) if algebra.layers[size] & family)
        return self._fewest_by_trying(bound, order, inside, by_node, musts)

    def _fewest_of_kind(self, kind: int, by_node: dict[int, int], forced: set[int]) -> int:
        """The fewest nodes for one kind alone, counted as if units on several nodes were on each,
        so no set of fewer nodes is enough.
        """
        rows = {node: self.lanes(amount)[kind] for node, amount in by_node.items()} if self.kinds > 1 else by_node
        left = self.lanes(self.request)[kind]
        count = len(forced)
        if forced:
            left -= sum(rows.get(node, 0) for node in forced)
            rows = {node: amount for node, amount in rows.items() if node not in forced}
        for amount in sorted(rows.values(), reverse=True):
            if left <= 0:
                break
            left -= amount
            count += 1
        return count

    def _fewest_by_trying(
        self,
        bound: int,
        order: Sequence[int],
        inside: Sequence[tuple[int, int]],
        by_node: dict[int, int],
        musts: Sequence[int],
    ) -> int:
        """Find the fewest nodes where there are more than a bitset holds and sums do not decide: by
        a greedy choice, or by all sets of a size where they are few enough.
        """
        wanted = self.lanes(self.request)
        amounts = {node: self.lanes(by_node.get(1 << node, 0)) for node in order}

        def is_enough(chosen: Sequence[int]) -> bool:
            mask = sum(1 << node for node in chosen)
            have = sum(amount for where, amount in inside if where & mask)
            return self.is_left(self.spare_of(have)) and all(must & mask for must in musts)

        # The nodes that have most of one kind, and those that have most of
        # the kind they are shortest of.
        greedy = [sorted(order, key=lambda node: -amounts[node][kind]) for kind in range(self.kinds)]
        greedy.append(
            sorted(
                order,
                key=lambda node: -min(have / max(want, 1) for have, want in zip(amounts[node], wanted, strict=True)),
            )
        )
        for size in range(bound, len(order)):
            if any(is_enough(ranked[:size]) for ranked in greedy):
                return size
            if comb(len(order), size) <= _TRIES and any(is_enough(chosen) for chosen in combinations(order, size)):
                return size
        return len(order)


def list_hints(rule: HintRule) -> tuple[Hint, ...]:
    """Make the list that kubelet would make: by width, then by ids.

    Beyond BITSET_LIMIT candidates the list is cut: the narrowest hints that a bounded walk finds,
    then the widest. Merging never needs the list.
    """
    order = positions(rule.candidates)
    if len(order) <= BITSET_LIMIT:
        return _hints(rule, [unpack(mask, order) for mask in members(rule.inside(MaskAlgebra(len(order)), order))])
    return _hints(
        rule, {*rule.extras, *islice(_narrow_combinations(rule), _LISTED), *([rule.nodes] if rule.is_combining else [])}
    )


def sample_hints(rule: HintRule, limit: int) -> tuple[tuple[Hint, ...], int]:
    """Return the first hints of kubelet's list, and at most how many there are beyond.

    Cheap on any machine.
    """
    count = rule.candidates.bit_count()
    if count <= _SMALL:
        hints = list_hints(rule)
        return hints[:limit], len(hints[limit:])
    tried = islice(_narrow_combinations(rule), _SAMPLED)
    hints = _hints(rule, {*rule.extras, *islice((mask for mask in tried if mask), limit)})[:limit]
    return hints, 0 if rule.is_empty else (1 << count) - 1 - len(hints)


def _hints(rule: HintRule, masks: Iterator[int] | Sequence[int] | set[int]) -> tuple[Hint, ...]:
    ordered = sorted((NodeSet.from_bits(mask) for mask in masks if mask), key=lambda nodes: (len(nodes), nodes.ids))
    return tuple(Hint(nodes, rule.is_preferred(nodes.bits)) for nodes in ordered)


def _narrow_combinations(rule: HintRule) -> Iterator[int]:
    """Walk combinations by size, then by ids.

    0 for each that does not hold enough, so that a caller that stops early counts tries.
    """
    if not rule.is_combining:
        return
    order = positions(rule.nodes)
    for chosen in chain.from_iterable(
        combinations(order, size) for size in range(rule.combination_width or 1, len(order) + 1)
    ):
        mask = sum(1 << node for node in chosen)
        yield mask if rule.combines(mask) else 0
