"""The writes of decided claims beside the rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from topobus.controller.standalone.commit_tasks import CommitTasks, Peer
from topobus.engine.claims.stored import ObjectKey
from topobus.testing.clock import ManualClock
from topobus.values.ledger import Ledger

A, B = (ObjectKey("resourceclaim", "default", name) for name in ("a", "b"))
LEDGER = Ledger(node="n1", sequence=1)
REST_S = 2.0


def _tasks(parallel: int = 2, wake: Callable[[], None] = lambda: None) -> tuple[CommitTasks, ManualClock]:
    clock = ManualClock()
    return CommitTasks(parallel, REST_S, clock, wake), clock


def _until(event: asyncio.Event) -> Callable[[], Awaitable[None]]:
    async def work() -> None:
        await event.wait()

    return work


async def _turn() -> None:
    """Let tasks go on that can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_round_ends_before_its_writes_when_somebody_runs_them() -> None:
    """The next round decides on other claims while these are written, and hears when they are done."""
    woken: list[str] = []
    tasks, _ = _tasks(wake=lambda: woken.append("woken"))
    running = asyncio.create_task(tasks.run())
    await _turn()
    written = asyncio.Event()
    async with tasks.during_round():
        await tasks.begin([A], _until(written))
    busy = tasks.is_busy(A), tasks.is_busy(B), list(woken)

    written.set()
    await _turn()
    after = tasks.is_busy(A), list(woken)
    running.cancel()
    await asyncio.wait({running})

    assert busy == (True, False, [])
    assert after == (False, ["woken"])


@pytest.mark.parametrize("is_run", [False, True], ids=["alone", "run"])
async def test_round_waits_for_what_ends_with_it(*, is_run: bool) -> None:
    """Without a runner that is all; with one, what is asked for."""
    tasks, _ = _tasks()
    running = asyncio.create_task(tasks.run() if is_run else asyncio.Event().wait())
    await _turn()
    written = asyncio.Event()

    async def hold_round() -> None:
        async with tasks.during_round():
            await tasks.begin([A], _until(written), ends_with_round=is_run)

    held_round = asyncio.create_task(hold_round())
    await _turn()
    is_waiting = not held_round.done()
    written.set()
    await held_round
    running.cancel()
    await asyncio.wait({running})

    assert is_waiting
    assert not tasks.is_busy(A)


async def test_begin_waits_when_all_slots_are_taken() -> None:
    """A decision that cannot be written yet holds back the next ones; its claim counts as busy meanwhile."""
    tasks, _ = _tasks(parallel=1)
    first, second = asyncio.Event(), asyncio.Event()
    begun: list[ObjectKey] = []

    async def decide() -> None:
        async with tasks.during_round():
            for key, event in ((A, first), (B, second)):
                await tasks.begin([key], _until(event))
                begun.append(key)

    deciding = asyncio.create_task(decide())
    await _turn()
    while_full = list(begun), tasks.is_busy(B)
    first.set()
    await _turn()
    after = list(begun), tasks.is_busy(A), tasks.is_busy(B)
    second.set()
    await deciding

    assert while_full == ([A], True)
    assert after == ([A, B], False, True)


async def test_claim_is_free_when_the_wait_for_a_slot_was_cancelled() -> None:
    """Nothing was begun, so another round may decide on it."""
    tasks, _ = _tasks(parallel=1)
    written = asyncio.Event()
    async with tasks.during_round():
        await tasks.begin([A], _until(written))
        waiting = asyncio.create_task(tasks.begin([B], _until(written)))
        await _turn()
        waiting.cancel()
        await asyncio.wait({waiting})
        is_busy = tasks.is_busy(B)
        written.set()

    assert not is_busy


async def test_begin_is_refused_outside_of_a_round() -> None:
    """Nobody would own the task."""
    tasks, _ = _tasks()

    with pytest.raises(RuntimeError, match="nobody owns the tasks"):
        await tasks.begin([A], _until(asyncio.Event()))


@pytest.mark.parametrize(
    ("elapsed_s", "peer", "rests"),
    [
        pytest.param(0.0, Peer(1, LEDGER), True, id="nothing-new"),
        pytest.param(REST_S, Peer(1, LEDGER), False, id="time-is-over"),
        pytest.param(0.0, Peer(2, LEDGER), False, id="claim-changed"),
        pytest.param(0.0, Peer(1, Ledger(node="n1", sequence=2)), False, id="node-wrote-its-ledger"),
    ],
)
async def test_claim_rests_when_its_peer_was_silent(elapsed_s: float, peer: Peer, *, rests: bool) -> None:
    """Until the time is over, the claim is another, or its node has said something."""
    tasks, clock = _tasks()
    tasks.rest(A, Peer(1, LEDGER))
    clock.advance(elapsed_s)

    assert tasks.rests(A, lambda: peer) is rests
    assert tasks.is_resting is rests
    assert not tasks.rests(B, lambda: peer)


async def test_rest_is_forgotten_when_the_claim_is_gone() -> None:
    """Otherwise the loop would come back for it for ever."""
    tasks, _ = _tasks()
    tasks.rest(A, Peer(1, None))

    tasks.keep([B])

    assert not tasks.is_resting


async def test_loop_is_woken_once_when_several_claims_wait_for_their_turn() -> None:
    """One alarm at a time, however many ask; the next one is set when it has rung."""
    woken: list[str] = []
    tasks, clock = _tasks(wake=lambda: woken.append("woken"))
    running = asyncio.create_task(tasks.run())
    await _turn()
    for _ in range(3):
        tasks.wake_after(0.2)
    await _turn()
    clock.advance(0.2)
    await _turn()
    once = list(woken)
    tasks.wake_after(0.2)
    await _turn()
    clock.advance(0.2)
    await _turn()
    running.cancel()
    await asyncio.wait({running})

    assert once == ["woken"]
    assert woken == ["woken", "woken"]


async def test_nobody_is_woken_when_nobody_runs_the_tasks() -> None:
    """Whoever runs rounds by hand comes back by himself."""
    woken: list[str] = []
    tasks, clock = _tasks(wake=lambda: woken.append("woken"))

    tasks.wake_after(0.2)
    clock.advance(1.0)
    await _turn()

    assert woken == []


async def test_loop_is_woken_at_the_earliest_time_when_a_later_one_was_asked_for_before() -> None:
    """Who waits for a short turn does not wait for somebody's long one; what was asked for later comes round by the loop itself."""
    woken: list[str] = []
    tasks, clock = _tasks(wake=lambda: woken.append("woken"))
    running = asyncio.create_task(tasks.run())
    await _turn()
    for wait_s in (2.0, 0.2, 1.0):
        tasks.wake_after(wait_s)
        await _turn()
    clock.advance(0.2)
    await _turn()
    early = list(woken)
    clock.advance(2.0)
    await _turn()
    running.cancel()
    await asyncio.wait({running})

    assert early == ["woken"]
    assert woken == ["woken"]
