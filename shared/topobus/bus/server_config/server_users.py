"""The part of a NATS server's configuration that defines its users: a password for each principal,
and what each may do.

A server reads the text as it is, included in its configuration or as a part of it. Pure:
`topobus.bus.login.user_keys` makes the passwords and keeps the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from topobus.bus.server_config.nats_accounts import Shape, accounts
from topobus.bus.server_config.nats_accounts_config import render_accounts, render_passwords
from topobus.bus.server_config.nats_permissions import PRINCIPALS, render_permissions
from topobus.formats.messages.catalogue import REPORTER

__all__ = [
    "accounts_configuration",
    "is_password",
    "logins_of",
    "server_configuration",
    "takes_second_name",
]

# The server reads a password as a value of its configuration: one that begins with a digit may be
# taken for a number. No quote, no `$`, no colon or `@`, so that it fits into a URL as it is.
_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9]{15,127}")


# No user name ends like this: in a node's name a dot is followed by a letter or a digit, and a
# token writes it as one `_`.
_SECOND = "__2"


def logins_of(user: str) -> tuple[str, str]:
    """Give the two names by which a user may log in: while its password is changed both count, each
    with a password of its own.

    >>> logins_of("gpu")
    ('gpu', 'gpu__2')
    """
    return user, f"{user}{_SECOND}"


def takes_second_name(user: str) -> bool:
    """Say whether a user's clients are Topobus' own, which know of second names: not subscribers,
    not those who report verdicts, and not the nats-server of a node.

    >>> takes_second_name("gpu-n1"), takes_second_name("user"), takes_second_name("leaf-n1")
    (True, False, False)
    """
    return user not in ("user", REPORTER) and user.partition("-")[0] != "leaf"


def is_password(text: str) -> bool:
    """Say whether a password is one of ours: 16 to 128 letters and digits, a letter first.

    >>> is_password("p0123456789abcdef"), is_password("0123456789abcdefp"), is_password("short")
    (True, False, False)
    """
    return _PASSWORD.fullmatch(text) is not None


def server_configuration(passwords: Mapping[str, str], *, classes: Sequence[str] = ()) -> str:
    """Render the users of a server that all share one account, with their passwords and rights.

    Shapes: passwords — one for each of `PRINCIPALS`, or for one or both of its `logins_of`, as
    `is_password` wants them; the server itself looks them up as variables, which precede the users.
    classes — as for `accounts`; each is a principal.
    Errors: raises ValueError for a principal without a password, and for a password that the server
    might read as something else.
    """
    logins = {principal: _logins(principal, passwords) for principal in (*PRINCIPALS, *classes)}
    variables = {f"TOPOBUS_{login.upper()}_PASSWORD": passwords[login] for names in logins.values() for login in names}
    return render_passwords(variables) + render_permissions(logins=logins, classes=classes)


def accounts_configuration(
    passwords: Mapping[str, str],
    shape: Shape = Shape.CENTRAL,
    *,
    nodes: Sequence[str] = (),
    classes: Sequence[str] = (),
) -> str:
    """Give the users of a server in accounts of their own (docs/adr/0029), with their passwords.

    The streams of this form are not seen in the other: a store has to be
    moved with it (docs/adr/0029).
    Shapes: passwords — one for each user of the shape, by its name or by one or both of its
    `logins_of`, as `is_password` wants them. nodes, classes — as for `accounts`.
    Errors: raises ValueError as `server_configuration` does.
    """
    described = [
        replace(
            account,
            users=tuple(replace(user, name=login) for user in account.users for login in _logins(user.name, passwords)),
        )
        for account in accounts(shape, nodes=nodes, classes=classes)
    ]
    variables = {user.variable: passwords[user.name] for account in described for user in account.users}
    return render_passwords(variables) + render_accounts(described)


def _logins(user: str, passwords: Mapping[str, str]) -> tuple[str, ...]:
    """Give the names by which a user may log in now."""
    logins = tuple(login for login in logins_of(user) if login in passwords) or (user,)
    for login in logins:
        if not is_password(password := passwords.get(login, "")):
            raise ValueError(
                f"password of {login}: got {len(password)} characters, wanted 16 to 128 letters and digits, a "
                "letter first"
            )
    return logins
