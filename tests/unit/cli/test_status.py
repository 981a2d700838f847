"""The status of supervised programs, for people."""

from __future__ import annotations

import pytest

from support.printed import printed
from topobus.cli.render.program_status import log_text, status_line, status_table
from topobus.local_system.supervision import ProgramState, ProgramStatus


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"ts": "t", "level": "info", "event": "bus.connected", "service": "gpu", "url": "u"}', "bus.connected url=u"),
        ('{"level": "error", "event": "service.crashed"}', "ERROR service.crashed"),
        ("[77] 2026/11/20 10:43:28.749207 [INF] Server is ready", "Server is ready"),
        ("ModuleNotFoundError: no", "ModuleNotFoundError: no"),
        ("[1, 2]", "[1, 2]"),
        ("", ""),
        ("x" * 5000, "x" * 400),
    ],
    ids=["json", "level", "nats", "plain", "json-list", "empty", "endless"],
)
def test_log_text_keeps_event_and_facts_when_a_line_is_shown(line: str, text: str) -> None:
    """Whatever a program writes, one short line comes out."""
    assert log_text(line) == text


def test_status_line_tells_how_it_died_when_a_program_restarts() -> None:
    """Exit code and last words stand in the line."""
    status = ProgramStatus(name="gpu", state=ProgramState.RESTARTING, exit_code=-9)
    status.tail.append("last words")

    assert status_line(status) == "gpu: restarting: killed by signal 9, last line: last words"


def test_status_table_shows_every_program_when_drawn_without_colour() -> None:
    """State is told by sign and word, restarts by number."""
    text = printed(status_table((ProgramStatus(name="gpu", state=ProgramState.READY, pid=12, restarts=3),)))

    assert ["gpu", "+", "ready", "12", "3"] in [line.split() for line in text.splitlines()]
