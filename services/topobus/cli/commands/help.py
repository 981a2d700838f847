"""`topobus help`: the same as COMMAND --help.

The help of an existing command is printed before this runs (`topobus.cli.help.quick`).
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated

from cyclopts import Parameter

from topobus.cli.exits import UsageError
from topobus.cli.help.command_data import read_commands

__all__ = ["show_help"]


def show_help(
    *words: Annotated[str, Parameter(name="COMMAND", help="The command, with the one below it: keys make.")],
) -> int:
    """Print help for a command.

    Errors: raises UsageError, for it runs only where there is no such command.
    """
    wanted = " ".join(words)
    near = get_close_matches(wanted, [command for command in read_commands() if command], n=1)
    raise UsageError(
        f"there is no command {wanted!r}",
        next_step=f"did you mean {near[0]}? topobus help {near[0]}" if near else "topobus help",
    )
