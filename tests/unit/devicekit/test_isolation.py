"""Drivers behind walls: what hangs or fails stays there."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from topobus.devicekit.isolation import DriverFailed, DriverHung, IsolatedDriver
from topobus.domain.errors import HardwareError
from topobus.testing.clock import ManualClock
from topobus.testing.drivers.toy_driver import ToyDriver

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
    """Whatever a driver raises, even an attempt to end the process, comes out as DriverFailed with its cause."""

    def fail() -> None:
        raise error

    with pytest.raises(DriverFailed) as caught:
        await _isolated().call("observe", fail)
    assert caught.value.__cause__ is error


async def test_call_gives_up_when_the_driver_hangs_and_recovers_when_it_returns() -> None:
    """A hung call is given up after the limit; while it hangs no second one starts; when it returns the driver serves again."""
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
    while isolated.is_hung:  # noqa: ASYNC110  (the call ends in its thread, which tells nobody)
        await asyncio.sleep(0)

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
