"""Promises of the hint merge: kubelet's answer, whatever the order, on any machine."""

from __future__ import annotations

import pytest

from topobus.engine.alignment.merge.dispatch import merge_hints
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet
from topobus.values.request import Policy


def hint(text: str | None, *, preferred: bool) -> Hint:
    """Make a hint from a list of ids."""
    return Hint(None if text is None else NodeSet.parse(text), preferred)


def good(text: str | None) -> Hint:
    """Make a preferred hint."""
    return hint(text, preferred=True)


def poor(text: str | None) -> Hint:
    """Make a hint that is not preferred."""
    return hint(text, preferred=False)


TWO = NodeSet(0, 1)


@pytest.mark.parametrize(
    ("lists", "policy", "wanted", "admitted"),
    [
        pytest.param([], Policy.BEST_EFFORT, good("0-1"), True, id="no-lists-give-the-machine"),
        pytest.param([None], Policy.RESTRICTED, good("0-1"), True, id="no-opinion-gives-the-machine"),
        pytest.param([[]], Policy.RESTRICTED, poor("0-1"), False, id="empty-list-cannot-be-satisfied"),
        pytest.param(
            [[good("0"), poor("0-1")], [good("1"), poor("0-1")]],
            Policy.RESTRICTED,
            poor("0"),
            False,
            id="preferred-masks-must-be-equal",
        ),
        pytest.param(
            [[good("0"), good("1")], [good("1")]], Policy.SINGLE_NUMA_NODE, good("1"), True, id="single-common-node"
        ),
        pytest.param(
            [[good("0-1")], [good("0")]], Policy.SINGLE_NUMA_NODE, poor(None), False, id="single-drops-wide-hints"
        ),
        pytest.param(
            [None], Policy.SINGLE_NUMA_NODE, good(None), True, id="single-turns-the-whole-machine-into-no-opinion"
        ),
        pytest.param([[good("0")], [good("1")]], Policy.BEST_EFFORT, poor("0-1"), True, id="nothing-common-falls-back"),
        pytest.param([[good("0")]], Policy.NONE, poor(None), True, id="none-never-looks"),
    ],
)
def test_merge_hints_answers_as_kubelet_when_case(
    lists: list[list[Hint] | None], policy: Policy, wanted: Hint, admitted: bool
) -> None:
    """The merged hint and the admission are kubelet's."""
    merged = merge_hints(lists, TWO, policy)

    assert (merged.hint, merged.is_admitted) == (wanted, admitted)
