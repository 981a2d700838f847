"""Back-off after refusals: excludes devices that a node refused a claim, or nodes that refused a pod, for a time that grows with each refusal.

A node's ledger does not explain every refusal (a reserved CPU, a device that became unhealthy a moment ago), so the same search would choose the same
devices again and again. Flows in: refusals and monotonic times. Flows out: what to exclude now.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["RefusalBackoff"]

T = TypeVar("T", bound=Hashable)

# A device that a node keeps refusing is tried at least so often: the refusal may have had a cause that went.
_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True)
class _Refused(Generic[T]):
    things: dict[T, str] = field(default_factory=dict)
    count: int = 0
    until_s: float = 0.0


class RefusalBackoff(Generic[T]):
    """Refused things by the claim or pod that was refused."""

    def __init__(self, first_wait_s: float) -> None:
        self._first_wait_s = first_wait_s
        self._refused: dict[Hashable, _Refused[T]] = {}

    def add(self, asker: Hashable, things: Iterable[T], why: str, *, now_s: float) -> None:
        """Exclude what a node refused to a claim or pod; each refusal doubles the time."""
        before = self._refused.get(asker, _Refused[T]())
        wait_s = min(self._first_wait_s * 2 ** min(before.count + 1, 16), _LONGEST_WAIT_S)
        refused = before.things | dict.fromkeys(things, f"refused by the node: {why}")
        self._refused[asker] = _Refused(refused, before.count + 1, now_s + wait_s)

    def refused(self, asker: Hashable) -> dict[T, str]:
        """Map what a claim or pod must not get now to the reason."""
        return self._refused.get(asker, _Refused[T]()).things

    def count(self, asker: Hashable) -> int:
        """Count the refusals of a claim or pod: a try after one is another operation."""
        return self._refused.get(asker, _Refused[T]()).count

    def expire(self, *, now_s: float, is_done: Callable[[Hashable], bool]) -> list[Hashable]:
        """End exclusions whose time is over; gives their claims or pods, and removes those that are done."""
        expired: list[Hashable] = []
        for asker, refused in tuple(self._refused.items()):
            if is_done(asker):
                del self._refused[asker]
            elif refused.things and now_s >= refused.until_s:
                # The count stays: a node that refuses for ever is asked ever more seldom.
                self._refused[asker] = _Refused({}, refused.count, refused.until_s)
                expired.append(asker)
        return expired

    @property
    def is_waiting(self) -> bool:
        """Say whether any exclusion is still in force."""
        return any(refused.things for refused in self._refused.values())
