"""`topobus console`: runs the console's service in the foreground, for this user's browser, with the login that other commands find."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from topobus.cli.config import CliSettings
from topobus.cli.exits import ExitCode
from topobus.cli.options import BUS_DEFAULTS, BusOptions

__all__ = ["console", "console_environment"]

_DEFAULT_PORT = 8765
# sysexits.h EX_CONFIG: what the service says of a setting, or of a package that is not installed, stands on the terminal already.
_KNOWN_EXITS = {int(code) for code in ExitCode}


def console(
    *,
    port: Annotated[
        int, Parameter(help="The port on this machine's loopback interface; 0: a free one, which the log names.")
    ] = _DEFAULT_PORT,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Show the fleet live in a browser, from a page that nobody but users of this machine reaches. Ctrl-C ends it."""
    environ = console_environment(options.settings(), port, os.environ)
    output = options.output()
    if port:
        output.show(Text.assemble("open ", (f"http://127.0.0.1:{port}/", "title"), "   Ctrl-C ends it"))
    with subprocess.Popen([sys.executable, "-m", "topobus.console.main"], env=environ) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            # The terminal sent it to the service, too.
            return process.wait()
    return status if status in _KNOWN_EXITS else ExitCode.INTERNAL


def console_environment(settings: CliSettings, port: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Tell the service where NATS is and who it is there; what the environment says of the console itself stands.

    Where commands log in as `cli` with a file of a folder of passwords, the console logs in as itself with its own of that folder: it may only read.
    """
    nats = settings.nats
    said = {"URL": nats.url, "TLS_CA_FILE": nats.tls_ca_file, "ZONE": nats.zone, "CREDENTIALS_FILE": nats.credentials_file}
    own_file = Path(nats.password_file).parent.parent / "console" / "password" if nats.password_file else None
    if nats.user == "cli" and own_file is not None and own_file.exists():
        said |= {"USER": "console", "PASSWORD_FILE": str(own_file)}
    given = {f"TOPOBUS_CONSOLE__NATS__{key}": value for key, value in said.items() if value}
    page = {"TOPOBUS_CONSOLE__PAGE__HOST": "127.0.0.1", "TOPOBUS_CONSOLE__PAGE__PORT": str(port)}
    return {"TOPOBUS_CONSOLE__LOG__LEVEL": "warning" if port else "info", **given, **environ, **page}
