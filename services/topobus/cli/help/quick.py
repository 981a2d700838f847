"""Answers what needs no command: help and this program's own version, before the parser or any
command is imported.

Any other command line is left to the program. With everything imported, `topobus place --help` took
half a second of processor time.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from topobus.cli.command_words import with_options_behind
from topobus.cli.help.command_data import CommandData, find_command, read_commands
from topobus.cli.help.completing import complete, script_lines
from topobus.cli.help.examples import EXAMPLES
from topobus.cli.help.rendering import command_help, program_help

__all__ = ["COMPLETE", "answer_quickly", "help_of", "print_help", "show_version"]

COMPLETE = "__complete"
"""The word with which a shell's script asks for completion. The words after the program's name
follow."""

_HELP = ("--help", "-h")
# Lines of prose beyond this are hard to read.
_WIDEST = 100


def answer_quickly(arguments: list[str]) -> bool:
    """Print help or the version when the command line asks for nothing else. Returns whether it
    did.
    """
    if arguments[:1] == [COMPLETE]:
        _complete(arguments[1:])
        return True
    words = with_options_behind(arguments)
    if words == ["--version"]:
        show_version()
        return True
    options = words[: words.index("--")] if "--" in words else words
    asks_help = any(option in options for option in _HELP)
    if options[:1] == ["help"] and not asks_help:
        options, asks_help = options[1:], True
    commands = read_commands()
    command, rest = find_command(commands, options)
    if asks_help or not options:
        # The parser refuses a word that is no command, unless it is an argument of one.
        is_ours = not rest or command["is_command"]
    else:
        # A group of commands alone.
        is_ours = options == command["words"].split() and not command["is_command"]
    if is_ours:
        print_help(help_of(command, commands))
    return is_ours


def help_of(command: CommandData, commands: dict[str, CommandData]) -> str:
    """Write the help of a command, or of the program."""
    width = _width()
    if not command["words"]:
        return program_help(width)
    program = program_name()
    examples = [(text, line.replace("topobus ", f"{program} ", 1)) for text, line in EXAMPLES.get(command["words"], ())]
    return command_help(command, commands, examples, width, program=program)


def program_name() -> str:
    """Return the name by which this program was called: its own, or kubectl's."""
    return "kubectl topobus" if sys.argv[:1] and os.path.basename(sys.argv[0]) == "kubectl-topobus" else "topobus"  # noqa: PTH119 - pathlib would cost an import


def print_help(text: str) -> None:
    """Print help. On a terminal, headings are bold and remarks of examples faint."""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        text = "".join(_emphasized(line) for line in text.splitlines(keepends=True))
    encoding = sys.stdout.encoding or "ascii"
    if not encoding.lower().replace("-", "").startswith("utf"):
        text = text.replace("…", "...").encode("ascii", "replace").decode()
    _write(text)


def show_version() -> None:
    """Print this program's version."""
    # Imported here: it costs more than all the rest, and help does not need it.
    from importlib.metadata import version

    _write(f"topobus {version('topobus')}\n")


def _complete(words: Sequence[str]) -> None:
    """Print the possible ends of a command line."""
    completion = complete(words, read_commands())
    last = words[-1] if words else ""
    names: list[str] = []
    if completion.names:
        # Imported here: only this asks the system, as a command does. If the line itself names a
        # system, that one is asked.
        from topobus.cli.help.value_names import names_of, options_of

        names = names_of(completion.names, options_of(words))
    _write("".join(f"{line}\n" for line in script_lines(completion, names, last)))


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader is gone (`| head`): point stdout elsewhere, or the interpreter complains at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _width() -> int:
    # 80 columns unless a terminal has another width, as pages are compared and copied.
    return max(40, min(_WIDEST, shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80))


def _emphasized(line: str) -> str:
    body = line.rstrip("\n")
    if body.endswith(":") and not body.startswith(" "):
        return f"\x1b[1m{body}\x1b[0m\n"
    if body.startswith("  # "):
        return f"\x1b[2m{body}\x1b[0m\n"
    return line
