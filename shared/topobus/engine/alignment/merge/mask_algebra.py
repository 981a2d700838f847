"""Families of masks as one integer: bit m is set when mask m is in the family, so a family over n
nodes has 2^n bits.

One operation on such an integer treats all masks at once, which makes the merge fast in plain
Python: 16 nodes are 8 KiB per operation. Masks here are over positions 0..n-1, and the caller maps
node ids to positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from topobus.values.idset import ids_of_bits

__all__ = ["BITSET_LIMIT", "MaskAlgebra", "first", "members", "pack", "positions", "reverse", "unpack"]

BITSET_LIMIT = 16
"""Positions up to which a family is one integer: 2^16 bits are 8 KiB."""


class MaskAlgebra:
    """All masks over n positions, with the patterns that the operations need. Made for each merge.

    Immutable.
    """

    __slots__ = ("everything", "full", "having", "layers", "n")

    def __init__(self, n: int) -> None:
        self.n = n
        having: list[int] = []
        layers = [1]
        for position in range(n):
            half = 1 << position
            having = [pattern | pattern << half for pattern in having]
            having.append(((1 << half) - 1) << half)
            layers = [
                (layers[size] if size < len(layers) else 0) | (layers[size - 1] << half if size else 0)
                for size in range(len(layers) + 1)
            ]
        self.having = tuple(having)
        """Position to the family of masks that have it."""
        self.layers = tuple(layers)
        """Size to the family of masks of that size."""
        self.full = (1 << n) - 1
        """The mask of all positions."""
        self.everything = (1 << (1 << n)) - 1

    def at_least(self, units: Sequence[tuple[int, int]], need: int) -> int:
        """The family of masks that touch units worth `need` in total.

        Shapes: units — (positions as a mask, amount). A unit counts once when the mask has any of
                its positions.
        Cost: bit-sliced addition: units x log(amounts) operations on the family.
        """
        if need <= 0:
            return self.everything
        planes: list[int] = []
        for where, amount in units:
            touching = self.touching(where)
            place = 0
            while amount and touching:
                if amount & 1:
                    _add(planes, touching, place)
                amount >>= 1
                place += 1
        if need.bit_length() > len(planes):
            return 0
        above, equal = 0, self.everything
        for place in reversed(range(len(planes))):
            if need >> place & 1:
                equal &= planes[place]
            else:
                above |= equal & planes[place]
                equal &= ~planes[place]
        return above | equal

    def touching(self, where: int) -> int:
        """The family of masks that have any of these positions."""
        family = 0
        for position in range(self.n):
            if where >> position & 1:
                family |= self.having[position]
        return family

    def with_position(self, family: int, position: int) -> int:
        """Every mask of the family, with this position added."""
        half = 1 << position
        return (family & self.having[position]) | ((family & ~self.having[position]) << half)

    def intersections(self, family: int, other: int) -> int:
        """The family of all intersections of one mask from each."""
        return self._intersections(family, other, self.n - 1)

    def _intersections(self, family: int, other: int, position: int) -> int:
        if not family or not other:
            return 0
        if position < 0:
            return family
        half = 1 << position
        low, high = other & ((1 << half) - 1), other >> half
        if not low:
            return self._intersections(family, high, position - 1)
        dropped = (family | family >> half) & ~self.having[position]
        if low == high:
            return self._intersections(family | dropped, low, position - 1)
        return self._intersections(dropped, low, position - 1) | self._intersections(family, high, position - 1)


def _add(planes: list[int], carry: int, place: int) -> None:
    while len(planes) <= place:
        planes.append(0)
    while carry:
        if place == len(planes):
            planes.append(carry)
            return
        planes[place], carry = planes[place] ^ carry, planes[place] & carry
        place += 1


def reverse(family: int, n: int) -> int:
    """The family of the complements.

    >>> reverse(0b0001, 2) == 0b1000
    True
    """
    width = 1 << n
    return int(format(family, f"0{width}b")[::-1], 2)


def first(family: int) -> int:
    """The mask with the smallest value."""
    return (family & -family).bit_length() - 1


def members(family: int) -> Iterator[int]:
    """All masks, smallest value first. Cost: O(2^n + masks)."""
    return ids_of_bits(family)


def positions(bits: int) -> tuple[int, ...]:
    """Ids in a bitset, ascending: an id's index in the tuple is its position in packed masks."""
    return tuple(ids_of_bits(bits))


def pack(bits: int, order: Sequence[int]) -> int:
    """Turn bits of ids into bits of positions. Ids without a position are dropped.

    >>> pack(1 << 70 | 1 << 3 | 1 << 2, (3, 70)) == 0b11
    True
    """
    packed = 0
    for position, node in enumerate(order):
        packed |= (bits >> node & 1) << position
    return packed


def unpack(packed: int, order: Sequence[int]) -> int:
    """Turn bits of positions into bits of ids."""
    bits = 0
    for position, node in enumerate(order):
        bits |= (packed >> position & 1) << node
    return bits
