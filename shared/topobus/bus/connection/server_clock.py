"""Compares this machine's clock with the NATS server's, by the times in the server's other answers:
it sends no message of its own.

It logs when the difference becomes too large and when it is normal again, and adds a remark to
readiness. The process stays ready: its promises do not depend on clocks, but other processes may
take its requests for old ones.
"""

from __future__ import annotations

from collections import OrderedDict

from topobus.formats.messages.origin import CLOCK_LIMIT_S
from topobus.process.logging import get_logger
from topobus.process.readiness import Readiness

__all__ = ["ServerClock"]

_LIMIT_MS = CLOCK_LIMIT_S * 1000
# Writes whose stored time may still be read; a service writes few keys.
_MOST_WRITES = 16


class ServerClock:
    """The difference between our clock and the server's."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness
        self._differs = False
        self._writes: OrderedDict[tuple[str, int], tuple[int, int]] = OrderedDict()
        self.ahead_s: float | None = None
        """By how much ours was ahead at the last comparison, half of the way there and back more or
        less; None before the first one."""

    def note(self, asked_ms: int, answered_ms: int, server_ms: float) -> None:
        """Note that the server's clock showed `server_ms` at some moment between two of ours."""
        self.ahead_s = ((asked_ms + answered_ms) / 2 - server_ms) / 1000
        # As far as even the slowest way cannot explain it.
        is_ahead, is_behind = asked_ms - server_ms > _LIMIT_MS, server_ms - answered_ms > _LIMIT_MS
        differs = is_ahead or is_behind
        text = f"{abs(self.ahead_s):.1f} s {'ahead of' if self.ahead_s > 0 else 'behind'} the NATS server's"
        if differs:
            self._readiness.set(
                "clock",
                is_ready=True,
                why=f"this machine's clock is {text}: set both by the same time service (chrony, ntp)",
            )
        if differs and not self._differs:
            get_logger().warning(
                "clock.differs",
                ahead_s=round(self.ahead_s, 1),
                why=f"this machine's clock is {text}",
                wanted=f"at most {_LIMIT_MS / 1000:g} s",
                next_step="set both clocks by the same time service (chrony, ntp): peers take requests from this "
                "machine, or it takes theirs, for old ones",
            )
        elif self._differs and not differs:
            self._readiness.set("clock", is_ready=True)
            get_logger().info("clock.agrees", ahead_s=round(self.ahead_s, 1))
        self._differs = differs

    def note_write(self, stream: str, sequence: int, asked_ms: int, answered_ms: int) -> None:
        """Remember when a write of ours was sent and acknowledged. A later read of the message
        shows when the server stored it.
        """
        self._writes[stream, sequence] = (asked_ms, answered_ms)
        if len(self._writes) > _MOST_WRITES:
            self._writes.popitem(last=False)

    def note_stored(self, stream: str, sequence: int, server_ms: float) -> None:
        """Compare once the times of a write of ours with the time at which it was stored."""
        moments = self._writes.pop((stream, sequence), None)
        if moments is not None:
            self.note(*moments, server_ms)
