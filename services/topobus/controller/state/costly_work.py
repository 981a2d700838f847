"""A queue for work that is known to be costly: it runs after all cheap work, a part of it in each round, the longest waiting first.

Flows in: the keys of costly objects, what a search read and found, monotonic times. Flows out: the keys to work on. A search that found nothing is
repeated only after something that it read became free, and after a pause that doubles with each vain try: otherwise forty claims that cannot be
served would cost a search each whenever one device is released, and delay all others. No I/O and no clock; the order depends only on the order of
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["CostlyWork"]

K = TypeVar("K", bound=Hashable)

# As `Refusals`: whoever waits is tried at least so often once something is free again.
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class _Waiting:
    version: Hashable
    """Of the object itself: a new one is tried at once, without a pause."""
    turn: int
    """Grows with every try of anybody: the lowest has waited longest."""
    vain: int = 0
    read: Hashable = None
    """What the last search read, as it was then; None before the first one."""
    again_s: float = 0.0


class CostlyWork(Generic[K]):
    """The queue of objects that need a costly search.

    Args: first_pause_s — after the first vain search; doubled with each one up to a minute.
    """

    def __init__(self, first_pause_s: float) -> None:
        self._first_pause_s = first_pause_s
        self._waiting: dict[K, _Waiting] = {}
        self._turn = 0

    def put(self, key: K, version: Hashable) -> None:
        """Note that work on an object is costly; one that waits already at this version keeps its place."""
        waiting = self._waiting.get(key)
        if waiting is None or waiting.version != version:
            self._turn += 1
            self._waiting[key] = _Waiting(version, self._turn)

    def holds(self, key: K, version: Hashable) -> bool:
        """Say whether an object is queued at this version, so that no other part works on it."""
        waiting = self._waiting.get(key)
        return waiting is not None and waiting.version == version

    def tried(self, key: K, version: Hashable, read: Hashable, *, now_s: float) -> None:
        """Record a search that found nothing, and what it read; `version` is the object's version afterwards (its condition may have been written)."""
        waiting = self._waiting.get(key)
        if waiting is not None:
            self._turn += 1
            pause_s = min(self._first_pause_s * 2 ** min(waiting.vain, 16), _LONGEST_PAUSE_S)
            self._waiting[key] = _Waiting(version, self._turn, waiting.vain + 1, read, now_s + pause_s)

    def turn_of(self, key: K) -> int:
        """Number the last change of an object's entry: another number after each change, 0 for an object that is not queued."""
        waiting = self._waiting.get(key)
        return waiting.turn if waiting is not None else 0

    def drop(self, key: K) -> None:
        """Remove an object: it is served, deleted, or waits for something else."""
        self._waiting.pop(key, None)

    def due(self, read_now: Callable[[K], Hashable], *, now_s: float) -> list[K]:
        """List the objects to search for now, the longest waiting first: never tried, or something that they read became free and their pause is over."""
        ready = [
            (waiting.turn, key)
            for key, waiting in self._waiting.items()
            if waiting.read is None or (now_s >= waiting.again_s and read_now(key) != waiting.read)
        ]
        return [key for _, key in sorted(ready, key=lambda pair: pair[0])]

    def is_pausing(self, read_now: Callable[[K], Hashable], *, now_s: float) -> bool:
        """Say whether an object becomes due by time alone."""
        return any(
            waiting.read is not None and now_s < waiting.again_s and read_now(key) != waiting.read for key, waiting in self._waiting.items()
        )

    def keep(self, is_there: Callable[[K], bool]) -> None:
        """Remove objects that no longer exist."""
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if is_there(key)}
