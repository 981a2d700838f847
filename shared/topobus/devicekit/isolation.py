"""Isolates one driver: its calls run in a thread of their own, one at a time, with a time limit.

A call that hangs keeps the thread and marks the driver as hung; further calls fail at once until the hung one returns. All calls share one thread, because starting
a thread costs a loaded machine milliseconds, in the middle of kubelet's Allocate. Any exception of the vendor's code becomes a HardwareError. The thread is a daemon,
so a hung vendor library does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from topobus.devicekit.driver import DeviceDriver
from topobus.domain.errors import HardwareError
from topobus.runtime.clock import Clock, SystemClock

__all__ = ["DriverFailed", "DriverHung", "IsolatedDriver"]

T = TypeVar("T")


class DriverFailed(HardwareError):
    """Raised when a driver's method raised anything; the cause is chained."""


class DriverHung(HardwareError):
    """Raised when a driver did not come back in time, or an earlier call still has not."""


class IsolatedDriver:
    """A driver whose every call is bounded."""

    def __init__(self, driver: DeviceDriver, *, timeout_s: float, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.driver = driver
        self.name = driver.name
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._left_behind: _Call[object] | None = None
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._has_thread = False

    @property
    def is_hung(self) -> bool:
        """Say whether a call is out that did not come back in time."""
        return self._left_behind is not None and not self._left_behind.is_over

    async def call(self, verb: str, function: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Run one of the driver's methods; `verb` names it in errors.

        Errors: raises DriverHung after the time limit (waiting for an earlier call included), DriverFailed when the method raised.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with self._clock.timeout(limit_s), self._lock:
                return await self._run(verb, function)
        except TimeoutError as err:
            raise DriverHung(
                f"driver {self.name}: {verb} did not come back within {limit_s:g} s",
                next_step="the driver is asked again as soon as it comes back; look at the kernel log for its hardware",
                driver=self.name,
                verb=verb,
            ) from err

    async def _run(self, verb: str, function: Callable[[], T]) -> T:
        if self.is_hung:
            raise DriverHung(f"driver {self.name}: an earlier call has not come back yet", driver=self.name, verb=verb)
        call = _Call(function, asyncio.get_running_loop())
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=_work, args=(self._calls,), name=f"driver-{self.name}", daemon=True).start()
            # The thread ends with whoever gives it work.
            weakref.finalize(self, self._calls.put, None)
        self._calls.put(call)
        try:
            await asyncio.shield(call.done)
        except asyncio.CancelledError:
            self._left_behind = call  # type: ignore[assignment]  # only asked whether it is over
            raise
        if call.error is not None:
            raise DriverFailed(
                f"driver {self.name}: {verb} failed: {call.error if isinstance(call.error, HardwareError) else repr(call.error)}",
                driver=self.name,
                verb=verb,
            ) from call.error
        return call.result[0]


def _work(calls: queue.SimpleQueue[_Call[Any] | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        # Else the last call's result would be kept until the next one.
        del call


class _Call(Generic[T]):
    """One call on its way through a thread."""

    def __init__(self, function: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self._function = function
        self._loop = loop
        self.done: asyncio.Future[None] = loop.create_future()
        self.result: list[T] = []
        self.error: BaseException | None = None
        self.is_over = False

    def run(self) -> None:
        try:
            self.result.append(self._function())
        except BaseException as err:  # noqa: BLE001 - boundary: vendor code; the error is handed to the waiting coroutine
            self.error = err
        self.is_over = True
        try:
            self._loop.call_soon_threadsafe(self._finish)
        except RuntimeError:
            # The loop has ended meanwhile: nobody waits any more.
            return

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
