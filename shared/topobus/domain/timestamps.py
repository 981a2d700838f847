"""Timestamps: how a moment is written in messages, objects and files.

Flows in: an aware `datetime`. Flows out: its text. The clock itself is `topobus.runtime.clock`; a decision gets the moment as an argument.
"""

from __future__ import annotations

from datetime import UTC, datetime

__all__ = ["in_whole_seconds", "rfc3339"]


def rfc3339(moment: datetime) -> str:
    """Write a moment as RFC 3339 in UTC with microseconds, so that texts sort as moments do.

    Errors: none for an aware moment; a naive one is read as the machine's local time, so do not pass one.
    Source: RFC 3339 section 5.6.

    >>> rfc3339(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    '2026-01-02T03:04:05.000000Z'
    """
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def in_whole_seconds(moment: datetime) -> str:
    """Write a moment as an API server keeps its times: RFC 3339 in UTC, whole seconds.

    >>> in_whole_seconds(datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC))
    '2026-01-02T03:04:05Z'
    """
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
