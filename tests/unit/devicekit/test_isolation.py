"""Drivers behind walls: what hangs or fails stays there."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from support.looks import other_threads
from support.toy_driver import ToyDriver
from topobus.devicekit.host import isolation
from topobus.devicekit.host.isolation import DriverFailed, DriverHung, IsolatedDriver
from topobus.process.clock import SystemClock
from topobus.testing.clock import ManualClock
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal, refuse

_TIMEOUT_S = 5.0


def _isolated(clock: ManualClock | None = None) -> IsolatedDriver:
    """Give a driver whose limit comes when the test moves its clock, and else never."""
    return IsolatedDriver(ToyDriver(), timeout_s=_TIMEOUT_S, clock=clock or ManualClock())


async def test_call_gives_the_result_when_the_driver_answers() -> None:
    """A call's result comes back, from another thread than the event loop's."""
    thread = await _isolated().call("discover", threading.get_ident)

    assert thread != threading.get_ident()


@pytest.mark.parametrize("error", [ValueError("bad"), HardwareError("bad"), SystemExit(3), KeyboardInterrupt()])
async def test_call_raises_driver_failed_when_the_driver_raises(error: BaseException) -> None:
    """Whatever a driver raises, even an attempt to end the process, comes out as DriverFailed with
    its cause.
    """

    def fail() -> None:
        raise error

    with pytest.raises(DriverFailed) as caught:
        await _isolated().call("observe", fail)
    assert caught.value.__cause__ is error


async def test_ask_refuses_with_the_driver_when_it_fails_or_hangs() -> None:
    """What `call` raises is a refusal that names the driver, with a code for each way to fail."""
    clock = ManualClock()
    isolated = _isolated(clock)
    hang, started = threading.Event(), threading.Event()

    def fail() -> None:
        raise HardwareError("bad")

    def wait() -> None:
        started.set()
        hang.wait()

    failed = await isolated.ask("check", fail)
    asking = asyncio.create_task(isolated.ask("check", wait))
    await asyncio.to_thread(started.wait)
    clock.advance(_TIMEOUT_S)
    hung = await asking
    hang.set()

    name = isolated.name
    assert failed == refuse("driver-failed", f"driver {name}: check failed: bad", driver=name)
    assert isinstance(hung, Refusal)
    assert [(reason.code, reason.facts) for reason in hung.reasons] == [("driver-hung", {"driver": name})]


async def test_call_gives_up_when_the_driver_hangs_and_recovers_when_it_returns() -> None:
    """A hung call is given up after the limit; while it hangs no second one starts.

    When it returns the driver serves again.
    """
    clock = ManualClock()
    isolated = _isolated(clock)
    hang, started = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        hang.wait()

    calling = asyncio.create_task(isolated.call("discover", wait))
    await asyncio.to_thread(started.wait)
    clock.advance(_TIMEOUT_S - 0.001)
    done, _ = await asyncio.wait({calling}, timeout=0)
    clock.advance(0.001)
    with pytest.raises(DriverHung, match="did not come back"):
        await calling
    with pytest.raises(DriverHung, match="earlier call"):
        await isolated.call("discover", lambda: 1)
    hang.set()
    while isolated.is_hung:
        await other_threads()

    assert done == set()
    assert await isolated.call("discover", lambda: 1) == 1


async def test_calls_share_one_thread_which_ends_with_the_driver() -> None:
    """No thread is made in the middle of an allocation, and none is left behind."""
    isolated = _isolated()
    threads = {await isolated.call("prepare", threading.current_thread) for _ in range(20)}
    (thread,) = threads
    del isolated
    gc.collect()
    await asyncio.to_thread(thread.join, 5)

    assert not thread.is_alive()


async def test_calls_run_one_at_a_time_when_many_come() -> None:
    """Two calls of one driver never overlap: vendor libraries are seldom safe for that."""
    isolated = _isolated()
    inside: list[int] = []
    most: list[int] = []

    def enter() -> None:
        inside.append(1)
        most.append(len(inside))
        inside.pop()

    await asyncio.gather(*(isolated.call("observe", enter) for _ in range(20)))

    assert max(most) == 1


async def test_watch_gives_the_news_when_a_look_finds_some() -> None:
    """Looks are repeated in the driver's one thread until one has news."""
    isolated, threads = _isolated(), list[threading.Thread]()

    def look(_: object) -> str | None:
        threads.append(threading.current_thread())
        return "news" if len(threads) == 3 else None

    news = await isolated.watch(look, lambda: 0.0)

    assert news == "news"
    assert set(threads) == {await isolated.call("prepare", threading.current_thread)}
    assert len(threads) == 3


async def test_watch_lets_calls_through_between_two_looks() -> None:
    """A call does not wait until a watch has news, and the watch goes on after it."""
    isolated, has_called = _isolated(), threading.Event()

    watching = asyncio.create_task(isolated.watch(lambda _: "news" if has_called.is_set() else None, lambda: 0.0))
    answer = await isolated.call("prepare", lambda: 1)
    is_watching = not watching.done()
    has_called.set()

    assert (answer, is_watching, await watching) == (1, True, "news")


async def test_watch_ends_without_news_when_it_is_interrupted() -> None:
    """Whoever needs the looks elsewhere gets them back at once, long before the next is due."""
    isolated = _isolated()

    watching = asyncio.create_task(isolated.watch(lambda _: "news", lambda: 3600.0))
    await asyncio.sleep(0)
    isolated.interrupt()

    assert await watching is None


async def test_watch_raises_driver_failed_when_a_look_raises() -> None:
    """What a vendor raises in a repeated look comes out as it does from a call."""

    def fail(_: object) -> None:
        raise ValueError("bad")

    with pytest.raises(DriverFailed, match="bad") as caught:
        await _isolated().watch(fail, lambda: 0.0)
    assert isinstance(caught.value.__cause__, ValueError)


async def test_watch_gives_up_when_a_look_hangs_and_no_call_of_that_time_is_done_later() -> None:
    """A look that hangs is told after the time limit.

    A call that waited behind it and was given up is never run, and the
    next one is when the look returns.
    """
    hang, started, done = threading.Event(), threading.Event(), list[str]()
    isolated = IsolatedDriver(ToyDriver(), timeout_s=0.05, clock=SystemClock())

    def wait(_: object) -> None:
        started.set()
        hang.wait()

    watching = asyncio.create_task(isolated.watch(wait, lambda: 0.0))
    await asyncio.to_thread(started.wait)
    with pytest.raises(DriverHung, match="did not come back"):
        await isolated.call("prepare", lambda: done.append("late"))
    with pytest.raises(DriverHung, match="a look did not come back"):
        await watching
    with pytest.raises(DriverHung, match="earlier call"):
        await isolated.call("prepare", lambda: done.append("refused"))
    hang.set()
    while isolated.is_hung:
        await other_threads()
    await isolated.call("prepare", lambda: done.append("next"))

    assert done == ["next"]


async def test_watch_ends_when_a_call_is_left_behind() -> None:
    """A call that hangs keeps the looks from being made: they come back to whoever counts them, and
    says that the driver is silent.
    """
    clock = ManualClock()
    isolated = _isolated(clock)
    hang, started = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        hang.wait()

    watching = asyncio.create_task(isolated.watch(lambda _: None, lambda: 3600.0))
    calling = asyncio.create_task(isolated.call("prepare", wait))
    await asyncio.to_thread(started.wait)
    clock.advance(_TIMEOUT_S)
    with pytest.raises(DriverHung):
        await calling

    assert await watching is None
    assert await isolated.watch(lambda _: "news", lambda: 0.0) is None
    hang.set()


async def test_watch_counts_the_time_limit_anew_when_a_look_begins_its_next_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look that discovers and observes may take twice the limit, as two calls may: each method
    has it for itself.
    """
    now_s, began_s = itertools.count(100.0), list[float | None]()
    monkeypatch.setattr(isolation, "time", SimpleNamespace(monotonic=lambda: next(now_s)))

    def look(begin_method: Callable[[], None]) -> str:
        for _ in range(2):
            began_s.append(watch.began_s)
            begin_method()
        return "news"

    watch = isolation._Watch(look, lambda: 0.0, asyncio.get_running_loop(), lambda _took_s: None)
    watch.run()

    assert began_s == [100.0, 101.0]
    assert (watch.result, watch.is_over) == ("news", True)
