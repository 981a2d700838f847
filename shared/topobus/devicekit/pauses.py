"""How the threads of drivers wait for hardware: real time, or a test's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Pauses", "look_until"]

_LOOK_S = 0.05

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """A clock and a sleep. A test passes its own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def look_until(look: Callable[[], tuple[_T | None, str]], pauses: Pauses, limit_s: float) -> _T | str:
    """Look repeatedly until there is a value, or until the time is over.

    Then return why there is none.
    """
    deadline = pauses.now() + limit_s
    while True:
        value, why = look()
        if value is not None:
            return value
        if pauses.now() >= deadline:
            return why
        pauses.sleep(_LOOK_S)
