"""Sets of small non-negative ids as immutable bitsets: `NodeSet` for NUMA nodes, `CpuSet` for logical CPUs.

Python integers are the bitset, so nothing limits the ids (sparse ids and ids above 63 are ordinary), and union, intersection
and comparison cost a few machine words. The text form is the kernel's list format (`0-3,8`), in messages too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Self

__all__ = ["CpuSet", "IdSet", "NodeSet"]

# An id above this is a corrupt file, not a machine: Linux stops at 8192 CPUs (NR_CPUS) and 1024 nodes (MAX_NUMNODES).
_MAX_ID = 1 << 20


class IdSet:
    """An immutable, ordered set of ids.

    >>> IdSet(3, 0, 1)
    IdSet(0, 1, 3)
    >>> str(IdSet.parse("0-2,8"))
    '0-2,8'
    """

    __slots__ = ("bits",)

    bits: int

    def __init__(self, *ids: int) -> None:
        bits = 0
        for one in ids:
            if one < 0 or one > _MAX_ID:
                raise ValueError(f"id {one} is out of range: wanted 0 to {_MAX_ID}")
            bits |= 1 << one
        object.__setattr__(self, "bits", bits)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    @classmethod
    def from_bits(cls, bits: int) -> Self:
        """Wrap an integer whose bit n stands for id n."""
        if bits < 0:
            raise ValueError(f"a bitset cannot be negative: got {bits}")
        made = cls.__new__(cls)
        object.__setattr__(made, "bits", bits)
        return made

    @classmethod
    def of(cls, ids: Iterable[int]) -> Self:
        """Collect ids from any iterable."""
        return cls(*ids)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the kernel's list format.

        Errors: raises ValueError that names the bad part. An empty or blank text is the empty set.

        >>> NodeSet.parse("0,8-9").ids
        (0, 8, 9)
        """
        bits = 0
        for part in text.strip().split(","):
            span = part.strip()
            if not span:
                continue
            first, dash, last = span.partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()):
                raise ValueError(f"not a list of ids: {text.strip()!r} (part {span!r})")
            low, high = int(first), int(last) if dash else int(first)
            if high < low or high > _MAX_ID:
                raise ValueError(f"not a list of ids: {text.strip()!r} (part {span!r})")
            bits |= ((1 << (high - low + 1)) - 1) << low
        return cls.from_bits(bits)

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids, ascending."""
        return tuple(self)

    @property
    def lowest(self) -> int:
        """The smallest id; ValueError when empty."""
        if not self.bits:
            raise ValueError("the set is empty")
        return (self.bits & -self.bits).bit_length() - 1

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __bool__(self) -> bool:
        return self.bits != 0

    def __iter__(self) -> Iterator[int]:
        bits = self.bits
        while bits:
            low = bits & -bits
            yield low.bit_length() - 1
            bits ^= low

    def __contains__(self, one: object) -> bool:
        return isinstance(one, int) and one >= 0 and bool(self.bits >> one & 1)

    def __or__(self, other: Self) -> Self:
        return self.from_bits(self.bits | other.bits)

    def __and__(self, other: Self) -> Self:
        return self.from_bits(self.bits & other.bits)

    def __sub__(self, other: Self) -> Self:
        return self.from_bits(self.bits & ~other.bits)

    def __xor__(self, other: Self) -> Self:
        return self.from_bits(self.bits ^ other.bits)

    def __le__(self, other: Self) -> bool:
        return self.bits & ~other.bits == 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdSet) and type(other) is type(self) and self.bits == other.bits

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.bits))

    def __str__(self) -> str:
        # Run by run, not id by id: messages hold hundreds of these sets.
        parts: list[str] = []
        bits, start = self.bits, 0
        while bits:
            gap = (bits & -bits).bit_length() - 1
            bits >>= gap
            start += gap
            run = (~bits & (bits + 1)).bit_length() - 1
            parts.append(str(start) if run == 1 else f"{start}-{start + run - 1}")
            bits >>= run
            start += run
        return ",".join(parts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, self))})"

    def isdisjoint(self, other: Self) -> bool:
        """Say whether the two sets share no id."""
        return self.bits & other.bits == 0

    def take(self, count: int) -> Self:
        """Return the `count` smallest ids (all, when there are fewer)."""
        bits = 0
        rest = self.bits
        for _ in range(count):
            if not rest:
                break
            low = rest & -rest
            bits |= low
            rest ^= low
        return self.from_bits(bits)


class NodeSet(IdSet):
    """A set of NUMA node ids (the kernel's ids, sparse ones included, never positions)."""

    __slots__ = ()


class CpuSet(IdSet):
    """A set of logical CPU ids."""

    __slots__ = ()
