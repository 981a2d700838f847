"""Replicas leave pods to each other while there are several of them, each for a time of its own."""

from __future__ import annotations

import random

from topobus.controller.commit.replica_turns import ReplicaTurns, Stage
from topobus.testing.clock import ManualClock

UIDS = [f"uid-{number}" for number in range(200)]


def _turns(clock: ManualClock) -> ReplicaTurns:
    turns = ReplicaTurns(clock, grace_s=1.0)
    turns.see_another()
    return turns


def test_replica_waits_for_nobody_when_no_other_was_seen() -> None:
    """A single replica works on each pod at once."""
    turns = ReplicaTurns(ManualClock(), grace_s=1.0)

    assert [turns.wait_s("uid", stage) for stage in Stage] == [0.0, 0.0]


def test_replicas_have_turns_of_their_own_when_they_see_each_other() -> None:
    """Of two replicas each is first with about half of the pods, by more than some writes with most
    of them, and nobody waits longer than half a second.
    """
    random.seed(7)
    clock = ManualClock()
    first, second = _turns(clock), _turns(clock)
    waits = [(first.wait_s(uid, Stage.PLAN), second.wait_s(uid, Stage.PLAN)) for uid in UIDS]

    assert 80 <= sum(wait_of_first < wait_of_second for wait_of_first, wait_of_second in waits) <= 120
    assert sum(abs(wait_of_first - wait_of_second) > 0.05 for wait_of_first, wait_of_second in waits) > 150
    assert all(0.0 <= wait <= 0.5 for pair in waits for wait in pair)


def test_turn_comes_when_its_time_is_over() -> None:
    """The wait is counted from the first look; who finishes what another began waits its grace."""
    clock = ManualClock()
    turns = _turns(clock)
    before = turns.wait_s("uid", Stage.PLAN), turns.wait_s("uid", Stage.FINISH)
    clock.advance(0.5)
    after = turns.wait_s("uid", Stage.PLAN), turns.wait_s("uid", Stage.FINISH)

    assert before[0] > 0
    assert (before[1], after) == (1.0, (0.0, 0.5))


def test_replica_waits_for_nobody_when_the_other_was_seen_long_ago() -> None:
    """Ten seconds after the last intent of somebody else this replica is taken for the only one."""
    clock = ManualClock()
    turns = _turns(clock)
    turns.wait_s("uid", Stage.FINISH)
    clock.advance(10.5)
    alone = turns.wait_s("uid", Stage.FINISH)
    turns.see_another()

    assert alone == 0.0
    assert turns.wait_s("uid", Stage.FINISH) == 1.0


def test_turns_keep_what_is_waited_for_when_there_were_thousands() -> None:
    """Waits that are over are forgotten, and those that are not go on."""
    clock = ManualClock()
    turns = _turns(clock)
    for number in range(4_096):
        turns.wait_s(f"uid-{number}", Stage.PLAN)
    clock.advance(0.75)
    late = turns.wait_s("late", Stage.FINISH)
    clock.advance(0.25)
    turns.wait_s("more", Stage.PLAN)

    assert (late, turns.wait_s("late", Stage.FINISH)) == (1.0, 0.75)
