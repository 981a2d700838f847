"""The writes of decided claims beside the rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from topobus.controller.standalone.commit_tasks import CommitTasks
from topobus.engine.claims.stored import ObjectKey

A, B = (ObjectKey("resourceclaim", "default", name) for name in ("a", "b"))


def _until(event: asyncio.Event) -> Callable[[], Awaitable[None]]:
    async def work() -> None:
        await event.wait()

    return work


async def _turn() -> None:
    """Let tasks go on that can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_round_ends_before_its_writes_when_somebody_runs_them() -> None:
    """The next round decides on other claims while these are written, and
    hears when they are done.
    """
    woken: list[str] = []
    tasks = CommitTasks(2, wake=lambda: woken.append("woken"))
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
    tasks = CommitTasks(2)
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
    """A decision that cannot be written yet holds back the next ones.

    Its claim counts as busy meanwhile.
    """
    tasks = CommitTasks(1)
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
    tasks = CommitTasks(1)
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
    tasks = CommitTasks(2)

    with pytest.raises(RuntimeError, match="the tasks have no owner"):
        await tasks.begin([A], _until(asyncio.Event()))
