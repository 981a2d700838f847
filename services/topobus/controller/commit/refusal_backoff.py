"""Back-off after refusals: excludes devices that a node refused a claim, or nodes that refused a
pod, for a time that grows with each refusal.

A node's ledger does not explain every refusal (a reserved CPU, a device that became unhealthy a
moment ago), so the same search would choose the same devices again and again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from topobus.process.clock import Clock

__all__ = ["RefusalBackoff"]

T = TypeVar("T", bound=Hashable)

# A device that a node keeps refusing is tried at least so often, for the cause of the refusal may
# have ended.
_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True)
class _Refused(Generic[T]):
    things: dict[T, str] = field(default_factory=dict)
    count: int = 0
    until_s: float = 0.0


class RefusalBackoff(Generic[T]):
    """The refused things of each claim or pod."""

    def __init__(self, clock: Clock, first_wait_s: float) -> None:
        self._clock = clock
        self._first_wait_s = first_wait_s
        self._refused: dict[Hashable, _Refused[T]] = {}

    def add(self, asker: Hashable, things: Iterable[T], why: str) -> None:
        """Exclude what a node refused to a claim or pod. Each refusal doubles the time."""
        # An exclusion that has ended does not return. The count stays: a node that keeps refusing
        # is asked less and less often.
        refused, count = self.refused(asker), self.count(asker)
        wait_s = min(self._first_wait_s * 2 ** min(count + 1, 16), _LONGEST_WAIT_S)
        refused = refused | dict.fromkeys(things, f"refused by the node: {why}")
        self._refused[asker] = _Refused(refused, count + 1, self._clock.monotonic() + wait_s)

    def refused(self, asker: Hashable) -> dict[T, str]:
        """Map what is excluded for a claim or pod now to the reason."""
        refused = self._refused.get(asker)
        return refused.things if refused is not None and self._clock.monotonic() < refused.until_s else {}

    def wait_s(self, askers: Iterable[Hashable]) -> float:
        """Return after how many seconds the first exclusion of these claims or pods ends.

        Infinite where nothing is excluded.
        """
        now_s = self._clock.monotonic()
        waits = [refused.until_s - now_s for asker in askers if (refused := self._refused.get(asker)) is not None]
        return min((wait_s for wait_s in waits if wait_s > 0), default=math.inf)

    def count(self, asker: Hashable) -> int:
        """Count the refusals of a claim or pod. A try after a refusal is another operation."""
        return self._refused.get(asker, _Refused[T]()).count

    def drop(self, is_done: Callable[[Hashable], bool]) -> None:
        """Forget claims or pods that are done."""
        self._refused = {asker: refused for asker, refused in self._refused.items() if not is_done(asker)}
