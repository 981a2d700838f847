"""IdSet obeys the laws of sets, against Python's own frozenset."""

from hypothesis import given
from hypothesis import strategies as st

from topobus.domain.idset import CpuSet

ids = st.frozensets(st.integers(0, 300) | st.integers(0, 8191), max_size=40)


@given(ids, ids)
def test_idset_agrees_with_frozenset(one: frozenset[int], other: frozenset[int]) -> None:
    """Union, intersection, difference, symmetric difference, inclusion and disjointness are those of frozenset."""
    a, b = CpuSet.of(one), CpuSet.of(other)

    assert [set(a | b), set(a & b), set(a - b), set(a ^ b), a <= b, a.isdisjoint(b), len(a), bool(a)] == [
        one | other,
        one & other,
        one - other,
        one ^ other,
        one <= other,
        one.isdisjoint(other),
        len(one),
        bool(one),
    ]


@given(ids)
def test_idset_text_round_trips(one: frozenset[int]) -> None:
    """What is written reads back equal, and ids come in ascending order."""
    made = CpuSet.of(one)

    assert (CpuSet.parse(str(made)), made.ids) == (made, tuple(sorted(one)))
