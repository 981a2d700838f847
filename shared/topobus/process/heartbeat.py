"""Heartbeats: each loop of a process reports its own progress, and liveness follows from these
reports.

The probe endpoint runs in its own thread, so its answering proves nothing about the event loop.
Each loop therefore reports when it makes progress (`turn`) and when it is idle (`rest`). An idle
loop may wait without limit. A loop that works without progress counts as stuck. A pass over ten
thousand objects reports with each object.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from topobus.process.clock import Clock, SystemClock, until_tick

__all__ = ["EVENT_LOOP", "EVERY_S", "Heartbeat", "Heartbeats"]

EVENT_LOOP = "event-loop"
# The pause between two beats of the event loop, as the canary's; a third of what counts as stalled
# where that is less. Each beat wakes the process up.
EVERY_S = 3.0
_BEATS_A_LIMIT = 3
_EVENT_LOOP_LIMIT_S = 10.0
_WORK_LIMIT_S = 120.0


class Heartbeat:
    """The reports of one loop, written by the loop and read by the endpoint's thread.

    Units: limit_s — how long one step of the loop may take; an idle loop may be silent without
    limit.
    """

    def __init__(self, clock: Clock, limit_s: float) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._since_s: float | None = None

    def turn(self) -> None:
        """Report that the loop works, and has just made a step."""
        self._since_s = self._clock.monotonic()

    def rest(self) -> None:
        """Report that the loop waits for changes or for its time: it may stay silent."""
        self._since_s = None

    @property
    def stalled_s(self) -> float:
        """The seconds for which the loop has made no progress, when that is longer than its limit.

        0.0 otherwise.
        """
        since_s = self._since_s  # read once: another thread writes it
        silent_s = 0.0 if since_s is None else self._clock.monotonic() - since_s
        return silent_s if silent_s > self._limit_s else 0.0


class Heartbeats:
    """The loops of one process.

    Args: event_loop_limit_s — how long the event loop may be silent; work_limit_s — how long one
    step of a loop's work may take.

    >>> from topobus.testing.clock import ManualClock
    >>> clock = ManualClock()
    >>> beats = Heartbeats(clock)
    >>> beats.loop("reconcile").turn()
    >>> clock.advance(121)
    >>> beats.stalled()
    {'reconcile': 121.0}
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        event_loop_limit_s: float = _EVENT_LOOP_LIMIT_S,
        work_limit_s: float = _WORK_LIMIT_S,
    ) -> None:
        self._clock = clock or SystemClock()
        self._work_limit_s = work_limit_s
        self._every_s = min(EVERY_S, event_loop_limit_s / _BEATS_A_LIMIT)
        self._beats = {EVENT_LOOP: Heartbeat(self._clock, event_loop_limit_s)}

    def loop(self, name: str) -> Heartbeat:
        """Return a loop's heartbeat, the same one for the same name. It is idle until its first
        `turn`.
        """
        return self._beats.setdefault(name, Heartbeat(self._clock, self._work_limit_s))

    @contextmanager
    def working(self, name: str) -> Iterator[Heartbeat]:
        """Provide a loop's heartbeat for as long as the loop runs: a loop that has ended is not
        stuck.
        """
        beat = self.loop(name)
        try:
            yield beat
        finally:
            beat.rest()

    def stalled(self) -> dict[str, float]:
        """List the loops that are stuck, by name, with the seconds since their last step.

        Empty when all is well.
        """
        return {name: silent_s for name, beat in sorted(self._beats.copy().items()) if (silent_s := beat.stalled_s)}

    async def follow_event_loop(self) -> None:
        """Report the event loop's progress until cancelled."""
        beat = self._beats[EVENT_LOOP]
        try:
            while True:
                beat.turn()
                await self._clock.sleep(until_tick(self._clock.monotonic(), self._every_s))
        finally:
            beat.rest()
