"""Renders the accounts of `topobus.bus.server_config.nats_accounts` as a nats-server's
configuration, with users and passwords.

The text fits a server of any version from 2.9. What only newer servers know is in the file that
includes it. No password is in it: each is a variable (`User.variable`), which the
server takes from a file that the same text includes first (`render_passwords`), else from its
environment. A file can be changed under a running server (SIGHUP), an environment cannot. A
variable is known only in the file that includes what sets it, so a file of accounts includes the
passwords itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from topobus.bus.server_config.nats_accounts import Account, Crossing, CrossingKind, User

__all__ = ["render_accounts", "render_passwords"]

# An asker waits 10 s at most unless its caller gives another time, and the gateway waits as long as
# kubelet does.
_RESPONSE_LIMIT = "5m"


def render_accounts(described: Sequence[Account]) -> str:
    """Render the `accounts` of a server's configuration, and which of them is the server's own."""
    lines = ["accounts {"]
    for account in described:
        lines += [f"  {account.name}: {{", *_account_lines(account), "  }"]
    lines += ["}", *(f"system_account: {account.name}" for account in described if account.is_system)]
    return "\n".join(lines) + "\n"


def render_passwords(passwords: Mapping[str, str]) -> str:
    """Render a file of passwords by the name of their variable.

    The file of accounts includes it before them. Only the server may read it.
    """
    return "".join(f"{variable}: {json.dumps(text)}\n" for variable, text in sorted(passwords.items()))


def _account_lines(account: Account) -> Iterator[str]:
    if account.has_jetstream:
        yield "    jetstream: enabled"
    if account.users:
        yield "    users: ["
        for user in account.users:
            yield from _user_lines(user)
        yield "    ]"
    if account.exports:
        yield "    exports: ["
        for (kind, subject), importers in _exports(account.exports).items():
            yield f'      {{ {kind}: "{subject}", accounts: [{", ".join(importers)}] }}'
        yield "    ]"
    if account.imports:
        yield "    imports: ["
        for crossing in account.imports:
            local = f', to: "{crossing.local}"' if crossing.local else ""
            yield f'      {{ {crossing.kind}: {{ account: {crossing.owner}, subject: "{crossing.subject}" }}{local} }}'
        yield "    ]"


def _exports(crossed: Iterable[Crossing]) -> dict[tuple[CrossingKind, str], list[str]]:
    """Give each exported subject with the accounts that may import it."""
    exports: dict[tuple[CrossingKind, str], list[str]] = {}
    for crossing in crossed:
        exports.setdefault((crossing.kind, crossing.subject), []).append(crossing.importer)
    return exports


def _user_lines(user: User) -> Iterator[str]:
    kinds = f"allowed_connection_types: [{', '.join(user.connection_types)}], " if user.connection_types else ""
    yield f"      {{ user: {user.name}, password: ${user.variable}, {kinds}permissions: {{"
    for verb, subjects in user.rights.items():
        yield f"        {verb}: {{ allow: ["
        yield from (f'          "{subject}"' for subject in subjects)
        yield "        ] }"
    if user.may_respond:
        yield f'        allow_responses: {{ max: 1, expires: "{_RESPONSE_LIMIT}" }}'
    yield "      } }"
