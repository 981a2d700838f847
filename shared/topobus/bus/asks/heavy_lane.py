"""Keeps expensive requests from delaying cheap ones: few run at a time, and the others wait their
turn, asker by asker.

A request that waits here takes none of the places in which cheap ones run. An asker that finds no
room is refused, with the time after which to ask again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from topobus.bus.asks.fair_queue import Asker, FairQueue

__all__ = ["HeavyLane", "RunTimes", "Workload"]

Q = TypeVar("Q")
R = TypeVar("R")

# An asker that is refused comes again within a minute, however long the queue is, because the
# requests that wait now may be given up by then.
_LONGEST_S = 60.0
# A handler's mean time follows the newest ones: each new one counts for so much of it.
_NEWEST_PART = 0.2


@dataclass(frozen=True, kw_only=True)
class Workload(Generic[Q, R]):
    """Which requests of an ask are expensive, how many of them run at once, and the error for an
    asker that finds no room.
    """

    is_heavy: Callable[[Q], bool]
    """Must be quick: it is asked for each request."""
    at_once: int
    """Expensive requests that run at the same time."""
    most_waiting: int
    """The weight of those that wait (see `Answerer`)."""
    busy: Callable[[float], R]
    """Makes the answer "busy, ask again in so many seconds"."""


class RunTimes:
    """How long requests take here, to estimate for an asker when there may be room."""

    def __init__(self) -> None:
        self._mean_s = 0.0

    def note(self, elapsed_s: float) -> None:
        """Record how long one request took."""
        self._mean_s += (elapsed_s - self._mean_s) * (_NEWEST_PART if self._mean_s else 1.0)

    def pause_s(self, waiting: int, at_once: int) -> float:
        """Estimate after how many whole seconds the requests that wait now will have been served.

        >>> times = RunTimes()
        >>> times.note(0.5)
        >>> times.pause_s(40, 4), times.pause_s(100_000, 4), RunTimes().pause_s(3, 4)
        (5.0, 60.0, 1.0)
        """
        return float(min(max(round(waiting * self._mean_s / at_once), 1), _LONGEST_S))


class HeavyLane:
    """Turns for expensive requests."""

    def __init__(self, at_once: int, most_waiting: int) -> None:
        self.at_once = at_once
        self._running = 0
        self._queue: FairQueue[asyncio.Future[bool]] = FairQueue(most_waiting)

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._queue)

    async def enter(self, asker: Asker, weight: int) -> bool:
        """Wait for a turn, which `leave` ends.

        False when there is no room, also when an asker with fewer waiting requests took the place.
        """
        if self._running < self.at_once:
            self._running += 1
            return True
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        for refused in self._queue.put(asker, weight, turn):
            # A request whose task was cancelled a moment ago leaves the queue at the task's next
            # turn of the loop.
            if not refused.done():
                refused.set_result(False)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.leave()
            else:
                self._queue.discard(asker, turn)
            raise

    def leave(self) -> None:
        """End a turn: the next waiting request gets it."""
        turn = self._queue.take()
        while turn is not None and turn.done():
            turn = self._queue.take()
        if turn is None:
            self._running -= 1
        else:
            turn.set_result(True)
