"""Timestamps: how a moment is written in messages, objects and files.

The clock itself is `topobus.process.clock`. A decision gets the moment as an argument.
"""

from __future__ import annotations

from datetime import UTC, datetime

__all__ = ["in_whole_seconds", "moment_of", "rfc3339", "short_time"]


def rfc3339(moment: datetime) -> str:
    """Write a moment as RFC 3339 in UTC with microseconds, so that texts sort as moments do.

    Errors: none. A naive moment is read as the machine's local time, so do not pass one.
    Source: RFC 3339 section 5.6.

    >>> rfc3339(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    '2026-01-02T03:04:05.000000Z'
    >>> from datetime import timedelta, timezone
    >>> rfc3339(datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=timezone(timedelta(hours=2))))
    '2026-01-02T01:04:05.000678Z'
    """
    # A third of what strftime costs; each message on the bus has such a text.
    # The offset, +00:00, is left out.
    utc = moment if moment.tzinfo is UTC else moment.astimezone(UTC)
    return f"{utc.isoformat(timespec='microseconds')[:-6]}Z"


def in_whole_seconds(moment: datetime) -> str:
    """Write a moment as an API server keeps its times: RFC 3339 in UTC, whole seconds.

    >>> in_whole_seconds(datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC))
    '2026-01-02T03:04:05Z'
    """
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment_of(text: str | None) -> datetime | None:
    """Read a moment of ISO 8601, without an offset as UTC. None for a text that is none.

    >>> moment_of("2026-01-02T03:04:05Z") == moment_of("2026-01-02T03:04:05"), moment_of("soon"), moment_of(None)
    (True, None, None)
    """
    try:
        moment = datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment


def short_time(time: str) -> str:
    """Cut an RFC 3339 time in UTC to seconds.

    >>> short_time("2026-11-20T10:56:23.049088Z"), short_time("")
    ('2026-11-20T10:56:23Z', '')
    """
    return time[:19] + "Z" if len(time) > 19 else time
