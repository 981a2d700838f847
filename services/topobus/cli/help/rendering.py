"""Writes help as text: of the program, its commands in groups, and of a command, its usage, options
and examples.

Pure.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from topobus.cli.help.command_data import ArgumentData, CommandData, OptionData
from topobus.cli.help.overview import COMMANDS, PROGRAM

__all__ = ["command_help", "program_help"]

_INDENT = "  "
# A longer name has a line of its own.
_WIDEST_NAME = 26
_EXIT_CODES = (
    "0 yes, 1 no, 2 usage, 65 bad content, 66 no such file, 69 unavailable, 70 our defect, 74 hardware, 78 "
    "setting, 130 interrupted"
)


def program_help(width: int) -> str:
    """Write the overview."""
    parts = [PROGRAM, "Usage:\n  topobus COMMAND [options]"]
    for group, commands in COMMANDS.items():
        parts.append(_section(group, list(commands.items()), width))
    first = ("topobus demo", "topobus up", "topobus place examples/pods/trainer.yaml", "topobus machine")
    parts.append("A first walk:\n" + "\n".join(f"{_INDENT}{line}" for line in first))
    closing = (
        "`topobus COMMAND --help` has options and examples. --nats URL, --context NAME and --json may also "
        "precede the command. "
        "Which system a command talks to: docs/how-to/choose-a-system.md."
    )
    parts.append(textwrap.fill(closing, width))
    parts.append(textwrap.fill(f"Exit codes: {_EXIT_CODES}.", width))
    return "\n\n".join(parts) + "\n"


def command_help(
    command: CommandData,
    commands: Mapping[str, CommandData],
    examples: Sequence[tuple[str, str]],
    width: int,
    *,
    program: str,
) -> str:
    """Write the help of one command.

    Shapes: commands — all, to list those below this one; examples — the title and the command line
    of each.
    """
    parts = [textwrap.fill(command["help"], width)] if command["help"] else []
    below = [
        other
        for words, other in commands.items()
        if words.startswith(f"{command['words']} ") and " " not in words[len(command["words"]) + 1 :]
    ]
    calls = [_call(program, command)] if command["is_command"] else []
    calls += [f"{program} {command['words']} COMMAND"] if below else []
    parts.append(
        "Usage:\n"
        + "\n".join(textwrap.fill(call, width, initial_indent=_INDENT, subsequent_indent=_INDENT * 3) for call in calls)
    )
    if below:
        parts.append(
            _section("Commands", [(other["words"].rpartition(" ")[2], other["help"]) for other in below], width)
        )
    if command["arguments"]:
        parts.append(
            _section(
                "Arguments", [(argument["name"], _argument_text(argument)) for argument in command["arguments"]], width
            )
        )
    own = [option for option in command["options"] if not option["is_shared"]]
    shared = [option for option in command["options"] if option["is_shared"]]
    if own:
        parts.append(_section("Options", [(_option_name(option), _option_text(option)) for option in own], width))
    if shared:
        parts.append(
            _section("Common options", [(_option_name(option), _option_text(option)) for option in shared], width)
        )
    if examples:
        lines = [f"{_INDENT}# {text}\n{_INDENT}{line}" for text, line in examples]
        parts.append("Examples:\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _call(program: str, command: CommandData) -> str:
    words = [program, command["words"]]
    for argument in command["arguments"]:
        name = f"{argument['name']}…" if argument["is_many"] and "..." not in argument["name"] else argument["name"]
        words.append(name if argument["is_required"] else f"[{name}]")
    words += [
        f"{option['names'][-1]} {option['value']}".rstrip() for option in command["options"] if option["is_required"]
    ]
    return " ".join([*words, "[options]"])


def _option_name(option: OptionData) -> str:
    names = ", ".join(option["names"])
    padded = names if option["names"][0].startswith("-") and not option["names"][0].startswith("--") else f"    {names}"
    return f"{padded} {option['value']}{'…' if option['is_many'] else ''}" if option["value"] else padded


def _option_text(option: OptionData) -> str:
    remarks = [option["help"]]
    if option["choices"]:
        remarks.append(f"One of {', '.join(option['choices'])}.")
    if option["default"] and "efault" not in option["help"]:
        remarks.append(f"Default: {option['default']}.")
    if option["is_required"]:
        remarks.append("Required.")
    if option["is_many"]:
        remarks.append("May be given several times.")
    return " ".join(remark for remark in remarks if remark)


def _argument_text(argument: ArgumentData) -> str:
    choices = f"One of {', '.join(argument['choices'])}." if argument["choices"] else ""
    return " ".join(part for part in (argument["help"], choices) if part)


def _section(title: str, rows: Sequence[tuple[str, str]], width: int) -> str:
    column = min(_WIDEST_NAME, max(len(name) for name, _ in rows)) + len(_INDENT) + 2
    lines = [f"{title}:"]
    for name, text in rows:
        head = f"{_INDENT}{name}"
        wrapped = textwrap.wrap(text, max(20, width - column), break_long_words=False, break_on_hyphens=False) or [""]
        if len(head) + 2 > column:
            lines.append(head)
        else:
            lines.append(f"{head:<{column}}{wrapped.pop(0)}".rstrip())
        lines += [f"{'':<{column}}{line}" for line in wrapped]
    return "\n".join(lines)
