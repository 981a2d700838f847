"""IdSet: the kernel's list format, immutability, ordering."""

from typing import Any

import pytest

from topobus.values.idset import CpuSet, IdSet, NodeSet, ids_of_bits


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", ()),
        ("\n", ()),
        ("0", (0,)),
        ("0-3", (0, 1, 2, 3)),
        ("8,0-1", (0, 1, 8)),
        (" 1 , 3 ", (1, 3)),
        ("0-1,1-2", (0, 1, 2)),
        ("200", (200,)),
    ],
)
def test_idset_parses_the_kernels_list_format(text: str, ids: tuple[int, ...]) -> None:
    """Every text that the kernel writes reads as the ids it stands for."""
    assert CpuSet.parse(text).ids == ids


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1..2", "0x1", "1-2-3", "99999999999"])
def test_idset_names_the_text_when_it_is_no_list(text: str) -> None:
    """What is no list is refused with the text in the message, never read as something else."""
    with pytest.raises(ValueError, match="not a list of ids") as caught:
        NodeSet.parse(text)

    assert text in str(caught.value)


def test_idset_cannot_be_changed_when_made() -> None:
    """A set that somebody holds never changes under them."""
    made = NodeSet(1)

    with pytest.raises(AttributeError, match="immutable"):
        made.bits = 3


def test_idset_kinds_differ_when_ids_are_equal() -> None:
    """NUMA node 1 is not CPU 1."""
    assert NodeSet(1) != CpuSet(1)


def test_idset_refuses_negative_ids() -> None:
    """-1 is the kernel's "unknown" and must not become a member."""
    with pytest.raises(ValueError, match="out of range"):
        NodeSet(-1)


def test_take_gives_the_smallest_when_more_are_there() -> None:
    """Taking some takes the lowest ids, and all of them when too many are asked."""
    assert (CpuSet(9, 2, 5).take(2), CpuSet(9, 2, 5).take(7)) == (CpuSet(2, 5), CpuSet(2, 5, 9))


def test_lowest_is_refused_when_empty() -> None:
    """An empty set has no lowest id, and none is made up."""
    with pytest.raises(ValueError, match="empty"):
        _ = IdSet().lowest


@pytest.mark.parametrize(("kind", "highest"), [(NodeSet, 1023), (CpuSet, 8191)])
def test_idset_stops_at_the_kernels_highest_id(kind: type[IdSet], highest: int) -> None:
    """A machine has at most 1024 nodes and 8192 CPUs.

    An id above is refused however it is written, for a set of it would
    cost what no machine asks for.
    """
    assert kind.parse(f"0-{highest}").ids == tuple(range(highest + 1))
    assert kind(highest) == kind.from_bits(1 << highest)

    for make in (
        lambda: kind(highest + 1),
        lambda: kind.parse(f"{highest + 1}"),
        lambda: kind.parse(f"0-{highest + 1}"),
        lambda: kind.from_bits(1 << (highest + 1)),
    ):
        with pytest.raises(ValueError, match=f"wanted 0 to {highest}"):
            make()


def test_idset_refuses_a_text_that_only_repeats_itself() -> None:
    """No list of the kernel is longer than 64 KiB.

    A longer one is refused before it is read, with its size.
    """
    with pytest.raises(ValueError, match="has 900000 characters"):
        NodeSet.parse("0," * 450_000)


class Counted(int):
    """An integer that counts the machine words that operations on it read."""

    words = 0

    def _cost(self) -> None:
        Counted.words += self.bit_length() // 64 + 1

    def __and__(self, other: int) -> "Counted":
        self._cost()
        return Counted(int(self) & int(other))

    def __xor__(self, other: int) -> "Counted":
        self._cost()
        return Counted(int(self) ^ int(other))

    def __neg__(self) -> "Counted":
        self._cost()
        return Counted(-int(self))

    def to_bytes(self, *arguments: Any, **named: Any) -> bytes:
        """Count the one pass over the integer."""
        self._cost()
        return int(self).to_bytes(*arguments, **named)


@pytest.mark.parametrize("bits", [1 << 12, 1 << 14, 1 << 16])
def test_bits_are_walked_through_once_however_long_the_integer_is(bits: int) -> None:
    """The cost of all ids of a set grows with its length, not with its square: a million bits were
    minutes before.
    """
    Counted.words = 0

    identifiers = list(ids_of_bits(Counted((1 << bits) - 1)))

    assert identifiers == list(range(bits))
    assert Counted.words <= bits // 64 + 1


def test_take_gives_the_smallest_of_a_large_set() -> None:
    """Taking some of a set of thousands gives exactly its lowest ids."""
    odd = CpuSet.of(range(1, 8192, 2))

    assert odd.take(1000).ids == tuple(range(1, 2000, 2))
    assert odd.take(0) == CpuSet()
    assert odd.take(10_000) == odd


def test_sets_are_disjoint_when_they_share_no_id() -> None:
    """The empty set shares none with any."""
    assert NodeSet(0, 2).isdisjoint(NodeSet(1, 3))
    assert not NodeSet(0, 2).isdisjoint(NodeSet(2))
    assert NodeSet().isdisjoint(NodeSet())
