"""What `topobus up` says when all is ready: commands on lines of their own, to be copied."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from topobus.cli.commands.up import ready_text
from topobus.cli.system.announcements import Use
from topobus.cli.system.supervision import ProgramState, ProgramStatus, Supervisor
from topobus.cli.system.system import SERVICES, Layout, System

_READY = tuple(ProgramStatus(name=name, state=ProgramState.READY) for name in SERVICES)


def _system(url: str) -> System:
    return System(layout=Layout(state=Path("/home/me/lab")), node="n1", nats_url=url, supervisor=cast("Supervisor", None), has_users=True)


@pytest.mark.parametrize(
    ("use", "url", "lines"),
    [
        (Use(name="lab", is_selected=True), "nats://127.0.0.1:4230", ["  topobus machine"]),
        (Use(name="lab", selected="prod"), "nats://127.0.0.1:4230", ["  topobus machine --context lab"]),
        (Use(), "nats://127.0.0.1:4230", ["  export TOPOBUS_ALL__NATS__URL=nats://127.0.0.1:4230", "  topobus machine"]),
        (Use(), "nats://127.0.0.1:4222", ["  topobus machine"]),
    ],
    ids=["selected", "beside-another", "no-context-other-port", "no-context"],
)
def test_hint_has_each_command_on_its_own_line(use: Use, url: str, lines: list[str]) -> None:
    """What must be typed to reach this system, and nothing that another line ends."""
    text = ready_text(_system(url), _READY, use).plain

    assert [line for line in text.splitlines() if line.startswith("  ")] == lines
    assert f"NATS_URL=nats://user:$(cat /home/me/lab/nats-users/user/password)@{url.removeprefix('nats://')}" in text


def test_hint_says_where_commands_go_when_another_context_is_selected() -> None:
    """One sentence, on a line of its own: whose commands they are, and what ends it."""
    text = ready_text(_system("nats://127.0.0.1:4230"), _READY, Use(name="lab", selected="prod")).plain

    assert "Commands go to prod until you say: topobus context use lab" in text.splitlines()


def test_hint_counts_while_services_start() -> None:
    """Nothing is to be typed yet."""
    statuses = (*_READY[1:], ProgramStatus(name=SERVICES[0], state=ProgramState.STARTING))

    assert ready_text(_system("nats://127.0.0.1:4222"), statuses, Use()).plain == "7 of 8 ready; Ctrl-C stops everything"
