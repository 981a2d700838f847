"""Work that is known to be costly: whose turn it is, and when it is tried again."""

from __future__ import annotations

from collections.abc import Hashable

from topobus.controller.state.costly_work import CostlyWork


class Freed:
    """What each claim reads, as a number that grows when something is freed there."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def __call__(self, key: str) -> Hashable:
        """Say how free it is now."""
        return self.counts.get(key, 0)


def test_those_who_waited_longest_come_first() -> None:
    """Each try goes to the end of the line; one that was never tried comes before it."""
    work: CostlyWork[str] = CostlyWork(1.0)
    freed = Freed()
    for key in ("a", "b", "c"):
        work.put(key, 1)
    assert work.due(freed, now_s=0) == ["a", "b", "c"]

    work.tried("a", 2, freed("a"), now_s=0)
    work.put("d", 1)
    freed.counts = dict.fromkeys("abcd", 1)

    assert work.due(freed, now_s=100) == ["b", "c", "a", "d"]


def test_a_vain_search_is_repeated_only_when_something_that_it_read_was_freed() -> None:
    """Time alone changes nothing; what is freed elsewhere does not either."""
    work: CostlyWork[str] = CostlyWork(1.0)
    freed = Freed()
    work.put("a", 1)
    work.tried("a", 2, freed("a"), now_s=0)

    freed.counts["b"] = 7
    assert work.due(freed, now_s=1e6) == []
    assert not work.is_pausing(freed, now_s=0)
    freed.counts["a"] = 1

    assert work.due(freed, now_s=1e6) == ["a"]


def test_the_pause_doubles_with_each_vain_search_and_ends_at_a_minute() -> None:
    """Where something is freed all the time, a search that never finds anything is made ever more seldom."""
    work: CostlyWork[str] = CostlyWork(2.0)
    freed = Freed()
    work.put("a", 1)
    now_s, pauses = 0.0, []
    for version in range(2, 10):
        work.tried("a", version, freed("a"), now_s=now_s)
        freed.counts["a"] = version
        pause_s = next(index for index in range(1000) if work.due(freed, now_s=now_s + index))
        assert work.is_pausing(freed, now_s=now_s)
        pauses.append(pause_s)
        now_s += pause_s

    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]


def test_a_changed_object_is_new_and_one_that_is_gone_is_forgotten() -> None:
    """A user who changes a claim need not wait for its pause; who deletes it leaves nothing behind."""
    work: CostlyWork[str] = CostlyWork(1.0)
    freed = Freed()
    work.put("a", 1)
    work.tried("a", 2, freed("a"), now_s=0)
    assert work.holds("a", 2)

    work.put("a", 3)
    assert (work.holds("a", 2), work.due(freed, now_s=0)) == (False, ["a"])
    work.keep(lambda key: key != "a")

    assert work.due(freed, now_s=0) == []
