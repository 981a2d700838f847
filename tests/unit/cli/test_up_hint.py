"""What `topobus up` says when all is ready: commands on lines of their own, to be copied."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from topobus.cli.announcements import Use
from topobus.cli.commands.up import follow_system, ready_text
from topobus.cli.render.output import THEME, Output
from topobus.local_system.supervision import ProgramState, ProgramStatus, Supervisor
from topobus.local_system.system import SERVICES, Layout, System

_READY = tuple(ProgramStatus(name=name, state=ProgramState.READY) for name in SERVICES)


def _system(url: str) -> System:
    return System(
        layout=Layout(state=Path("/home/me/lab")),
        node="n1",
        nats_url=url,
        supervisor=cast("Supervisor", None),
        has_users=True,
    )


@pytest.mark.parametrize(
    ("use", "url", "lines"),
    [
        (Use(name="lab", is_selected=True), "nats://127.0.0.1:4230", ["  topobus machine"]),
        (Use(name="lab", selected="prod"), "nats://127.0.0.1:4230", ["  topobus machine --context lab"]),
        (
            Use(),
            "nats://127.0.0.1:4230",
            ["  export TOPOBUS_ALL__NATS__URL=nats://127.0.0.1:4230", "  topobus machine"],
        ),
        (Use(), "nats://127.0.0.1:4222", ["  topobus machine"]),
    ],
    ids=["selected", "beside-another", "no-context-other-port", "no-context"],
)
def test_hint_has_each_command_on_its_own_line(use: Use, url: str, lines: list[str]) -> None:
    """What must be typed to reach this system, and nothing that another line ends."""
    text = ready_text(_system(url), _READY, use).plain

    assert [line for line in text.splitlines() if line.startswith("  ")] == lines
    assert f"NATS_URL=nats://user:$(cat /home/me/lab/nats-users/user/password)@{url.removeprefix('nats://')}" in text


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (Use(name="lab", is_selected=True), "topobus logs --follow"),
        (Use(name="lab", selected="prod"), "topobus logs --follow --context lab"),
        (Use(), "/home/me/lab/"),
    ],
    ids=["selected", "beside-another", "no-context"],
)
def test_hint_names_what_shows_the_logs(use: Use, said: str) -> None:
    """In a terminal nothing else says where nine programs write."""
    (line,) = [
        each
        for each in ready_text(_system("nats://127.0.0.1:4230"), _READY, use).plain.splitlines()
        if "services log" in each
    ]

    assert line.removeprefix("What the services log: ").startswith(said)


def test_hint_says_where_commands_go_when_another_context_is_selected() -> None:
    """One sentence, on a line of its own: whose commands they are, and what ends it."""
    text = ready_text(_system("nats://127.0.0.1:4230"), _READY, Use(name="lab", selected="prod")).plain

    assert "Commands go to prod until you run: topobus context use lab" in text.splitlines()


def test_hint_counts_while_services_start() -> None:
    """Nothing is to be typed yet."""
    statuses = (*_READY[1:], ProgramStatus(name=SERVICES[0], state=ProgramState.STARTING))

    assert (
        ready_text(_system("nats://127.0.0.1:4222"), statuses, Use()).plain == "7 of 8 ready; Ctrl-C stops everything"
    )


class _Supervisor:
    """Programs that become ready."""

    async def changes(self, *, at_least_every_s: float) -> AsyncIterator[tuple[ProgramStatus, ...]]:
        yield (*_READY[1:], ProgramStatus(name=SERVICES[0], state=ProgramState.STARTING))
        yield _READY
        yield _READY


async def test_hint_is_told_once_and_unbroken_when_the_terminal_is_narrow() -> None:
    """What is copied from a live display is one command, however long the folder's name."""
    written = io.StringIO()
    console = Console(file=written, width=60, force_terminal=True, color_system=None, theme=THEME)
    system = replace(_system("nats://127.0.0.1:4230"), supervisor=cast("Supervisor", _Supervisor()))

    await follow_system(system, Output(console=console), Use(name="lab", is_selected=True))

    url = "NATS_URL=nats://user:$(cat /home/me/lab/nats-users/user/password)@127.0.0.1:4230"
    assert written.getvalue().count(url) == 1
