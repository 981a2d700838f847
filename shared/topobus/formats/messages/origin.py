"""The writer's release and time of sending, which each write carries in headers.

The time is compared with the moment at which the server stored the message, so that no reader's
clock matters.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["CLOCK_LIMIT_S", "NO_ORIGIN", "Origin"]

CLOCK_LIMIT_S = 3.0
"""A clock that differs from the server's by more is named. Asks are refused as stale by a clock
that is two seconds further ahead than their asker waits."""


class Origin(Struct, frozen=True, kw_only=True):
    """What a stored message's headers report of its writer."""

    release: str = ""
    """Empty: the writer did not give it."""
    ahead_s: float | None = None
    """By how much the writer's clock was ahead of the server's when it sent; None: not known.
    Below zero also by the time that the message took."""
    stored_at: str = ""
    """RFC 3339, UTC, by the server's clock."""
    time_ns: int = 0
    """The same in nanoseconds since 1970."""

    @property
    def clock_remark(self) -> str:
        """A warning that the writer's clock is wrong. Empty when it agrees or nothing is known."""
        if self.ahead_s is None or abs(self.ahead_s) <= CLOCK_LIMIT_S:
            return ""
        direction = "ahead of" if self.ahead_s > 0 else "behind"
        return (
            f"its clock was {abs(self.ahead_s):.1f} s {direction} the NATS server's at {self.stored_at}: set both "
            "by the same time service (chrony, ntp)"
        )


NO_ORIGIN = Origin()
"""The origin of a message that does not name its writer."""
