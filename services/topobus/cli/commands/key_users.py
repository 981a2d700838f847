"""What all commands on NATS' users share: a user's name is checked, and a password is shown.

Flows in: what a person typed, and who there is. Flows out: the name, or an error that lists the
names; a password on the terminal or as a document.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from topobus.cli.exits import UsageError
from topobus.cli.options import OutputOptions

__all__ = ["known_user", "show_password"]


def known_user(user: str, names: Sequence[str]) -> str:
    """Give the user back who was typed.

    Errors: raises UsageError that lists `names` if the user is none of them.
    """
    if user not in names:
        raise UsageError(f"unknown user {user!r}", next_step=f"known are {', '.join(names)}")
    return user


def show_password(options: OutputOptions, user: str, password: str) -> None:
    """Print a password alone, so that a shell can take it; with `-o json`, beside its user."""
    output = options.output()
    if output.is_json:
        output.document({"password": password, "user": user})
    else:
        output.show(Text(password))
