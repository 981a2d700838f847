"""Reads the logs that a `topobus up` writes, one file per program, as one log in the order of time.

Files are only appended to. Each line has its time and its program. A line without a time (of a
traceback) belongs to the one before it. Our services write JSON with `ts` in UTC. nats-server
writes the local time: `[pid] 2026/11/28 11:37:01.283186 [INF] text`.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

__all__ = ["LogFile", "LogLine", "read_logs"]

_SERVERS = re.compile(r"\[\d+\] (\d{4}/\d\d/\d\d \d\d:\d\d:\d\d(?:\.\d+)?) ")
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


class LogLine(Struct, frozen=True, kw_only=True):
    """One line of a program."""

    time: datetime
    program: str
    text: str

    @property
    def is_json(self) -> bool:
        """Return whether one of our services wrote it as an event."""
        return self.text.startswith("{")


class LogFile:
    """The log of one program, read on from the end of the last read."""

    def __init__(self, path: Path) -> None:
        self.program = path.stem
        self._path = path
        self._read = 0
        self._time = _LONG_AGO

    def new_lines(self) -> Iterator[LogLine]:
        """Yield the whole lines that have come. An incomplete line waits for its end."""
        with self._path.open("rb") as file:
            if self._path.stat().st_size < self._read:
                # The file was emptied.
                self._read = 0
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                text = line.decode("utf-8", "replace").rstrip("\n")
                # Never decreasing: the lines of a file keep their order whatever clock was set
                # meanwhile.
                self._time = max(self._time, time_of(text) or self._time)
                yield LogLine(time=self._time, program=self.program, text=text)


def read_logs(files: Iterable[LogFile]) -> Iterator[LogLine]:
    """Merge what has come in all files by time."""
    return heapq.merge(*(file.new_lines() for file in files), key=lambda line: line.time)


def time_of(text: str) -> datetime | None:
    """Read when a line was written. None for a line without a time.

    >>> time_of('{"ts": "2026-11-28T11:37:08.325156Z", "event": "bus.connected"}')
    datetime.datetime(2026, 11, 28, 11, 37, 8, 325156, tzinfo=datetime.timezone.utc)
    >>> time_of("Traceback (most recent call last):")
    """
    try:
        if text.startswith("{"):
            said = json.loads(text)
            return datetime.fromisoformat(str(said["ts"])).astimezone(UTC)
        if (match := _SERVERS.match(text)) is not None:
            return (
                datetime.strptime(match[1].partition(".")[0], "%Y/%m/%d %H:%M:%S")
                .replace(microsecond=_microseconds(match[1]))
                .astimezone(UTC)
            )
    except (ValueError, KeyError):
        pass
    return None


def _microseconds(time: str) -> int:
    return int(time.partition(".")[2][:6].ljust(6, "0"))
