"""The data of help and completion for each command: read from `commands.json`, which
`tools/render-docs` writes from the commands themselves.

One line per command, in the order of their words. Only the standard library, and no more of it than
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
    """An argument without a name."""

    name: str
    help: str
    is_required: bool
    is_many: bool
    value: str
    """Its kind, for completion: `NODE`, `PATH`."""
    choices: list[str]


class OptionData(TypedDict):
    """An option with its names."""

    names: list[str]
    value: str
    """Placeholder of its value. Empty: a switch."""
    help: str
    choices: list[str]
    default: str
    is_required: bool
    is_many: bool
    is_shared: bool
    """Many commands have it: how to print, and which system."""


class CommandData(TypedDict):
    """A command, or a group of them."""

    words: str
    """Such as `keys secrets make`. Empty for the program itself."""
    help: str
    is_command: bool
    """Whether it can be run. A group cannot, unless it is also a command."""
    arguments: list[ArgumentData]
    options: list[OptionData]


def read_commands() -> dict[str, CommandData]:
    """Read the data, by words."""
    commands: list[CommandData] = [json.loads(line) for line in _FILE.read_text(encoding="utf-8").splitlines()]
    return {command["words"]: command for command in commands}


def find_command(commands: dict[str, CommandData], arguments: Sequence[str]) -> tuple[CommandData, list[str]]:
    """Find the command that a line's leading words name, else the program itself.

    Returns it, and the words after it that are no options.

    >>> commands = {"": {"words": ""}, "keys": {"words": "keys"}, "keys make": {"words": "keys make"}}
    >>> find_command(commands, ["keys", "make", "FOLDER", "--help"])
    ({'words': 'keys make'}, ['FOLDER'])
    """
    leading: list[str] = []
    for argument in arguments:
        if argument.startswith("-"):
            break
        leading.append(argument)
    count = next(length for length in range(len(leading), -1, -1) if " ".join(leading[:length]) in commands)
    return commands[" ".join(leading[:count])], leading[count:]


def as_lines(commands: Sequence[CommandData]) -> str:
    """Write the file's text."""
    ordered = sorted(commands, key=lambda command: command["words"])
    return "".join(f"{json.dumps(command, ensure_ascii=False)}\n" for command in ordered)
