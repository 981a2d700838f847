"""Laws of repairs by policy: what holds in any history of faults, persons and dying controllers."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from support.laws import share
from support.repair_histories import RepairHistory
from topobus.values.repair import RepairEnd

_HISTORIES = 1_000
_ACTS = 30


@pytest.mark.law
@pytest.mark.parametrize("thousand", share(range(10)))
def test_repairs_keep_budgets_protection_and_a_persons_word_in_any_history(thousand: int) -> None:
    """No budget is exceeded, no protected device taken, no person overruled or called twice.

    The history asserts it at each step. When the trouble ends no repair is left under way, and each
    way to end has occurred.
    """
    ends: Counter[RepairEnd] = Counter()
    endless: list[int] = []
    for seed in range(thousand * _HISTORIES, (thousand + 1) * _HISTORIES):
        history = RepairHistory(Random(seed))
        for _ in range(_ACTS):
            history.act()
        history.settle()
        ends += history.ends
        if history.document.under_way:
            endless.append(seed)

    assert endless == []
    assert set(ends) == {RepairEnd.REPAIRED, RepairEnd.GAVE_UP, RepairEnd.TAKEN_OVER}
