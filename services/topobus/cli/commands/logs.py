"""`topobus logs`: the logs of all programs of a `topobus up`, as one log in the order of time."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.text import Text

from topobus.cli.contexts import ContextFolder
from topobus.cli.exits import ExitCode, NotFoundError, UsageError
from topobus.cli.render.output import Output
from topobus.cli.render.program_status import log_text
from topobus.cli.targets import VARIABLE
from topobus.local_system.log_files import LogFile, LogLine, read_logs
from topobus.local_system.system import Layout

__all__ = ["log_folder", "logs"]

_ELSEWHERE = (
    "in a cluster `kubectl logs -n topobus PODS`, in compose `docker compose logs SERVICE`, else the log of each "
    "machine's services"
)
_SPAN = re.compile(r"([0-9]{1,6})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
# With this a person who follows a log sees a line at once, and an idle system costs nothing
# measurable.
_BETWEEN_LOOKS_S = 0.2
_WIDEST_NAME = 10
_STYLES = {"warning": "warn", "error": "fail", "critical": "fail"}


def logs(
    services: Annotated[
        list[str] | None, Parameter(name="SERVICE", help="Of these alone, such as gpu or nats. Default: of all.")
    ] = None,
    /,
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"), help="Then print new lines, until Ctrl-C.")] = False,
    since: Annotated[str, Parameter(help="Only of the last 30s, 10m, 2h or 1d.")] = "",
    tail: Annotated[int | None, Parameter(help="Only this number of lines, the newest.")] = None,
    output: Annotated[
        Literal["text", "json"],
        Parameter(name=("--output", "-o"), help="How to print: json is each line as it was written."),
    ] = "text",
    context: Annotated[
        str | None, Parameter(help="The system of this name: `topobus context ls`. Default: the selected one.")
    ] = None,
) -> int:
    """Show the logs of a `topobus up`, those of all services in the order of time.

    The logs of a system that has ended can be shown while its folder exists.
    """
    after = datetime.now(UTC) - _span(since) if since else None
    if tail is not None and tail < 0:
        raise UsageError(f"--tail: got {tail}, wanted 0 or more", next_step="leave it out for all lines")
    folder = log_folder(context)
    files = _files(folder, services or [])
    out = Output(is_json=output == "json")
    wanted: Iterable[LogLine] = (line for line in read_logs(files.values()) if after is None or line.time >= after)
    _show(out, wanted if tail is None else deque(wanted, maxlen=tail))
    while follow:
        time.sleep(_BETWEEN_LOOKS_S)
        # A program may write its first line only now.
        files = {**_files(folder, services or []), **files}
        _show(out, read_logs(files.values()))
    return ExitCode.OK


def log_folder(context: str | None) -> Path:
    """Find the log folder of the system of a context, or of the selected one.

    Errors: raises UsageError when no context is named or selected, NotFoundError when there is none
    of the name, when its system runs elsewhere, and when the folder is gone.
    """
    folder = ContextFolder()
    name = context or os.environ.get(VARIABLE, "") or folder.selected()
    if not name:
        raise UsageError(
            "no context is selected, so no `topobus up` is meant",
            next_step=f"--context NAME (`topobus context ls`); {_ELSEWHERE}",
        )
    chosen = folder.named(name)
    if not chosen.state_dir:
        raise NotFoundError(
            f"context {name} is no `topobus up` of this machine: its services log where they run", next_step=_ELSEWHERE
        )
    logs = Layout(state=Path(chosen.state_dir)).logs
    if not logs.is_dir():
        raise NotFoundError(
            f"the logs of context {name} are gone: there is no folder {logs}",
            next_step="`topobus up --dir` keeps them after the end",
        )
    return logs


def _files(folder: Path, services: list[str]) -> dict[str, LogFile]:
    files = {path.stem: LogFile(path) for path in sorted(folder.glob("*.log"))}
    unknown = [service for service in services if service not in files]
    if unknown:
        raise NotFoundError(
            f"{folder} has no log of {', '.join(unknown)}", next_step=f"known are {', '.join(files) or 'none'}"
        )
    return {name: file for name, file in files.items() if not services or name in services}


def _span(text: str) -> timedelta:
    match = _SPAN.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--since: got {text!r}, wanted a number and s, m, h or d", next_step="for example --since 10m"
        )
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _show(output: Output, lines: Iterable[LogLine]) -> None:
    for line in lines:
        if not output.is_json:
            output.show_line(_line_text(line))
        elif line.is_json:
            print(line.text, flush=True)
        else:
            # JSON output is JSON for every line: nats-server and tracebacks write none.
            output.line(
                {"ts": line.time.isoformat().replace("+00:00", "Z"), "service": line.program, "event": line.text}
            )


def _line_text(line: LogLine) -> Text:
    # A log has texts of callers: none of their control sequences may reach the terminal.
    printable = "".join(sign if sign.isprintable() else " " for sign in log_text(line.text))
    style = next((style for level, style in _STYLES.items() if printable.startswith(f"{level.upper()} ")), "")
    clock = line.time.astimezone().strftime("%H:%M:%S.%f")[:-3]
    return Text.assemble((f"{clock}  ", "faint"), (f"{line.program:<{_WIDEST_NAME}}  ", "name"), (printable, style))
