"""Work that is known to be costly, kept behind all that is cheap: each round does a part of it, the one that waited longest first.

Flows in: who turned out to be costly, what a search read and found, the time by a monotonic clock. Flows out: whose turn it is. A search that found nothing is repeated only when
something that it read became free, and then not before a pause that doubles with each vain try: forty claims that cannot be served must not cost everybody else a
search each whenever one device is let go. It is free of I/O and of clocks; its order depends on nothing but the order of calls.
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
    """Who waits for a costly search.

    Args: first_pause_s — after the first vain search; doubled with each one up to a minute.
    """

    def __init__(self, first_pause_s: float) -> None:
        self._first_pause_s = first_pause_s
        self._waiting: dict[K, _Waiting] = {}
        self._turn = 0

    def put(self, key: K, version: Hashable) -> None:
        """Note that work on an object is costly; one that waits already at this version keeps its place."""
        known = self._waiting.get(key)
        if known is None or known.version != version:
            self._turn += 1
            self._waiting[key] = _Waiting(version, self._turn)

    def holds(self, key: K, version: Hashable) -> bool:
        """Say whether an object waits here at this version: nobody else works on it."""
        known = self._waiting.get(key)
        return known is not None and known.version == version

    def tried(self, key: K, version: Hashable, read: Hashable, *, now_s: float) -> None:
        """Note a search that found nothing, and what it read; `version` is the object's since (it may have been told why)."""
        known = self._waiting.get(key)
        if known is not None:
            self._turn += 1
            pause_s = min(self._first_pause_s * 2 ** min(known.vain, 16), _LONGEST_PAUSE_S)
            self._waiting[key] = _Waiting(version, self._turn, known.vain + 1, read, now_s + pause_s)

    def turn_of(self, key: K) -> int:
        """Number the newest word on an object; it is another one after each, and 0 for one that does not wait."""
        known = self._waiting.get(key)
        return known.turn if known is not None else 0

    def drop(self, key: K) -> None:
        """Forget an object: it is served, gone, or waits for something else."""
        self._waiting.pop(key, None)

    def due(self, read_now: Callable[[K], Hashable], *, now_s: float) -> list[K]:
        """List whose turn it is, the longest wait first: never tried, or tried when what it read was less free, and long enough ago."""
        ready = [
            (waiting.turn, key)
            for key, waiting in self._waiting.items()
            if waiting.read is None or (now_s >= waiting.again_s and read_now(key) != waiting.read)
        ]
        return [key for _, key in sorted(ready, key=lambda pair: pair[0])]

    def is_pausing(self, read_now: Callable[[K], Hashable], *, now_s: float) -> bool:
        """Say whether somebody will be due by time alone."""
        return any(
            waiting.read is not None and now_s < waiting.again_s and read_now(key) != waiting.read for key, waiting in self._waiting.items()
        )

    def keep(self, is_there: Callable[[K], bool]) -> None:
        """Forget objects that are gone."""
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if is_there(key)}
