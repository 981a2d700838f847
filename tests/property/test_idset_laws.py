"""IdSet obeys the laws of sets, against Python's own frozenset."""

from hypothesis import given
from hypothesis import strategies as st

from topobus.values.idset import CpuSet

ids = st.frozensets(st.integers(0, 300) | st.integers(0, 8191), max_size=40)


@given(ids, ids)
def test_idset_agrees_with_frozenset(first: frozenset[int], other: frozenset[int]) -> None:
    """Union, intersection, difference, symmetric difference, inclusion and disjointness are those
    of frozenset.
    """
    a, b = CpuSet.of(first), CpuSet.of(other)

    assert [set(a | b), set(a & b), set(a - b), set(a ^ b), a <= b, a.isdisjoint(b), len(a), bool(a)] == [
        first | other,
        first & other,
        first - other,
        first ^ other,
        first <= other,
        first.isdisjoint(other),
        len(first),
        bool(first),
    ]


@given(ids)
def test_idset_text_round_trips(members: frozenset[int]) -> None:
    """What is written reads back equal, and ids come in ascending order."""
    made = CpuSet.of(members)

    assert (CpuSet.parse(str(made)), made.ids) == (made, tuple(sorted(members)))
