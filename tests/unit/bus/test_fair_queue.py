"""The queue of requests: bounded, and nobody waits behind what somebody else sent in masses."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from topobus.bus.asks.fair_queue import Asker, FairQueue
from topobus.bus.asks.heavy_lane import HeavyLane

GREEDY, MODEST, OTHER = ("cli", "greedy"), ("cli", "modest"), ("gateway", "node")


def filled(count: int, *, most: int, asker: Asker = GREEDY) -> FairQueue[str]:
    """Make a queue in which one asker waits with so much."""
    queue: FairQueue[str] = FairQueue(most)
    for number in range(count):
        assert queue.put(asker, 1, f"{asker[1]}-{number}") == []
    return queue


def drained(queue: FairQueue[str]) -> list[str]:
    """Take all that waits, in its order."""
    items: list[str] = []
    while (item := queue.take()) is not None:
        items.append(item)
    return items


def test_an_asker_has_the_next_turn_when_another_waits_with_hundreds() -> None:
    """Turns go round among askers, so one request waits behind one of each other asker, not behind
    all of them.
    """
    queue = filled(200, most=1000)
    queue.put(MODEST, 1, "modest-0")

    assert drained(queue)[:3] == ["greedy-0", "modest-0", "greedy-1"]


def test_a_group_has_every_second_turn_when_another_group_has_many_askers() -> None:
    """Whoever calls itself a hundred askers takes turns from its own group alone."""
    queue: FairQueue[str] = FairQueue(1000)
    for number in range(100):
        queue.put(("cli", f"name-{number}"), 1, "cli")
    for _ in range(3):
        queue.put(OTHER, 1, "gateway")

    assert drained(queue)[:6] == ["cli", "gateway"] * 3


def test_the_heaviest_loses_its_newest_when_a_full_queue_gets_another_asker() -> None:
    """A full queue is full for who filled it: a newcomer has a place, and who sent most loses what
    it sent last.
    """
    queue = filled(10, most=10)

    assert queue.put(MODEST, 1, "modest-0") == ["greedy-9"]
    assert queue.put(GREEDY, 1, "greedy-10") == ["greedy-10"]
    assert len(queue) == 10


def test_nobody_is_pushed_out_when_all_wait_with_the_same() -> None:
    """Two of one weight never push each other out: the newcomer is refused."""
    queue: FairQueue[str] = FairQueue(2)
    queue.put(GREEDY, 1, "first")
    queue.put(MODEST, 1, "second")

    assert queue.put(("cli", "third"), 1, "third") == ["third"]
    assert drained(queue) == ["first", "second"]


def test_a_heavy_item_takes_the_place_of_several_when_their_asker_has_more() -> None:
    """Weights bound bytes: a large request needs as much room as many small ones, and takes it from
    who has more.
    """
    queue = filled(10, most=10)

    assert queue.put(MODEST, 4, "large") == ["greedy-9", "greedy-8", "greedy-7", "greedy-6"]
    assert queue.put(OTHER, 11, "larger than the queue") == ["larger than the queue"] or len(queue) <= 10


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["x", "y", "z"]), st.integers(1, 5), st.booleans()),
        min_size=1,
        max_size=80,
    )
)
def test_every_item_is_taken_or_lost_once_and_the_bound_is_kept(steps: list[tuple[str, str, int, bool]]) -> None:
    """Whatever comes and goes: nothing vanishes, nothing is answered twice, and what waits never
    weighs more than may wait.
    """
    queue: FairQueue[int] = FairQueue(12)
    weights: dict[int, int] = {}
    waiting: set[int] = set()
    for number, (group, name, weight, takes) in enumerate(steps):
        weights[number] = weight
        lost = queue.put((group, name), weight, number)
        waiting.add(number)
        assert set(lost) <= waiting
        waiting -= set(lost)
        if takes and (item := queue.take()) is not None:
            assert item in waiting
            waiting.remove(item)
        assert len(queue) == len(waiting)
        assert sum(weights[item] for item in waiting) <= 12
    while (item := queue.take()) is not None:
        waiting.remove(item)

    assert waiting == set()


async def test_a_turn_goes_to_the_next_when_who_had_it_was_cancelled() -> None:
    """A request that is abandoned while it waits, or in the moment when its turn comes, holds no
    turn.
    """
    lane = HeavyLane(1, 10)
    assert await lane.enter(GREEDY, 1)
    abandoned = asyncio.create_task(lane.enter(GREEDY, 1))
    granted = asyncio.create_task(lane.enter(MODEST, 1))
    third = asyncio.create_task(lane.enter(OTHER, 1))
    # Each runs to where it waits.
    await asyncio.sleep(0)
    assert lane.waiting == 3
    abandoned.cancel()
    await asyncio.wait({abandoned})
    lane.leave()
    granted.cancel()

    assert await third
    assert lane.waiting == 0


async def test_a_newcomer_has_its_place_when_who_loses_it_was_just_cancelled() -> None:
    """A cancelled request stands in the queue until its task runs again.

    Who takes its place in between gets no error of it.
    """
    lane = HeavyLane(1, 2)
    assert await lane.enter(OTHER, 1)
    greedy = [asyncio.create_task(lane.enter(GREEDY, 1)) for _ in range(2)]
    await asyncio.sleep(0)
    # The newcomer runs before the cancelled one: tasks run in the order in which they were woken.
    modest = asyncio.create_task(lane.enter(("gpu", "node"), 1))
    greedy[1].cancel()
    ended = await asyncio.gather(greedy[1], return_exceptions=True)
    lane.leave()
    lane.leave()

    assert isinstance(ended[0], asyncio.CancelledError)
    assert (await greedy[0], await modest) == (True, True)
