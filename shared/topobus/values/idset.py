"""Sets of small non-negative ids as immutable bitsets: `NodeSet` for NUMA nodes, `CpuSet` for
logical CPUs.

Python integers are the bitset (sparse ids and ids above 63 are ordinary), and union, intersection
and comparison cost a few machine words. Each kind has a highest id, that of Linux: a set comes from
messages of others, and a few characters of text must not become a set that costs seconds. The text
form is the kernel's list format (`0-3,8`), in messages too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import ClassVar, Self

__all__ = ["CpuSet", "IdSet", "NodeSet", "ids_of_bits"]

# arch/x86/Kconfig, NR_CPUS_RANGE_END with CPUMASK_OFFSTACK: no kernel is built for more.
# arm64 stops at 4096, ppc64 at 8192.
_MAX_CPU_ID = 8191
# include/linux/numa.h with NODES_SHIFT 10, the largest that any
# architecture offers: MAX_NUMNODES is 1024.
_MAX_NODE_ID = 1023
# Of the highest id. A text no longer than this is one id, as most are.
_DIGITS = 4
# Every second CPU of the largest machine takes 20 kB to write down; a text
# longer than this repeats itself.
_MAX_TEXT = 64 * 1024
# Below this an integer's lowest bit is found and cleared in a few machine words; above, each such
# step would cost the length of the whole integer.
_FEW_BITS = 512


class IdSet:
    """An immutable, ordered set of ids, up to `MAX_ID`.

    >>> IdSet(3, 0, 1)
    IdSet(0, 1, 3)
    >>> str(IdSet.parse("0-2,8"))
    '0-2,8'
    """

    __slots__ = ("bits",)

    MAX_ID: ClassVar[int] = _MAX_CPU_ID
    bits: int

    def __init__(self, *ids: int) -> None:
        for identifier in ids:
            if identifier < 0 or identifier > self.MAX_ID:
                raise ValueError(f"id {identifier} is out of range: wanted 0 to {self.MAX_ID}")
        object.__setattr__(self, "bits", _bits_of_ids(ids))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    @classmethod
    def from_bits(cls, bits: int) -> Self:
        """Wrap an integer whose bit n represents id n.

        Errors: raises ValueError for a negative integer, and for bits above the highest id.
        """
        if bits < 0:
            raise ValueError(f"a bitset cannot be negative: got {bits}")
        if bits.bit_length() > cls.MAX_ID + 1:
            raise ValueError(f"id {bits.bit_length() - 1} is out of range: wanted 0 to {cls.MAX_ID}")
        return cls._wrap(bits)

    @classmethod
    def _wrap(cls, bits: int) -> Self:
        """Wrap bits that are known to be within bounds. Alignment makes millions of these sets."""
        ids = cls.__new__(cls)
        object.__setattr__(ids, "bits", bits)
        return ids

    @classmethod
    def of(cls, ids: Iterable[int]) -> Self:
        """Collect ids from any iterable."""
        return cls(*ids)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the kernel's list format.

        Errors: raises ValueError that names the bad part. An empty or blank text is the empty set.
        Cost: O(length of the text), and that is bounded.

        >>> NodeSet.parse("0,8-9").ids
        (0, 8, 9)
        """
        if len(text) > _MAX_TEXT:
            raise ValueError(
                f"not a list of ids: {text[:20]!r}… has {len(text)} characters, wanted at most {_MAX_TEXT}"
            )
        if len(text) <= _DIGITS and text.isascii() and text.isdecimal() and (only := int(text)) <= cls.MAX_ID:
            return cls._wrap(1 << only)
        bits = 0
        for part in text.strip().split(","):
            span = part.strip()
            if not span:
                continue
            first, dash, last = span.partition("-")
            if not span.isascii() or not first.isdecimal() or (dash and not last.isdecimal()):
                raise ValueError(f"not a list of ids: {text.strip()!r} (part {span!r})")
            low, high = int(first), int(last) if dash else int(first)
            if high < low:
                raise ValueError(f"not a list of ids: {text.strip()!r} (part {span!r})")
            if high > cls.MAX_ID:
                raise ValueError(
                    f"not a list of ids: {text.strip()[:60]!r} (part {span[:20]!r}: wanted 0 to {cls.MAX_ID})"
                )
            bits |= ((1 << (high - low + 1)) - 1) << low
        return cls._wrap(bits)

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids, ascending."""
        return tuple(self)

    @property
    def lowest(self) -> int:
        """The smallest id.

        Errors: raises ValueError when the set is empty.
        """
        if not self.bits:
            raise ValueError("the set is empty")
        return (self.bits & -self.bits).bit_length() - 1

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __bool__(self) -> bool:
        return self.bits != 0

    def __iter__(self) -> Iterator[int]:
        return ids_of_bits(self.bits)

    def __contains__(self, node_id: object) -> bool:
        return isinstance(node_id, int) and node_id >= 0 and bool(self.bits >> node_id & 1)

    def __or__(self, other: Self) -> Self:
        return self._wrap(self.bits | other.bits)

    def __and__(self, other: Self) -> Self:
        return self._wrap(self.bits & other.bits)

    def __sub__(self, other: Self) -> Self:
        return self._wrap(self.bits & ~other.bits)

    def __xor__(self, other: Self) -> Self:
        return self._wrap(self.bits ^ other.bits)

    def __le__(self, other: Self) -> bool:
        return self.bits & ~other.bits == 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdSet) and type(other) is type(self) and self.bits == other.bits

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.bits))

    def __str__(self) -> str:
        # Run by run, not id by id: messages hold hundreds of these sets, and most have one id.
        bits, start = self.bits, 0
        if bits and not bits & (bits - 1):
            return str(bits.bit_length() - 1)
        parts: list[str] = []
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
        """Return the `count` smallest ids (all, when there are fewer). Cost: O(ids taken)."""
        if count >= len(self):
            return self._wrap(self.bits)
        if count <= 0:
            return self._wrap(0)
        last = next(islice(self, count - 1, None))
        return self._wrap(self.bits & ((1 << (last + 1)) - 1))


class NodeSet(IdSet):
    """A set of NUMA node ids (the kernel's ids, sparse ones included, never positions)."""

    __slots__ = ()

    MAX_ID: ClassVar[int] = _MAX_NODE_ID


class CpuSet(IdSet):
    """A set of logical CPU ids."""

    __slots__ = ()

    MAX_ID: ClassVar[int] = _MAX_CPU_ID


def ids_of_bits(bits: int) -> Iterator[int]:
    """Give the numbers of the bits that are set, ascending.

    Cost: O(length of the integer + bits that are set), for integers of any length.

    >>> list(ids_of_bits(0b1001))
    [0, 3]
    """
    base = 0
    if bits.bit_length() > _FEW_BITS:
        words = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
        step = _FEW_BITS // 8
        for start in range(0, len(words), step):
            part = int.from_bytes(words[start : start + step], "little")
            while part:
                low = part & -part
                yield base + low.bit_length() - 1
                part ^= low
            base += _FEW_BITS
        return
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def _bits_of_ids(ids: Collection[int]) -> int:
    """Set one bit for each id.

    Cost: O(ids + highest id).
    """
    highest = max(ids, default=0)
    if highest < _FEW_BITS:
        bits = 0
        for identifier in ids:
            bits |= 1 << identifier
        return bits
    octets = bytearray(highest // 8 + 1)
    for identifier in ids:
        octets[identifier >> 3] |= 1 << (identifier & 7)
    return int.from_bytes(octets, "little")
