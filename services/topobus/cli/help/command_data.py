"""What help and completion know of each command: read from `commands.json`, which
`tools/render-docs` writes from the commands themselves.

One line a command, in the order of their words. Only the standard library, and no more of it than
the interpreter has loaded anyway, plus json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

__all__ = ["ArgumentData", "CommandData", "OptionData", "as_lines", "find_command", "read_commands"]

_FILE = Path(__file__).parent / "commands.json"


class ArgumentData(TypedDict):
    """A word without a name."""

    name: str
    help: str
    is_required: bool
    is_many: bool
    value: str
    """What it is, for completion: `NODE`, `PATH`."""
    choices: list[str]


class OptionData(TypedDict):
    """An option with its names."""

    names: list[str]
    value: str
    """Placeholder of its value; empty: a switch."""
    help: str
    choices: list[str]
    default: str
    is_required: bool
    is_many: bool
    is_shared: bool
    """One that many commands take: how to print, and which system."""


class CommandData(TypedDict):
    """A command, or a group of them."""

    words: str
    """Such as `keys secrets make`; empty for the program itself."""
    help: str
    is_command: bool
    """It can be run; a group cannot, unless it is a command, too."""
    arguments: list[ArgumentData]
    options: list[OptionData]


def read_commands() -> dict[str, CommandData]:
    """Read what was written, by words.

    Empty when there is nothing, as in a checkout in which it was never made.
    """
    try:
        lines = _FILE.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    commands: list[CommandData] = [json.loads(line) for line in lines if line]
    return {command["words"]: command for command in commands}


def find_command(commands: dict[str, CommandData], arguments: Sequence[str]) -> tuple[CommandData | None, list[str]]:
    """Find the command that a line's leading words name.

    Gives it, and the words after it that are no options.

    >>> commands = {"": {"words": ""}, "keys": {"words": "keys"}, "keys make": {"words": "keys make"}}
    >>> find_command(commands, ["keys", "make", "FOLDER", "--help"])
    ({'words': 'keys make'}, ['FOLDER'])
    """
    leading: list[str] = []
    for argument in arguments:
        if argument.startswith("-"):
            break
        leading.append(argument)
    for count in range(len(leading), -1, -1):
        command = commands.get(" ".join(leading[:count]))
        if command is not None:
            return command, leading[count:]
    return None, leading


def as_lines(commands: Sequence[CommandData]) -> str:
    """Write the file's text."""
    ordered = sorted(commands, key=lambda command: command["words"])
    return "".join(f"{json.dumps(command, ensure_ascii=False)}\n" for command in ordered)
