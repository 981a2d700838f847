"""One change of a card at a time, among the threads of one driver: locks by PCI address, and marks on the cards that are changing now.

Flows in: addresses. Flows out: whether the caller has them for itself. The looks of a driver never wait: they ask for the mark, and keep what they saw last of such a card.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from topobus.values.pci import PciAddress

__all__ = ["CardLocks", "Pauses", "look_until"]

_LOOK_S = 0.05

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """How a driver waits for hardware; a test gives its own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class CardLocks:
    """The locks of one driver's cards."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[PciAddress, threading.Lock] = {}
        self._changing: frozenset[PciAddress] = frozenset()

    def is_changing(self, address: PciAddress) -> bool:
        """Say whether this process changes a card now: what it looks like meanwhile means nothing."""
        return address in self._changing

    @contextmanager
    def changing(self, address: PciAddress) -> Iterator[None]:
        """Mark a card; the caller has its lock."""
        with self._guard:
            self._changing |= {address}
        try:
            yield
        finally:
            with self._guard:
                self._changing -= {address}

    @contextmanager
    def locked(self, addresses: Collection[PciAddress], limit_s: float) -> Iterator[bool]:
        """Have these cards for oneself; False when somebody else has one of them for longer than the limit. 0: do not wait."""
        with self._guard:
            locks = [self._locks.setdefault(address, threading.Lock()) for address in sorted(addresses)]
        taken: list[threading.Lock] = []
        try:
            for lock in locks:
                if not lock.acquire(timeout=limit_s if limit_s else -1, blocking=bool(limit_s)):
                    break
                taken.append(lock)
            yield len(taken) == len(locks)
        finally:
            for lock in taken:
                lock.release()


def look_until(look: Callable[[], tuple[_T | None, str]], pauses: Pauses, limit_s: float) -> _T | str:
    """Look again and again until there is a value, or for so long; then why there is none."""
    deadline = pauses.now() + limit_s
    while True:
        value, why = look()
        if value is not None:
            return value
        if pauses.now() >= deadline:
            return why
        pauses.sleep(_LOOK_S)
