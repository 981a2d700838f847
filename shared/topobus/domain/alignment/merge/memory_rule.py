"""The memory policy's hints as a rule: single nodes, existing groups, and wide sets of nodes that hold nothing yet.

A node serves either single-node or one group's allocations. So the masks are exactly: one node that is in no group; two or more unassigned nodes; each
existing group; all of them with enough free (lemma C of the knowledge note). What init containers left for exactly one mask may add a few more.
Source: kubelet 1.36 cm/memorymanager/policy_static.go, calculateHints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import combinations, islice
from math import comb

from msgspec import Struct

from topobus.domain.alignment.merge.hint_rule import BITSET_LIMIT, HintRule, Unit, pack, positions, unpack
from topobus.domain.alignment.merge.mask_algebra import MaskAlgebra, first, members
from topobus.domain.hint import Hint
from topobus.domain.idset import NodeSet

__all__ = ["MemoryAmount", "MemoryNode", "MemoryRule", "add_within"]

# Sets of nodes tried to find the narrowest that holds several kinds of memory at once, where a bitset does not reach; beyond, a greedy choice decides.
_TRIES = 20_000
# Nodes up to which a record lists all hints (63), and wide sets looked at for a record beyond.
_SMALL = 6
_SAMPLED = 500
# Different amounts of memory that are added up at most; each is one family of masks.
_SUMS_LIMIT = 512


class MemoryAmount(Struct, frozen=True, kw_only=True):
    """One resource (memory, or huge pages of one size) on one node, in bytes."""

    allocatable: int
    free: int


class MemoryNode(Struct, frozen=True, kw_only=True):
    """One NUMA node as the memory policy sees it."""

    id: int
    assignments: int = 0
    """Blocks that live on the node now."""
    group: NodeSet
    """Nodes that it serves together with, itself included."""
    amounts: dict[str, MemoryAmount] = {}


_NOTHING = MemoryAmount(allocatable=0, free=0)


def add_within(left: Sequence[int], right: Sequence[int], limit: Sequence[int]) -> tuple[int, ...] | None:
    """Add amounts kind by kind; None beyond the limit of any."""
    added = tuple(a + b for a, b in zip(left, right, strict=True))
    return added if all(a <= most for a, most in zip(added, limit, strict=True)) else None


class MemoryRule:
    """All masks on which so much of each kind of memory can be had together. Immutable."""

    def __init__(
        self, nodes: Sequence[MemoryNode], request: Mapping[str, int], reusable: Mapping[NodeSet, Mapping[str, int]] | None = None
    ) -> None:
        self.nodes = NodeSet.of(node.id for node in nodes).bits
        self.kinds = tuple(sorted(request))
        self.wanted = tuple(request[kind] for kind in self.kinds)
        self.free = {1 << node.id: tuple(node.amounts.get(kind, _NOTHING).free for kind in self.kinds) for node in nodes}
        self.allocatable = {1 << node.id: tuple(node.amounts.get(kind, _NOTHING).allocatable for kind in self.kinds) for node in nodes}
        self.unassigned = sum(1 << node.id for node in nodes if node.assignments == 0)
        self.singles = sum(1 << node.id for node in nodes if len(node.group) == 1)
        # A group counts when its nodes that hold anything all belong to it; a node that holds nothing is bound to no group.
        held = {node.id: node.group for node in nodes if node.assignments > 0}
        self.groups = tuple(
            sorted(
                {
                    group.bits
                    for group in held.values()
                    if len(group) > 1 and not group.bits & ~self.nodes and all(held.get(one, group) == group for one in group)
                }
            )
        )
        self.reusable = {mask.bits: tuple(left.get(kind, 0) for kind in self.kinds) for mask, left in (reusable or {}).items()}

    def has(self, mask: int) -> bool:
        """Say whether the mask (bits of ids) is one of the hints."""
        if not mask or mask & ~self.nodes or not self._is_whole(mask):
            return False
        left = self.reusable.get(mask, (0,) * len(self.kinds))
        return self._has_all(self.allocatable, mask, (0,) * len(self.kinds)) and self._has_all(self.free, mask, left)

    @cached_property
    def candidates(self) -> int:
        """Bits of the nodes that are in any hint."""
        found = 0
        for node in positions(self.nodes):
            if self.has(1 << node):
                found |= 1 << node
        if self._can_be_wide(self.unassigned):
            found |= self.unassigned
        for mask in (*self.groups, *self.reusable):
            if self.has(mask):
                found |= mask
        return found

    @property
    def is_empty(self) -> bool:
        """Say whether there is no hint."""
        return not self.candidates

    def narrowest(self) -> int:
        """The width that makes a hint preferred: the fewest nodes with enough allocatable; all nodes when none have."""
        return self._narrowest

    def width(self) -> int | None:
        """The fewest nodes of any hint; None when there is none."""
        return self._width

    @cached_property
    def _narrowest(self) -> int:
        found = self._fewest(self.allocatable, self.nodes, 1)
        return self.nodes.bit_count() if found is None else found

    @cached_property
    def _width(self) -> int | None:
        sizes = [1 for node in positions(self.nodes) if self.has(1 << node)][:1]
        sizes += [mask.bit_count() for mask in (*self.groups, *self.reusable) if self.has(mask)]
        wide = self._fewest(self.free, self.unassigned, 2)
        sizes += [wide] if wide is not None else []
        return min(sizes, default=None)

    def inside(self, universe: MaskAlgebra, order: Sequence[int]) -> int:
        """The family of hints that lie inside the window, over its positions."""
        window = sum(1 << one for one in order)
        wide = self._enough(universe, order, self.free, (0,) * len(self.kinds))
        for position, node in enumerate(order):
            if not self.unassigned >> node & 1:
                wide &= ~universe.having[position]
        wide &= ~(universe.layers[0] | (universe.layers[1] if len(universe.layers) > 1 else 0))
        return wide | self._exceptions(order, window, is_projected=False)

    def projected(self, universe: MaskAlgebra, order: Sequence[int]) -> int:
        """The family of all hints clipped to the window, over its positions."""
        window = sum(1 << one for one in order)
        outside = self.unassigned & ~window
        base = self._sums(self.free, outside)
        wide = self._enough(universe, order, self.free, base)
        for position, node in enumerate(order):
            if not self.unassigned >> node & 1:
                wide &= ~universe.having[position]
        # A wide set has two nodes at least, some of which may be outside.
        for size in range(min(len(universe.layers), max(0, 2 - outside.bit_count()))):
            wide &= ~universe.layers[size]
        return wide | self._exceptions(order, window, is_projected=True)

    @property
    def is_wide(self) -> bool:
        """Say whether all unassigned nodes together are a hint: then many sets of them are."""
        return self._can_be_wide(self.unassigned)

    @property
    def wide_slack(self) -> tuple[int, ...]:
        """How much of each kind all unassigned nodes together have to spare."""
        nodes = [amounts for node, amounts in self.free.items() if node & self.unassigned]
        return tuple(sum(amounts[kind] for amounts in nodes) - wanted for kind, wanted in enumerate(self.wanted))

    def wide_rules(self) -> tuple[HintRule, ...]:
        """The wide sets as rules, one a kind: sets of unassigned nodes that are in all of them (with two nodes or more)."""
        return tuple(
            HintRule(
                units=tuple(
                    Unit(node, self.allocatable[node][kind], self.free[node][kind]) for node in self.free if node & self.unassigned
                ),
                request=wanted,
                candidates=self.unassigned,
            )
            for kind, wanted in enumerate(self.wanted)
        )

    def best(self, around: int = 0) -> Hint | None:
        """The hint that kubelet takes by itself, among those that hold `around`: preferred, then narrowest, then of smallest value."""
        order = positions(self.nodes)
        width = self.narrowest()
        found: int | None = None
        if len(order) <= BITSET_LIMIT:
            universe = MaskAlgebra(len(order))
            family = self.inside(universe, order)
            for position, node in enumerate(order):
                if around >> node & 1:
                    family &= universe.having[position]
            sizes = sorted(range(1, len(order) + 1), key=lambda size: (size != width, size))
            layer = next((here for size in sizes if (here := family & universe.layers[size])), 0)
            found = unpack(first(layer), order) if layer else None
        else:
            masks = [mask for mask in self.exceptions() if not around & ~mask]
            masks += self._some_wide(around)
            found = min(masks, key=lambda mask: (mask.bit_count() != width, mask.bit_count(), mask), default=None)
        return Hint(NodeSet.from_bits(found), found.bit_count() == width) if found else None

    def _some_wide(self, around: int) -> list[int]:
        """A few wide sets that hold `around`, the narrowest that a short look finds."""
        if around & ~self.unassigned or not self.is_wide:
            return []
        rest = [node for node in positions(self.unassigned) if not around >> node & 1]
        for ordered in (
            rest,
            sorted(
                rest,
                key=lambda node: (
                    -min(have / max(wanted, 1) for have, wanted in zip(self.free[1 << node], self.wanted, strict=True)),
                    node,
                ),
            ),
        ):
            mask = around
            found = []
            for node in ordered:
                if self.has(mask) and mask.bit_count() > 1:
                    break
                mask |= 1 << node
            if self.has(mask):
                found.append(mask)
        return [*found, self.unassigned]

    def exceptions(self) -> list[int]:
        """The masks (bits of ids) that are no wide sets: single nodes, groups, and masks with something to reuse."""
        return [mask for mask in (*(1 << node for node in positions(self.nodes)), *self.groups, *self.reusable) if self.has(mask)]

    def spare(self, order: Sequence[int]) -> tuple[tuple[int, ...] | None, list[tuple[int, ...] | None]] | None:
        """What wide sets can do without: so much of each kind, and what each window node would cost (None: it is in no wide set).

        The first is None when there are no wide sets. All is None when a node that holds nothing still names a group, or when there would be more sums
        than are worth adding up: then they do not tell.
        """
        if self.unassigned & ~self.singles:
            return None
        total = self._sums(self.free, self.unassigned)
        slack = tuple(have - wanted for have, wanted in zip(total, self.wanted, strict=True))
        if self.unassigned.bit_count() < 2 or min(slack) < 0:
            return None, []
        amounts = [self.free[1 << node] if self.unassigned >> node & 1 else None for node in order]
        sums = {(0,) * len(slack)}
        for amount in amounts:
            if amount is not None:
                sums |= {added for one in sums if (added := add_within(one, amount, slack)) is not None}
            if len(sums) > _SUMS_LIMIT:
                return None
        return slack, amounts

    def list_hints(self) -> tuple[Hint, ...]:
        """Make the list that kubelet would make; beyond 16 nodes only the masks that are not wide sets of unassigned nodes, and the narrowest of those."""
        width = self.narrowest()
        masks = sorted((NodeSet.from_bits(mask) for mask in self._masks()), key=lambda mask: (len(mask), mask.ids))
        return tuple(Hint(mask, len(mask) == width) for mask in masks)

    def sample_hints(self, limit: int) -> tuple[tuple[Hint, ...], int]:
        """Give the narrowest hints, and at most how many there are beyond; cheap on any machine."""
        count = self.nodes.bit_count()
        if count <= _SMALL:
            listed = self.list_hints()
            return listed[:limit], len(listed[limit:])
        found = set(self.exceptions())
        size = self._fewest(self.free, self.unassigned, 2)
        if size is not None:
            masks = (sum(1 << node for node in chosen) for chosen in islice(combinations(positions(self.unassigned), size), _SAMPLED))
            found |= {mask for mask in masks if self.has(mask)}
        hints = sorted((NodeSet.from_bits(mask) for mask in found), key=lambda mask: (len(mask), mask.ids))[:limit]
        return tuple(Hint(mask, len(mask) == self.narrowest()) for mask in hints), 0 if self.is_empty else (1 << count) - 1 - len(hints)

    def _masks(self) -> Iterator[int]:
        order = positions(self.nodes)
        if len(order) <= BITSET_LIMIT:
            universe = MaskAlgebra(len(order))
            yield from (unpack(mask, order) for mask in members(self.inside(universe, order)))
            return
        found = {mask for mask in (*(1 << node for node in order), *self.groups, *self.reusable) if self.has(mask)}
        size = self._fewest(self.free, self.unassigned, 2)
        if size is not None:
            masks = (sum(1 << node for node in chosen) for chosen in islice(combinations(positions(self.unassigned), size), _TRIES))
            found |= {mask for mask in masks if self.has(mask)}
            found.add(self.unassigned)
        yield from found

    def _exceptions(self, order: Sequence[int], window: int, *, is_projected: bool) -> int:
        """Single nodes, groups and masks with something to reuse: one bit each."""
        found = 0
        for mask in (*(1 << node for node in positions(self.nodes)), *self.groups, *self.reusable):
            if (is_projected or not mask & ~window) and self.has(mask):
                found |= 1 << pack(mask & window, order)
        return found

    def _is_whole(self, mask: int) -> bool:
        """Say whether the mask tears no group apart and joins no node that serves alone."""
        if mask & (mask - 1) == 0:
            return bool(mask & self.singles)
        return not mask & ~self.unassigned or mask in self.groups

    def _can_be_wide(self, mask: int) -> bool:
        return mask.bit_count() >= 2 and self._has_all(self.free, mask, (0,) * len(self.kinds))

    def _sums(self, amounts: Mapping[int, Sequence[int]], mask: int) -> tuple[int, ...]:
        if not mask & (mask - 1):
            return tuple(amounts.get(mask, (0,) * len(self.kinds)))
        sums = [0] * len(self.kinds)
        while mask:
            low = mask & -mask
            for kind, amount in enumerate(amounts.get(low, ())):
                sums[kind] += amount
            mask ^= low
        return tuple(sums)

    def _has_all(self, amounts: Mapping[int, Sequence[int]], mask: int, more: Sequence[int]) -> bool:
        return all(have + extra >= wanted for have, extra, wanted in zip(self._sums(amounts, mask), more, self.wanted, strict=True))

    def _enough(self, universe: MaskAlgebra, order: Sequence[int], amounts: Mapping[int, Sequence[int]], base: Sequence[int]) -> int:
        """Masks over the window with enough of every kind, given what there is besides."""
        families = (
            universe.at_least([(1 << position, amounts[1 << node][kind]) for position, node in enumerate(order)], wanted - base[kind])
            for kind, wanted in enumerate(self.wanted)
        )
        return reduce(lambda left, right: left & right, families, universe.everything)

    def _fewest(self, amounts: Mapping[int, Sequence[int]], among: int, least: int) -> int | None:
        """The fewest of these nodes that hold enough of every kind; None when all of them do not."""
        order = positions(among)
        if len(order) < least or not self._has_all(amounts, among, (0,) * len(self.kinds)):
            return None
        rows = [amounts[1 << node] for node in order]
        bound = least
        for kind, wanted in enumerate(self.wanted):
            have, count = 0, 0
            for amount in sorted((row[kind] for row in rows), reverse=True):
                if have >= wanted:
                    break
                have += amount
                count += 1
            bound = max(bound, count)
        if len(self.kinds) == 1:
            return bound
        if len(order) <= BITSET_LIMIT:
            universe = MaskAlgebra(len(order))
            enough = self._enough(universe, order, amounts, (0,) * len(self.kinds))
            return next(size for size in range(bound, len(order) + 1) if universe.layers[size] & enough)
        for size in range(bound, len(order)):
            if self._greedy_has(amounts, order, size):
                return size
            if comb(len(order), size) <= _TRIES and any(
                self._has_all(amounts, sum(1 << node for node in chosen), (0,) * len(self.kinds)) for chosen in combinations(order, size)
            ):
                return size
        return len(order)

    def _greedy_has(self, amounts: Mapping[int, Sequence[int]], order: Sequence[int], size: int) -> bool:
        """Try the nodes that have most of one kind, and those that have most of the kind they are shortest of."""
        orders = [sorted(order, key=lambda node: (-amounts[1 << node][kind], node)) for kind in range(len(self.kinds))]
        orders.append(
            sorted(
                order, key=lambda node: -min(have / max(wanted, 1) for have, wanted in zip(amounts[1 << node], self.wanted, strict=True))
            )
        )
        return any(self._has_all(amounts, sum(1 << node for node in each_order[:size]), (0,) * len(self.kinds)) for each_order in orders)
