"""Time at the seam: everything that asks for the time asks a `Clock`, so tests can hold it still."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol

__all__ = ["Clock", "SystemClock", "rfc3339"]


class Clock(Protocol):
    """Tells the time: `now` for people and records, `monotonic` (seconds) for durations."""

    def now(self) -> datetime:
        """Give the present moment, aware, in UTC."""
        ...

    def monotonic(self) -> float:
        """Give seconds since some fixed moment; never goes back."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> datetime:
        """Give the present moment, aware, in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Give seconds since some fixed moment; never goes back."""
        return time.monotonic()


def rfc3339(moment: datetime) -> str:
    """Write a moment as RFC 3339 in UTC with microseconds, so that texts sort as moments do.

    >>> rfc3339(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    '2026-01-02T03:04:05.000000Z'
    """
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
