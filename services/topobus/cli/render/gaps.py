"""Reports gaps between the lines of a command that follows events: while NATS is away, when more
came than was read, and when the stream was replaced.

A gap is a line for people or for programs, at its place among the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum

from msgspec import Struct
from rich.text import Text

from topobus.bus.bus import Bus
from topobus.cli.render.output import Output
from topobus.values.timestamps import rfc3339, short_time

__all__ = ["Gap", "GapKind", "Gaps"]


class GapKind(StrEnum):
    """The kind of a gap."""

    DISCONNECTED = "disconnected"
    """No events arrive until `connected`."""
    CONNECTED = "connected"
    MISSED = "missed"
    """More came than was read."""
    REPLACED = "replaced"
    """The stream was lost or restored: what was shown before is void."""


class Gap(Struct, frozen=True, kw_only=True):
    """A gap as a line of a command with `--json`. No other line has a key `gap`."""

    gap: GapKind
    time: str
    """RFC 3339, UTC: when it was noticed."""
    text: str
    missed: int | None = None
    """How many were lost. None: not known, 0: none."""


class Gaps:
    """Reports the gaps of one command."""

    def __init__(self, output: Output, what: str, *, is_stored: bool) -> None:
        """Set what is followed (`what`, in the plural), and whether a stream stores it, so that
        nothing is lost while NATS is away (`is_stored`).
        """
        self._output = output
        self._what = what
        self._is_stored = is_stored

    @contextmanager
    def telling(self, bus: Bus) -> Iterator[None]:
        """Report when the connection is lost, and when it is back, until the block ends."""
        forget = bus.on_change(lambda: self._note_connection(is_connected=bus.is_connected))
        try:
            yield
        finally:
            forget()

    def note_missed(self, count: int) -> None:
        """Report that more came than was read."""
        self._show(
            GapKind.MISSED, f"{count} {self._what} came faster than they were read, and are not shown", missed=count
        )

    def note_replaced(self) -> None:
        """Report that the stream was replaced."""
        self._show(GapKind.REPLACED, f"the stream of {self._what} was replaced: all that the new one has follows")

    def _note_connection(self, *, is_connected: bool) -> None:
        if not is_connected:
            self._show(GapKind.DISCONNECTED, f"NATS went away: no {self._what} until it is back")
        elif self._is_stored:
            self._show(GapKind.CONNECTED, f"NATS is back: {self._what} since then follow", missed=0)
        else:
            self._show(
                GapKind.CONNECTED, f"NATS is back: {self._what} since then are lost, because they are not stored"
            )

    def _show(self, kind: GapKind, text: str, *, missed: int | None = None) -> None:
        gap = Gap(gap=kind, time=rfc3339(datetime.now(UTC)), text=text, missed=missed)
        self._output.line(gap)
        self._output.show(Text.assemble((f"{short_time(gap.time)}  ", "faint"), (text, "warn")))
