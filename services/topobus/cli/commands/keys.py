"""`topobus keys`: the passwords of NATS' users in files: made once, shown to their owner, made anew on demand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.text import Text

from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.options import OUTPUT_DEFAULTS, OutputOptions
from topobus.contracts.nats_permissions import PRINCIPALS
from topobus.contracts.server_users import server_configuration
from topobus.runtime.user_keys import make_passwords, new_password, password_file, read_password, write_whole

__all__ = ["keys_app"]

keys_app = App(name="keys", help="Passwords of NATS' users.")

_CHANGED = "changed"

Folder = Annotated[
    Path, Parameter(help="Where the passwords are: FOLDER/USER/password. In a state folder of `topobus up` it is nats-users.")
]
ForGroup = Annotated[
    bool, Parameter(name="--for-group", negative="", help="Let the group of this process read them: services that run as another user.")
]
ServerFile = Annotated[
    Path | None,
    Parameter(
        name="--server-file",
        help="Write the users with passwords and rights for nats-server's `include` here. The server reads it again at SIGHUP.",
    ),
]


@keys_app.command(name="make")
def make(
    folder: Folder, *, server_file: ServerFile = None, is_for_group: ForGroup = False, options: OutputOptions = OUTPUT_DEFAULTS
) -> int:
    """Make the passwords that are missing; those that are there stay."""
    passwords = make_passwords(folder, PRINCIPALS, is_for_group=is_for_group)
    if server_file is not None:
        write_whole(server_file, server_configuration(passwords))
    _tell(options, folder, server_file, sorted(passwords))
    return ExitCode.OK


@keys_app.command(name="rotate")
def rotate(
    folder: Folder,
    users: Annotated[list[str] | None, Parameter(help="Whose passwords. Default: everybody's.")] = None,
    *,
    server_file: ServerFile = None,
    is_for_group: ForGroup = False,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Make passwords anew. The server ends these users' connections when it reads its file again, and they come back with what stands in theirs."""
    changed = [_known_user(user) for user in users or PRINCIPALS]
    passwords = make_passwords(folder, PRINCIPALS, is_for_group=is_for_group)
    for user in changed:
        passwords[user] = new_password()
        write_whole(password_file(folder, user), f"{passwords[user]}\n", is_for_group=is_for_group)
    if server_file is not None:
        write_whole(server_file, server_configuration(passwords))
    if os.access(folder, os.W_OK):
        # A `topobus up` listens in this folder, and not in each user's own. Where each user has a volume the folder itself cannot be written.
        write_whole(folder / _CHANGED, f"{', '.join(changed)}\n", is_for_group=is_for_group)
    _tell(options, folder, server_file, changed)
    return ExitCode.OK


@keys_app.command(name="show")
def show(folder: Folder, user: Annotated[str, Parameter(help="Whose password.")], *, options: OutputOptions = OUTPUT_DEFAULTS) -> int:
    """Print the password of a user, for a file or a URL."""
    password = read_password(password_file(folder, _known_user(user)))
    output = options.output()
    if output.is_json:
        output.document({"password": password, "user": user})
    else:
        output.show(Text(password))
    return ExitCode.OK


def _known_user(user: str) -> str:
    if user not in PRINCIPALS:
        raise UsageError(f"unknown user {user!r}", next_step=f"known are {', '.join(PRINCIPALS)}")
    return user


def _tell(options: OutputOptions, folder: Path, server_file: Path | None, users: list[str]) -> None:
    output = options.output()
    if output.is_json:
        output.document({"folder": str(folder), "server_file": str(server_file) if server_file else None, "users": users})
        return
    output.show(Text(f"{folder}: passwords of {', '.join(users)}"))
    if server_file is not None:
        output.show(Text(f"{server_file}: for nats-server; it reads it at its start and at SIGHUP", "faint"))
