"""The status of supervised programs, for people: a table that a live display redraws, and lines
where there is no terminal.
"""

from __future__ import annotations

import json
import re

from rich import box
from rich.table import Table
from rich.text import Text

from topobus.local_system.supervision import ProgramState, ProgramStatus

__all__ = ["log_text", "status_line", "status_table"]

_STYLES = {
    ProgramState.WAITING: "faint",
    ProgramState.STARTING: "warn",
    ProgramState.READY: "ok",
    ProgramState.NOT_READY: "warn",
    ProgramState.RESTARTING: "fail",
    ProgramState.STOPPED: "faint",
}
_SIGNS = {
    ProgramState.WAITING: "·",
    ProgramState.STARTING: "…",
    ProgramState.READY: "+",
    ProgramState.NOT_READY: "?",
    ProgramState.RESTARTING: "!",
    ProgramState.STOPPED: "-",
}
# How nats-server begins each line: process id, date, time, level.
_NATS_PREFIX = re.compile(r"^\[\d+\] \S+ \S+ \[\w+\] ")
# A crash logs a traceback with all values, which belongs in the log file.
_LONGEST = 400
# Keys of every line of a service's log that the table shows elsewhere.
_KNOWN_KEYS = ("ts", "level", "event", "service", "node", "logger")


def status_table(statuses: tuple[ProgramStatus, ...]) -> Table:
    """Draw one row per program."""
    table = Table(box=box.SIMPLE_HEAD, header_style="title", expand=True)
    table.add_column("service", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=12)
    table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("restarts", justify="right", no_wrap=True)
    table.add_column("last log", no_wrap=True, overflow="ellipsis", ratio=1)
    for status in statuses:
        state = Text(f"{_SIGNS[status.state]} {status.state}", _STYLES[status.state])
        restarts = Text(str(status.restarts), "warn" if status.restarts else "faint")
        table.add_row(
            Text(status.name, "name"),
            state,
            str(status.pid or "-"),
            restarts,
            Text(log_text(status.last_line), "faint"),
        )
    return table


def status_line(status: ProgramStatus) -> str:
    """Write a change of one program as a line."""
    detail = ""
    if status.state is ProgramState.READY and status.ready_after_s is not None:
        detail = f" after {status.ready_after_s:.1f} s"
    elif status.state is ProgramState.RESTARTING:
        detail = f": {exit_text(status.exit_code)}, last line: {log_text(status.last_line) or 'nothing'}"
    return f"{status.name}: {status.state}{detail}" + (f" (pid {status.pid})" if status.pid else "")


def exit_text(code: int | None) -> str:
    """Describe how a program ended."""
    if code is None:
        return "could not be started"
    return f"killed by signal {-code}" if code < 0 else f"exited with {code}"


def log_text(line: str) -> str:
    """Shorten a JSON log line to its event and facts, and a line of nats-server's to its message.

    Long texts are cut.

    >>> log_text('{"ts": "x", "level": "info", "event": "bus.connected", "url": "u"}')
    'bus.connected url=u'
    """
    try:
        parsed = json.loads(line)
    except ValueError:
        return _NATS_PREFIX.sub("", line)[:_LONGEST]
    if not isinstance(parsed, dict) or "event" not in parsed:
        return line[:_LONGEST]
    facts = " ".join(f"{key}={value}" for key, value in parsed.items() if key not in _KNOWN_KEYS)
    level = str(parsed.get("level", "info"))
    return " ".join(
        part for part in ("" if level in ("info", "debug") else level.upper(), str(parsed["event"]), facts) if part
    )[:_LONGEST]
