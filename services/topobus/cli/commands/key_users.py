"""The common parts of all commands on NATS' users: a user's name is checked, and a password is
shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from topobus.bus.server_config.server_users import takes_second_name
from topobus.cli.exits import UsageError
from topobus.cli.options import OutputOptions

__all__ = ["check_overlap", "known_user", "show_password"]


def known_user(user: str, names: Sequence[str]) -> str:
    """Return the typed user after a check.

    Errors: raises UsageError that lists `names` if the user is none of them.
    """
    if user not in names:
        raise UsageError(f"unknown user {user!r}", next_step=f"known are {', '.join(names)}")
    return user


def check_overlap(users: Sequence[str], *, is_overlapping: bool) -> None:
    """Check that passwords of these users can be replaced while the previous ones stay valid.

    Errors: raises UsageError for a user whose clients are not ours.
    """
    others = [user for user in users if is_overlapping and not takes_second_name(user)]
    if others:
        raise UsageError(
            f"{others[0]!r} takes no second name: its clients are not ours", next_step="rotate it without --overlap"
        )


def show_password(options: OutputOptions, user: str, password: str) -> None:
    """Print only a password, so that a shell can use it. With `-o json`, its user as well."""
    output = options.output()
    output.document({"password": password, "user": user})
    output.show(Text(password))
