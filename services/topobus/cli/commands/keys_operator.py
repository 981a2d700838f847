"""`topobus keys operator`: the operator's form of NATS' users: an operator, its accounts, and a file of credentials for each user."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from msgspec import Struct
from rich.text import Text

from topobus.cli.commands.key_users import known_user
from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.options import OUTPUT_DEFAULTS, OutputOptions
from topobus.cli.system.users_file import extra_classes
from topobus.contracts.nats_accounts import Shape, accounts
from topobus.domain.errors import ConfigError, ContractError
from topobus.runtime.operator_keys import SERVER_FILE, IssuedUser, OperatorFolder
from topobus.runtime.user_keys import make_folder, write_whole

__all__ = ["operator_app"]

operator_app = App(name="operator", help="NATS' users by an operator's signature (JWT): nothing secret stands at the server.")

_INSTALLATION = "installation.json"
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([1-9][0-9]{0,8})([smhd])")

Folder = Annotated[
    Path, Parameter(help="Where all is: FOLDER/users/USER/user.creds, FOLDER/server.conf, and the seeds of the operator and the accounts.")
]
Users = Annotated[list[str] | None, Parameter(help="Whose. Default: everybody's.")]
Valid = Annotated[
    str | None,
    Parameter(help="How long new credentials count: 12h, 30d. Services take newer ones by themselves. Default: until they are revoked."),
]
ForGroup = Annotated[
    bool,
    Parameter(
        name="--for-group", negative="", help="Let the group of this process read the users' files: services that run as another user."
    ),
]


class _Installation(Struct, frozen=True, kw_only=True):
    """What the first call was told, so that no later one has to be."""

    shape: Shape = Shape.CENTRAL
    nodes: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


@operator_app.command(name="make")
def make(
    folder: Folder,
    *,
    shape: Annotated[Shape | None, Parameter(help="What the server is for. Default: central; later, as the first time.")] = None,
    nodes: Annotated[
        tuple[str, ...],
        Parameter(name="--node", help="A node whose processes are users of their own; again for each. Default: as the first time."),
    ] = (),
    classes: Annotated[
        tuple[str, ...],
        Parameter(
            name="--class", help="A device class of your own, which topobus-device serves; again for each. Default: as the first time."
        ),
    ] = (),
    valid: Valid = None,
    is_for_group: ForGroup = False,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Make what is missing or has expired; what is there stays. A node that is left out of `--node` is revoked."""
    valid_s = _seconds(valid)
    installed = _installed(folder)
    wanted = _Installation(
        shape=shape or installed.shape, nodes=nodes or installed.nodes, classes=extra_classes(classes) or installed.classes
    )
    files = _open(folder, wanted, is_for_group)
    make_folder(folder, is_for_group, is_shared=True)
    write_whole(folder / _INSTALLATION, f"{msgspec.json.encode(wanted).decode()}\n", is_for_group=is_for_group)
    return _tell(options, folder, files.make(valid_s=valid_s))


@operator_app.command(name="rotate")
def rotate(
    folder: Folder, users: Users = None, *, valid: Valid = None, is_for_group: ForGroup = False, options: OutputOptions = OUTPUT_DEFAULTS
) -> int:
    """Give users new keys and credentials. Services change over by themselves; those of before count until they expire or are revoked."""
    valid_s = _seconds(valid)
    files = _open(folder, _installed(folder, is_needed=True), is_for_group)
    return _tell(options, folder, files.rotate(_users(files, users), valid_s=valid_s))


@operator_app.command(name="revoke")
def revoke(
    folder: Folder,
    users: Annotated[list[str], Parameter(help="Whose.")],
    *,
    is_older_only: Annotated[
        bool, Parameter(name="--older", negative="", help="Only what was issued before what stands in the file now: after `rotate`.")
    ] = False,
    is_for_group: ForGroup = False,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Let what was issued to users count for nothing from the server's next SIGHUP on. Only `rotate` makes them another."""
    files = _open(folder, _installed(folder, is_needed=True), is_for_group)
    return _tell(options, folder, files.revoke(_users(files, users), is_older_only=is_older_only))


def _open(folder: Path, installation: _Installation, is_for_group: bool) -> OperatorFolder:
    try:
        described = accounts(installation.shape, nodes=installation.nodes, classes=installation.classes)
    except (ValueError, ContractError) as err:
        raise UsageError(str(err), next_step="give --node as Kubernetes calls it; a leaf has one") from err
    return OperatorFolder(folder, described, now=int(time.time()), is_for_group=is_for_group)


def _installed(folder: Path, *, is_needed: bool = False) -> _Installation:
    file = folder / _INSTALLATION
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Installation)
    except FileNotFoundError as err:
        if is_needed:
            raise ConfigError(f"{folder} has no operator yet", next_step=f"topobus keys operator make {folder}") from err
        return _Installation()
    except (OSError, msgspec.DecodeError) as err:
        raise ConfigError(
            f"cannot read {file}: {err}", next_step=f"remove it, and call `make` with --shape and --node for {folder}"
        ) from err


def _users(files: OperatorFolder, users: Sequence[str] | None) -> Sequence[str]:
    return [known_user(user, files.names) for user in users or files.names]


def _seconds(text: str | None) -> int | None:
    if text is None:
        return None
    parts = _DURATION.fullmatch(text)
    if parts is None:
        raise UsageError(f"--valid: got {text!r}, wanted a number with s, m, h or d", next_step="for example --valid 30d")
    return int(parts[1]) * _UNITS_S[parts[2]]


def _tell(options: OutputOptions, folder: Path, issued: Sequence[IssuedUser]) -> int:
    output = options.output()
    if output.is_json:
        users = [
            {"account": each.account, "expires": _moment(each.expires_at), "file": each.file or None, "user": each.name} for each in issued
        ]
        output.document({"folder": str(folder), "server_file": str(folder / SERVER_FILE), "users": users})
        return ExitCode.OK
    width = max(len(each.name) for each in issued)
    for each in issued:
        text = f"until {_moment(each.expires_at)}" if each.expires_at else "until revoked"
        output.show(Text(f"{each.name:<{width}}  {f'{each.file}  {text}' if each.file else 'revoked'}"))
    output.show(Text(f"{folder / SERVER_FILE}: for nats-server's `include`; it reads it at its start and at SIGHUP", "faint"))
    return ExitCode.OK


def _moment(at: int | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
