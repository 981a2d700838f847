"""Isolates one driver: its calls run in a thread of their own, one at a time, with a time limit.

A call that hangs keeps the thread and marks the driver as hung. Further calls fail at once until
the hung one returns. All calls share one thread, because starting a thread costs a loaded machine
milliseconds, in the middle of kubelet's Allocate. Any exception of the vendor's code becomes a
HardwareError. The thread is a daemon, so a hung vendor library does not keep the process from
ending.

A repeated look that finds nothing new does not pass through the event loop (`watch`): the thread
itself waits for its time, between two calls, and wakes the loop only for changes. To wake the loop
and sleep again costs more than most looks.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from topobus.devicekit.driver import DeviceDriver
from topobus.process.clock import Clock, SystemClock, until_tick
from topobus.process.tracing import span
from topobus.values.errors import HardwareError
from topobus.values.outcome import Reason, Refusal

__all__ = ["DriverError", "DriverFailed", "DriverHung", "IsolatedDriver"]

T = TypeVar("T")

# How often to check whether one of the thread's own looks hangs, unless the time limit is shorter:
# at the process's other ticks. The limit itself is kept exactly, because it ends after the next of
# these checks.
_CHECK_S = 3.0


class DriverError(HardwareError):
    """Raised when a driver's method has no result."""

    code = ""

    @property
    def reason(self) -> Reason:
        """Name the driver, and what is wrong with it."""
        return Reason(code=self.code, message=self.message, facts={"driver": str(self.facts["driver"])})


class DriverFailed(DriverError):
    """Raised when a driver's method raised anything. The cause is chained."""

    code = "driver-failed"


class DriverHung(DriverError):
    """Raised when a driver did not come back in time, or an earlier call still has not."""

    code = "driver-hung"


class IsolatedDriver:
    """A driver whose every call is bounded."""

    def __init__(
        self,
        driver: DeviceDriver,
        *,
        timeout_s: float,
        clock: Clock | None = None,
        note_call: Callable[[str, str, float], None] = lambda *_: None,
    ) -> None:
        """Isolate a driver.

        `note_call` is called with its name, the method, and how many seconds that ran, in the
        driver's thread.
        """
        self.note_call = note_call
        self._clock = clock or SystemClock()
        self.driver = driver
        self.name = driver.name
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._left_behind: _Call[object] | _Watch[object] | None = None
        self._calls: queue.SimpleQueue[_Call[Any] | _Watch[Any] | None] = queue.SimpleQueue()
        self._watch: _Watch[Any] | None = None
        self._has_thread = False

    def beside(self, driver: DeviceDriver | None = None, *, timeout_s: float) -> IsolatedDriver:
        """Return the same driver, or the one that replaces it, with a thread of its own, for calls
        that last longer than others may wait.
        """
        return IsolatedDriver(driver or self.driver, timeout_s=timeout_s, clock=self._clock, note_call=self.note_call)

    @property
    def is_hung(self) -> bool:
        """Return whether a call has not come back in time and still runs."""
        return self._left_behind is not None and not self._left_behind.is_over

    async def call(self, verb: str, function: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Run one of the driver's methods. `verb` names it in errors.

        Errors: raises DriverHung after the time limit (waiting for an earlier call included),
        DriverFailed when the method raised.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        with span(f"driver {verb}", driver=self.name):
            try:
                async with self._clock.timeout(limit_s), self._lock:
                    return await self._run(verb, function)
            except TimeoutError as err:
                raise self._hung(verb, limit_s) from err

    async def ask(self, verb: str, function: Callable[[], T]) -> T | Refusal:
        """Run one of the driver's methods, and refuse where `call` raises."""
        try:
            return await self.call(verb, function)
        except DriverError as err:
            return Refusal(reasons=(err.reason,))

    async def watch(self, look: Callable[[Callable[[], None]], T | None], pause_s: Callable[[], float]) -> T | None:
        """Repeat a look in the driver's thread until it returns something else than None, and
        return that.

        None after `interrupt`.

        Shapes: look, pause_s — called in the thread; look gets a function to call between two
        methods of the driver, each of which has its own time limit; pause_s returns the seconds
        until the next look. One watch at a time. Real time: for a clock that `is_real`.
        Errors: raises DriverHung when a look's method takes longer than the driver's time limit,
        DriverFailed when it raised.
        Cost: the event loop wakes up each 3 s, with its other ticks; calls of the driver run
        between two looks.
        """
        if self.is_hung:
            return None
        watch = self._watch = _Watch(
            look, pause_s, asyncio.get_running_loop(), partial(self.note_call, self.name, "look")
        )
        self._hand_over(watch)
        check_s = min(_CHECK_S, self._timeout_s)
        try:
            while not watch.done.done():
                now_s, began_s = time.monotonic(), watch.began_s
                left_s = None if began_s is None else began_s + self._timeout_s - now_s
                if left_s is not None and left_s <= 0:
                    self._left_behind = watch
                    raise self._hung("a look", self._timeout_s)
                await asyncio.wait(
                    {watch.done}, timeout=min(until_tick(now_s, check_s), check_s if left_s is None else left_s)
                )
        finally:
            watch.is_ended = True
            self._watch = None
        if watch.error is not None:
            raise self._failed("a look", watch.error) from watch.error
        return watch.result

    def interrupt(self) -> None:
        """End the present watch, if there is one, without news."""
        if self._watch is not None:
            self._watch.end()

    async def _run(self, verb: str, function: Callable[[], T]) -> T:
        if self.is_hung:
            raise DriverHung(f"driver {self.name}: an earlier call has not come back yet", driver=self.name, verb=verb)
        call = _Call(function, asyncio.get_running_loop(), partial(self.note_call, self.name, verb))
        self._hand_over(call)
        try:
            await call.done
        except asyncio.CancelledError:
            call.is_given_up = True
            if call.has_begun:
                self._left_behind = call  # type: ignore[assignment]  # only asked whether it is over
                # The next look decides whether the driver counts as hung, and a busy thread does
                # not begin one.
                self.interrupt()
            raise
        if call.error is not None:
            raise self._failed(verb, call.error) from call.error
        return call.result[0]

    def _hand_over(self, item: _Call[Any] | _Watch[Any]) -> None:
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=_work, args=(self._calls,), name=f"driver-{self.name}", daemon=True).start()
            # The thread ends with the object that gives it work.
            weakref.finalize(self, self._calls.put, None)
        self._calls.put(item)

    def _hung(self, verb: str, limit_s: float) -> DriverHung:
        return DriverHung(
            f"driver {self.name}: {verb} did not come back within {limit_s:g} s",
            next_step="the driver is asked again as soon as it comes back; look at the kernel log for its hardware",
            driver=self.name,
            verb=verb,
        )

    def _failed(self, verb: str, error: BaseException) -> DriverFailed:
        return DriverFailed(
            f"driver {self.name}: {verb} failed: {error if isinstance(error, HardwareError) else repr(error)}",
            driver=self.name,
            verb=verb,
        )


def _work(calls: queue.SimpleQueue[_Call[Any] | _Watch[Any] | None]) -> None:
    watch: _Watch[Any] | None = None
    while True:
        if watch is not None and watch.is_ended:
            watch = None
        try:
            item = calls.get(timeout=None if watch is None else watch.pause_s())
        except queue.Empty:
            if watch is not None:
                watch.run()
            continue
        if item is None:
            return
        if isinstance(item, _Watch):
            watch = item
        else:
            item.run()
        # Otherwise the last call's result would be kept until the next one.
        del item


class _Watch(Generic[T]):
    """One look, repeated in a thread until it finds news."""

    def __init__(
        self,
        look: Callable[[Callable[[], None]], T | None],
        pause_s: Callable[[], float],
        loop: asyncio.AbstractEventLoop,
        note: Callable[[float], None],
    ) -> None:
        self._note = note
        self._look = look
        self._loop = loop
        self.pause_s = pause_s
        self.done: asyncio.Future[None] = loop.create_future()
        self.result: T | None = None
        self.error: BaseException | None = None
        self.began_s: float | None = None
        """When the driver's method that runs now began, by
        CLOCK_MONOTONIC; None between two looks."""
        self.is_ended = False

    @property
    def is_over(self) -> bool:
        """Say whether no look runs."""
        return self.began_s is None

    def run(self) -> None:
        """Look once, in the thread."""
        if self.is_ended:
            return
        self._begin_method()
        first_began_s = self.began_s or 0.0
        try:
            self.result = self._look(self._begin_method)
        except BaseException as err:  # noqa: BLE001 - boundary: vendor code; the error is handed to the waiting coroutine
            self.error = err
        self.began_s = None
        self._note(time.monotonic() - first_began_s)
        if self.result is None and self.error is None:
            return
        self.is_ended = True
        try:
            self._loop.call_soon_threadsafe(self.end)
        except RuntimeError:
            # The loop has ended meanwhile: no caller waits any more.
            return

    def _begin_method(self) -> None:
        self.began_s = time.monotonic()

    def end(self) -> None:
        """Wake the waiting coroutine. Call it in the event loop."""
        if not self.done.done():
            self.done.set_result(None)


class _Call(Generic[T]):
    """One call on its way through a thread."""

    def __init__(
        self, function: Callable[[], T], loop: asyncio.AbstractEventLoop, note: Callable[[float], None]
    ) -> None:
        self._note = note
        self._function = function
        self._loop = loop
        self.done: asyncio.Future[None] = loop.create_future()
        self.result: list[T] = []
        self.error: BaseException | None = None
        self.has_begun = False
        self.is_given_up = False
        """Set when no caller waits any more: work that has not begun by then is not done."""
        self.is_over = False

    def run(self) -> None:
        self.has_begun = True
        if self.is_given_up:
            return
        began_s = time.monotonic()
        try:
            self.result.append(self._function())
        except BaseException as err:  # noqa: BLE001 - boundary: vendor code; the error is handed to the waiting coroutine
            self.error = err
        self._note(time.monotonic() - began_s)
        self.is_over = True
        try:
            self._loop.call_soon_threadsafe(self._finish)
        except RuntimeError:
            # The loop has ended meanwhile: no caller waits any more.
            return

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
