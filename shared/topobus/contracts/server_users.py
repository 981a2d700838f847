"""The part of a NATS server's configuration that makes it know its users: a password for each principal, and what each may do.

Flows in: passwords by principal. Flows out: text that a server reads as it stands, included in its configuration or a part of it. Pure: who makes the
passwords and keeps the files is `topobus.runtime.user_keys`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from topobus.contracts.nats_accounts import Shape, accounts
from topobus.contracts.nats_accounts_config import render_accounts
from topobus.contracts.nats_permissions import PRINCIPALS, render_permissions

__all__ = ["has_accounts_in", "is_password", "server_configuration"]

# The server reads a password as a value of its configuration: one that begins with a digit may be taken for a number. No quote, no `$`, no colon or `@`, so
# that it stands as it is in a URL, too.
_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9]{15,127}")


def is_password(text: str) -> bool:
    """Say whether a password is one of ours: 16 to 128 letters and digits, a letter first.

    >>> is_password("p0123456789abcdef"), is_password("0123456789abcdefp"), is_password("short")
    (True, False, False)
    """
    return _PASSWORD.fullmatch(text) is not None


def server_configuration(passwords: Mapping[str, str], *, has_accounts: bool) -> str:
    """Give the users of a central server with their passwords and rights.

    Shapes: passwords — one for each of `PRINCIPALS`, as `is_password` wants them; the server itself looks them up as variables, which stand before the users.
            has_accounts — device services and subscribers have accounts of their own (docs/adr/0029), else all share one. The streams of one form are not seen in the
            other: a store has to be moved with it (docs/adr/0035).
    Errors: raises ValueError for a principal without a password, and for a password that the server might read as something else.
    """
    lines = []
    for principal in PRINCIPALS:
        password = passwords.get(principal, "")
        if not is_password(password):
            raise ValueError(
                f"password of {principal}: got {len(password)} characters, wanted 16 to 128 letters and digits, a letter first"
            )
        lines.append(f'TOPOBUS_{principal.upper()}_PASSWORD: "{password}"')
    return "\n".join(lines) + "\n" + (render_accounts(accounts(Shape.CENTRAL)) if has_accounts else render_permissions())


def has_accounts_in(configuration: str) -> bool:
    """Say whether a configuration that `server_configuration` gave has accounts.

    >>> has_accounts_in("accounts {"), has_accounts_in("authorization {")
    (True, False)
    """
    return any(line.startswith("accounts {") for line in configuration.splitlines())
