"""`topobus console`: what the service that it starts is told."""

from __future__ import annotations

from pathlib import Path

from topobus.cli.commands.console import console_environment
from topobus.cli.config import CliSettings
from topobus.runtime.config import NatsSettings


def test_console_logs_in_as_itself_when_the_cli_has_a_folder_of_passwords(tmp_path: Path) -> None:
    """Beside the CLI's password is the console's, who may only read: that one is used; the page stays at loopback whatever the environment says."""
    for user in ("cli", "console"):
        (tmp_path / user).mkdir()
        (tmp_path / user / "password").write_text("p", encoding="utf-8")
    nats = NatsSettings(url="nats://127.0.0.1:4333", user="cli", password_file=str(tmp_path / "cli" / "password"))

    environment = console_environment(CliSettings(nats=nats), 9000, {"TOPOBUS_CONSOLE__PAGE__HOST": "0.0.0.0", "HOME": "/h"})

    assert environment["TOPOBUS_CONSOLE__NATS__URL"] == "nats://127.0.0.1:4333"
    assert environment["TOPOBUS_CONSOLE__NATS__USER"] == "console"
    assert environment["TOPOBUS_CONSOLE__NATS__PASSWORD_FILE"] == str(tmp_path / "console" / "password")
    assert environment["TOPOBUS_CONSOLE__NATS__ZONE"] == "core"
    assert (environment["TOPOBUS_CONSOLE__PAGE__HOST"], environment["TOPOBUS_CONSOLE__PAGE__PORT"]) == ("127.0.0.1", "9000")
    assert environment["TOPOBUS_CONSOLE__PAGE__HAS_LINK"] == "true"
    assert environment["HOME"] == "/h"


def test_console_keeps_the_user_of_the_environment_when_it_names_one(tmp_path: Path) -> None:
    """A server whose users are kept elsewhere: what is said of the console itself goes before what the CLI knows."""
    nats = NatsSettings(user="cli", password_file=str(tmp_path / "cli.password"))

    environment = console_environment(CliSettings(nats=nats), 0, {"TOPOBUS_CONSOLE__NATS__USER": "console"})

    assert environment["TOPOBUS_CONSOLE__NATS__USER"] == "console"
    assert "TOPOBUS_CONSOLE__NATS__PASSWORD_FILE" not in environment
