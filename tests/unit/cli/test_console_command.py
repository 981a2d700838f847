"""`topobus console`: what the service that it starts is told."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from topobus.cli.commands.console import console_environment
from topobus.cli.config import CliSettings
from topobus.cli.exits import ExitCode
from topobus.process.config import NatsSettings


def test_console_logs_in_as_itself_when_the_cli_has_a_folder_of_passwords(tmp_path: Path) -> None:
    """Beside the CLI's password is the console's, who may only read: that one is used.

    The page stays at loopback whatever the environment says.
    """
    for user in ("cli", "console"):
        (tmp_path / user).mkdir()
        (tmp_path / user / "password").write_text("p", encoding="utf-8")
    nats = NatsSettings(url="nats://127.0.0.1:4333", user="cli", password_file=str(tmp_path / "cli" / "password"))

    environment = console_environment(
        CliSettings(nats=nats), 9000, {"TOPOBUS_CONSOLE__PAGE__HOST": "0.0.0.0", "HOME": "/h"}
    )

    assert environment["TOPOBUS_CONSOLE__NATS__URL"] == "nats://127.0.0.1:4333"
    assert environment["TOPOBUS_CONSOLE__NATS__USER"] == "console"
    assert environment["TOPOBUS_CONSOLE__NATS__PASSWORD_FILE"] == str(tmp_path / "console" / "password")
    assert environment["TOPOBUS_CONSOLE__NATS__ZONE"] == "core"
    assert (environment["TOPOBUS_CONSOLE__PAGE__HOST"], environment["TOPOBUS_CONSOLE__PAGE__PORT"]) == (
        "127.0.0.1",
        "9000",
    )
    assert environment["TOPOBUS_CONSOLE__PAGE__HAS_LINK"] == "true"
    assert environment["HOME"] == "/h"


def test_console_keeps_the_user_of_the_environment_when_it_names_one(tmp_path: Path) -> None:
    """A server whose users are kept elsewhere: what is said of the console itself goes before what
    the CLI knows.
    """
    nats = NatsSettings(user="cli", password_file=str(tmp_path / "cli.password"))

    environment = console_environment(CliSettings(nats=nats), 0, {"TOPOBUS_CONSOLE__NATS__USER": "console"})

    assert environment["TOPOBUS_CONSOLE__NATS__USER"] == "console"
    assert "TOPOBUS_CONSOLE__NATS__PASSWORD_FILE" not in environment


def test_console_logs_lines_for_people_when_nobody_says_otherwise() -> None:
    """Also where stderr is no terminal, for the command is a person's.

    What the environment says of the logs of all services stands.
    """
    unasked = console_environment(CliSettings(), 0, {})
    asked = console_environment(
        CliSettings(), 0, {"TOPOBUS_ALL__LOG__FORMAT": "json", "TOPOBUS_CONSOLE__LOG__LEVEL": "debug"}
    )

    assert (unasked["TOPOBUS_CONSOLE__LOG__FORMAT"], unasked["TOPOBUS_CONSOLE__LOG__LEVEL"]) == ("console", "warning")
    assert ("TOPOBUS_CONSOLE__LOG__FORMAT" in asked, asked["TOPOBUS_CONSOLE__LOG__LEVEL"]) == (False, "debug")


def _console(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "topobus.cli.main", "console", *arguments],
        env={name: value for name, value in os.environ.items() if not name.startswith("TOPOBUS_")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("port", ["99999", "-1", "taken"])
def test_console_names_the_option_when_its_port_cannot_be_had(port: str) -> None:
    """A port that is none, and one that somebody has: said of `--port`, and not of a setting that
    the user never wrote.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1]) if port == "taken" else port
        done = _console(f"--port={number}", "--nats", "nats://127.0.0.1:1")

    assert done.returncode == (ExitCode.CONFIG if port == "taken" else ExitCode.USAGE)
    assert "--port" in done.stderr
    assert number in done.stderr
    assert "TOPOBUS_" not in done.stderr
    assert done.stdout == ""


def test_console_says_so_at_once_when_no_server_listens() -> None:
    """It does not wait for a server with nothing on the screen, and promises no page."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    done = _console("--port", "0", "--nats", f"nats://127.0.0.1:{port}")

    assert (done.returncode, done.stdout) == (ExitCode.UNAVAILABLE, "")
    assert f"no NATS server listens at nats://127.0.0.1:{port}" in done.stderr
