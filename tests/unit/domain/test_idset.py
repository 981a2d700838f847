"""IdSet: the kernel's list format, immutability, ordering."""

import pytest

from topobus.domain.idset import CpuSet, IdSet, NodeSet


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
