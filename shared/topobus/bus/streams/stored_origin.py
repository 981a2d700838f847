"""Reads from a stored message's headers and time who wrote it."""

from __future__ import annotations

from datetime import UTC, datetime

from topobus.bus.asks.ask_headers import SENT, read_number
from topobus.bus.connection.connection import Headers
from topobus.formats.messages.origin import Origin
from topobus.formats.messages.releases import RELEASE, shown_release
from topobus.values.timestamps import rfc3339

__all__ = ["read_origin"]


def read_origin(headers: Headers, time_ns: int) -> Origin:
    """Read what a stored message's headers have of its writer.

    A header with another text than ours, or no number where one is due, is ignored.
    """
    sent_ms = read_number(headers.get(SENT))
    return Origin(
        release=shown_release(headers.get(RELEASE, "")),
        ahead_s=None if sent_ms is None else (sent_ms - time_ns / 1_000_000) / 1000,
        stored_at=rfc3339(datetime.fromtimestamp(time_ns / 1_000_000_000, UTC)),
        time_ns=time_ns,
    )
