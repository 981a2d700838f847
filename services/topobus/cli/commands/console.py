"""`topobus console`: becomes the console's service, for this user's browser, with the login that
other commands find.

This process is the service from then on: any signal that ends it ends the page, and no process is
left that holds the port and the password.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NoReturn

from cyclopts import Parameter, validators

from topobus.cli.config import CliSettings
from topobus.cli.options import BUS_DEFAULTS, BusOptions, check_listening
from topobus.values.errors import ConfigError

__all__ = ["console", "console_environment"]

_HOST = "127.0.0.1"
_DEFAULT_PORT = 8765


def console(
    *,
    port: Annotated[
        int,
        Parameter(
            help="The port on this machine's loopback interface; 0: a free one.",
            validator=validators.Number(gte=0, lte=65535),
        ),
    ] = _DEFAULT_PORT,
    options: BusOptions = BUS_DEFAULTS,
) -> NoReturn:
    """Show the fleet live in a browser, at a secret address that is printed.

    Ctrl-C ends it.
    """
    target = options.target()
    _check_free(port)
    asyncio.run(check_listening(target))
    environ = console_environment(target.settings, port, os.environ)
    os.execve(sys.executable, [sys.executable, "-m", "topobus.console.main"], environ)


def console_environment(settings: CliSettings, port: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the service, with the address and the login of NATS.

    Settings of the console in `environ` take precedence. Where commands log in as `cli` with a file
    of a folder of passwords, the console logs in as itself with its own file of that folder, as it
    may only read.
    """
    nats = settings.nats
    by_setting = {"URL": nats.url, "TLS_CA_FILE": nats.tls_ca_file, "ZONE": nats.zone}
    own_file = Path(nats.password_file).parent.parent / "console" / "password" if nats.password_file else None
    if nats.user == "cli" and own_file is not None and own_file.exists():
        # Such a folder belongs to a server with accounts, where the console's account has no
        # streams. The console needs the account with the streams, no matter how the CLI connects.
        by_setting |= {"USER": "console", "PASSWORD_FILE": str(own_file), "ZONE": nats.zone or "core"}
    given = {f"TOPOBUS_CONSOLE__NATS__{key}": value for key, value in by_setting.items() if value}
    page = {"TOPOBUS_CONSOLE__PAGE__HOST": _HOST, "TOPOBUS_CONSOLE__PAGE__PORT": str(port)}
    if "TOPOBUS_CONSOLE__PAGE__PASSWORD_FILE" not in environ:
        page["TOPOBUS_CONSOLE__PAGE__HAS_LINK"] = "true"
    # A user who starts a command reads its lines, even through a pipe.
    log = {"LEVEL": "warning", "FORMAT": "console"}
    own_log = {
        f"TOPOBUS_CONSOLE__LOG__{key}": value for key, value in log.items() if f"TOPOBUS_ALL__LOG__{key}" not in environ
    }
    return {**own_log, **given, **environ, **page}


def _check_free(port: int) -> None:
    """Check that the port is free: the service would name the setting that it reads, and not the
    option.

    Errors: raises ConfigError.
    """
    try:
        socket.create_server((_HOST, port)).close()
    except OSError as err:
        raise ConfigError(
            f"--port {port}: cannot listen at {_HOST}:{port}: {(err.strerror or str(err)).lower()}",
            next_step="choose another one with --port, or 0 for a free one",
        ) from err
