"""`topobus keys`: the passwords of NATS' users, and certificates of NATS servers, in files: made
once, shown to their owner, made again on demand.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.text import Text

from topobus.bus.login.certificate_facts import CertificateFacts, day, read_certificates
from topobus.bus.login.certificates import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    ServerCertificate,
    add_authority,
    certify,
    drop_old_authorities,
)
from topobus.bus.login.user_keys import (
    PASSWORD_FILE,
    change_password,
    forget_previous,
    make_passwords,
    password_file,
    read_password,
    write_whole,
)
from topobus.bus.server_config.nats_accounts import Shape
from topobus.bus.server_config.server_users import takes_second_name
from topobus.cli.commands.key_users import check_overlap, known_user, show_password
from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.options import OUTPUT_DEFAULTS, OutputOptions
from topobus.cli.users_file import UsersForm, changed_form, user_names, write_users

__all__ = ["keys_app"]

keys_app = App(name="keys", help="Passwords of NATS' users, and certificates of NATS servers.")
# By its path, so that the client of the API server is loaded for these commands alone.
keys_app.command(
    "topobus.cli.commands.keys_secrets:secrets_app", name="secrets", help="The same as Secrets of a Kubernetes cluster."
)

_CHANGED = "changed"

Folder = Annotated[
    Path,
    Parameter(
        help="Where the passwords are: FOLDER/USER/password. In a state folder of `topobus up` it is nats-users."
    ),
]
ForGroup = Annotated[
    bool,
    Parameter(name="--for-group", help="Let the group of this process read them: services that run as another user."),
]
ServerFile = Annotated[
    Path | None,
    Parameter(
        name="--server-file",
        help="Write the users with passwords and rights for nats-server's `include` here. The server reads it "
        "again at SIGHUP.",
    ),
]
HasAccounts = Annotated[
    bool | None,
    Parameter(
        name="--accounts",
        negative="--one-account",
        help="Whether device services and subscribers have accounts of their own (services then need nats.zone), "
        "or all share one. "
        "Default: as the server file is; accounts in a new one.",
    ),
]
ServerShape = Annotated[
    Shape | None,
    Parameter(
        help="For which server: the only one, a node's own (leaf), or the hub of those. Default: as the server "
        "file is; central in a new one."
    ),
]
Nodes = Annotated[
    list[str] | None,
    Parameter(
        name="--node",
        help="A node whose processes are users of their own (gpu-NODE, at a hub leaf-NODE), besides those of the "
        "server file. At a leaf: whose server it is. "
        "Default: each kind of process is one user, for any node.",
    ),
]
LeftOut = Annotated[
    list[str] | None,
    Parameter(name="--without-node", help="A node of the server file whose user goes. Its password stays in FOLDER."),
]

Classes = Annotated[
    list[str] | None,
    Parameter(
        name="--class",
        help="A device class of your own, which topobus-device serves: it gets a user, in addition to those of the "
        "server file.",
    ),
]


@keys_app.command(name="make")
def make(
    folder: Folder,
    *,
    server_file: ServerFile = None,
    shape: ServerShape = None,
    nodes: Nodes = None,
    left_out: LeftOut = None,
    classes: Classes = None,
    has_accounts: HasAccounts = None,
    is_for_group: ForGroup = False,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Make the missing passwords. Existing ones stay."""
    form = changed_form(
        server_file,
        shape=shape,
        has_accounts=has_accounts,
        nodes=nodes or (),
        left_out=left_out or (),
        classes=classes or (),
    )
    passwords = make_passwords(folder, user_names(form), is_for_group=is_for_group)
    if server_file is not None:
        write_users(server_file, form, passwords)
    _print_users(options, folder, server_file, sorted(user_names(form)))
    return ExitCode.OK


@keys_app.command(name="rotate")
def rotate(
    folder: Folder,
    users: Annotated[list[str] | None, Parameter(help="Whose passwords. Default: everybody's.")] = None,
    *,
    server_file: ServerFile = None,
    is_overlapping: Annotated[
        bool,
        Parameter(
            name="--overlap",
            help="Keep the previous passwords valid until `topobus keys forget`: services change over by "
            "themselves, and none of their requests fails. "
            "Not for `user`, `verdicts` and nodes' servers.",
        ),
    ] = False,
    is_for_group: ForGroup = False,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Replace passwords by new ones.

    The server ends these users' connections when it reads its file again, and they connect again
    with their new passwords.
    """
    form = changed_form(server_file)
    names = user_names(form)
    changed = [
        known_user(user, names) for user in users or names if users or not is_overlapping or takes_second_name(user)
    ]
    check_overlap(changed, is_overlapping=is_overlapping)
    make_passwords(folder, names, is_for_group=is_for_group)
    for user in changed:
        change_password(folder, user, is_overlapping=is_overlapping, is_for_group=is_for_group)
    return _write_and_print(options, folder, server_file, form, changed, is_for_group=is_for_group)


@keys_app.command(name="forget")
def forget(
    folder: Folder,
    *,
    server_file: ServerFile = None,
    is_for_group: ForGroup = False,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Make passwords from before a `rotate --overlap` invalid.

    A client that still uses one is disconnected when the server reads its file again.
    """
    form = changed_form(server_file)
    changed = [user for user in user_names(form) if forget_previous(folder, user)]
    return _write_and_print(options, folder, server_file, form, changed, is_for_group=is_for_group)


def _write_and_print(
    options: OutputOptions,
    folder: Path,
    server_file: Path | None,
    form: UsersForm,
    changed: list[str],
    *,
    is_for_group: bool,
) -> int:
    """Write the server's file, note the change for a running `topobus up`, and print it."""
    if server_file is not None:
        write_users(server_file, form, make_passwords(folder, user_names(form), is_for_group=is_for_group))
    if os.access(folder, os.W_OK):
        # A `topobus up` watches this folder, and not each user's own. Where each user has a volume
        # the folder itself cannot be written.
        write_whole(folder / _CHANGED, f"{', '.join(changed)}\n", is_for_group=is_for_group)
    _print_users(options, folder, server_file, changed)
    return ExitCode.OK


@keys_app.command(name="certify")
def certify_server(
    folder: Annotated[
        Path,
        Parameter(
            help=f"Where the server finds {CERTIFICATE_FILE}, tls.key and {AUTHORITY_FILE}. What somebody else put "
            "there (cert-manager) stays."
        ),
    ],
    *,
    names: Annotated[
        list[str] | None,
        Parameter(
            name="--name",
            help="A host name or address by which clients reach the server; give it as often as needed. Default: "
            "those that it has.",
        ),
    ] = None,
    authority: Annotated[
        Path | None,
        Parameter(
            help="Folder of the authority (CA) that signs; made when it is missing. Default: the folder "
            "`authority` beside FOLDER."
        ),
    ] = None,
    is_renewal: Annotated[
        bool,
        Parameter(
            name="--renew",
            help="Renew the certificate now, by the newest authority. Otherwise when a third of its lifetime is left.",
        ),
    ] = False,
    is_new_authority: Annotated[
        bool,
        Parameter(
            name="--new-authority",
            help=f"Put another authority beside the present one into {AUTHORITY_FILE}, and change nothing else: "
            "first the clients, then --renew.",
        ),
    ] = False,
    drops_old: Annotated[
        bool, Parameter(name="--drop-old-authorities", help=f"Leave the newest authority alone in {AUTHORITY_FILE}.")
    ] = False,
    is_for_group: ForGroup = False,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Make a NATS server's certificate, and the authority that signs it.

    Valid ones stay.
    """
    if is_renewal + is_new_authority + drops_old > 1:
        raise UsageError(
            "--renew, --new-authority and --drop-old-authorities exclude each other",
            next_step="give them in turn: docs/how-to/secure-nats.md",
        )
    authority = authority or folder.absolute().parent / "authority"
    if is_new_authority:
        add_authority(folder, authority=authority, now=_now())
    elif drops_old:
        drop_old_authorities(folder, authority=authority)
    else:
        made = certify(
            folder, names or [], authority=authority, now=_now(), is_for_group=is_for_group, is_renewal=is_renewal
        )
        _show_certificates(options, folder, made)
        return ExitCode.OK
    _show_certificates(options, folder)
    return ExitCode.OK


@keys_app.command(name="show")
def show(
    folder: Annotated[Path, Parameter(help="Where the passwords are, or a server's certificate.")],
    user: Annotated[
        str | None,
        Parameter(help="Whose password. Default: show the certificates in FOLDER, and until when they are valid."),
    ] = None,
    *,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Print the password of a user, for a file or a URL, or until when a server's certificate is
    valid.
    """
    if user is None:
        if not (folder / CERTIFICATE_FILE).exists():
            raise UsageError(
                f"{folder} has no {CERTIFICATE_FILE}",
                next_step="name the user whose password is wanted, or the folder of a certificate",
            )
        _show_certificates(options, folder)
        return ExitCode.OK
    show_password(options, user, read_password(password_file(folder, known_user(user, _users_in(folder)))))
    return ExitCode.OK


def _users_in(folder: Path) -> tuple[str, ...]:
    """Name the users who have a password in the folder, or those of a first start when it has
    none.
    """
    return tuple(sorted(file.parent.name for file in folder.glob(f"*/{PASSWORD_FILE}"))) or user_names(UsersForm())


def _print_users(options: OutputOptions, folder: Path, server_file: Path | None, users: list[str]) -> None:
    output = options.output()
    output.document({"folder": str(folder), "server_file": str(server_file) if server_file else None, "users": users})
    output.show(Text(f"{folder}: passwords of {', '.join(users)}"))
    if server_file is not None:
        output.show(
            Text(
                f"{server_file}: for nats-server; it reads it at its start and at SIGHUP, of which a new "
                "class or node needs two",
                "faint",
            )
        )


def _show_certificates(options: OutputOptions, folder: Path, made: ServerCertificate | None = None) -> None:
    server = read_certificates(folder / CERTIFICATE_FILE)[0]
    trusted = read_certificates(folder / AUTHORITY_FILE) if (folder / AUTHORITY_FILE).exists() else ()
    output = options.output()
    output.document(
        {
            "folder": str(folder),
            "certificate": _as_json(server),
            "authorities": [_as_json(facts) for facts in trusted],
            "made": bool(made and made.why_new),
            "why_made": made.why_new if made else "",
        }
    )
    output.show(
        Text(
            f"{folder / CERTIFICATE_FILE}: for {', '.join(server.names)}; good until "
            f"{day(server.not_after)}{_ends(server)}"
        )
    )
    for facts in trusted:
        signs = "signs it" if facts.subject == server.issuer else "does not sign it"
        output.show(
            Text(
                f"{folder / AUTHORITY_FILE}: {facts.subject}, {signs}; good until {day(facts.not_after)}{_ends(facts)}"
            )
        )
    if made is not None and made.why_new:
        output.show(Text(f"made: {made.why_new}; a server that runs reads it at SIGHUP", "faint"))
    elif made is not None and not made.is_ours:
        output.show(Text("left as it is: another program made it", "faint"))


def _as_json(facts: CertificateFacts) -> dict[str, object]:
    return {
        "names": list(facts.names),
        "subject": facts.subject,
        "issuer": facts.issuer,
        "not_before": facts.not_before.isoformat(),
        "not_after": facts.not_after.isoformat(),
    }


def _ends(facts: CertificateFacts) -> str:
    days = (facts.not_after - _now()).days
    return ", EXPIRED" if facts.is_expired(_now()) else f" ({days} days)"


def _now() -> datetime:
    return datetime.now(UTC)
