"""What was refused (devices by a node to a claim, a node to a pod), kept away from for a growing while.

A node's ledger does not explain every refusal (a reserved CPU, a device that went sick a moment ago), so the same search would choose the same devices again,
for ever. Flows in: refusals and the time by a monotonic clock. Flows out: what must not be tried now.
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
    """What was refused, by who asked."""

    def __init__(self, first_wait_s: float) -> None:
        self._first_wait_s = first_wait_s
        self._known: dict[Hashable, _Refused[T]] = {}

    def remember(self, asker: Hashable, things: Iterable[T], why: str, *, now_s: float) -> None:
        """Keep an asker away from what it was refused; each refusal doubles the time."""
        known = self._known.get(asker, _Refused[T]())
        wait_s = min(self._first_wait_s * 2 ** min(known.count + 1, 16), _LONGEST_WAIT_S)
        refused = known.things | dict.fromkeys(things, f"refused by the node: {why}")
        self._known[asker] = _Refused(refused, known.count + 1, now_s + wait_s)

    def refused(self, asker: Hashable) -> dict[T, str]:
        """List what an asker must not get now, and why."""
        return self._known.get(asker, _Refused[T]()).things

    def count(self, asker: Hashable) -> int:
        """Count how often an asker was refused: a try after that is another operation."""
        return self._known.get(asker, _Refused[T]()).count

    def forgive(self, *, now_s: float, is_done: Callable[[Hashable], bool]) -> list[Hashable]:
        """Let things be tried again when their time has come; gives those askers, and forgets the ones that are done."""
        forgiven: list[Hashable] = []
        for asker, refused in tuple(self._known.items()):
            if is_done(asker):
                del self._known[asker]
            elif refused.things and now_s >= refused.until_s:
                # The count stays: a node that refuses for ever is asked ever more seldom.
                self._known[asker] = _Refused({}, refused.count, refused.until_s)
                forgiven.append(asker)
        return forgiven

    @property
    def is_waiting(self) -> bool:
        """Say whether something is to be tried again later."""
        return any(one.things for one in self._known.values())
