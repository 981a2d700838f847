"""Completes a command line: finds the words that are possible at its end. Pure.

Names of nodes, devices and objects are looked up by kind, elsewhere. The answer is written as
kubectl's plugins write it: a line for each value, a tab, what it means, and at the end `:4` for "no
files" or `:0` for "files as well".

Source: kubectl's `kubectl_complete-<plugin>`, and cobra's __complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from topobus.cli.help.command_data import CommandData, OptionData

__all__ = ["KINDS", "Completion", "complete", "script_lines"]

KINDS = ("pods", "claims", "templates", "deviceclasses", "slices")
# The parser has no list for --output of listings: a wrong one is refused when the options are read
# together.
_FORMATS = ("table", "wide", "yaml", "json", "name")
# Placeholders of values that a running system, or the user's own files, have names for.
_NAMED = {"NODE": "nodes", "CLASS": "classes", "CONTEXT": "contexts", "SERVICE": "logs", "MACHINE": "machines"}


class Completion(NamedTuple):
    """The possible ends of a line."""

    values: tuple[tuple[str, str], ...] = ()
    """Each with its meaning."""
    names: str = ""
    """The kind of names to look up: `nodes`, `classes`, `devices`, `contexts`, `logs`, `machines`,
    `holders`, `decisions`, `objects KIND`. Empty: none."""
    takes_files: bool = False


def complete(words: Sequence[str], commands: Mapping[str, CommandData]) -> Completion:
    """Complete the last of the words after the program's name.

    >>> data = {"": {"options": [], "arguments": []}, "up": {"words": "up", "help": "Start.", "options": [], "arguments": []}}
    >>> complete(["u"], data).values
    (('up', 'Start.'),)
    """  # noqa: E501
    *before, last = words or [""]
    path = ""
    positions: list[str] = []
    waiting: OptionData | None = None
    for word in before:
        if waiting is not None:
            waiting = None
        elif word.startswith("-") and word != "-":
            waiting = _waiting_option(word, path, commands)
        elif f"{path} {word}".strip() in commands and not positions:
            path = f"{path} {word}".strip()
        else:
            positions.append(word)
    if waiting is not None:
        return _begin(_of_option(waiting, path), last)
    if last.startswith("--") and "=" in last:
        name, _, value = last.partition("=")
        option = _waiting_option(name, path, commands)
        values_of_option = _begin(_of_option(option, path), value) if option is not None else Completion()
        return values_of_option._replace(
            values=tuple((f"{name}={text}", meaning) for text, meaning in values_of_option.values)
        )
    if last.startswith("-"):
        options = _options(path, commands)
        return _begin(
            Completion(values=tuple((name, option["help"]) for option in options for name in option["names"])), last
        )
    below = _below(path, commands) if not positions else ()
    if path == "help":
        return _begin(Completion(values=_below("", commands)), last)
    argument = _of_argument(path, positions, commands)
    return _begin(argument._replace(values=(*below, *argument.values)), last)


def script_lines(completion: Completion, names: Sequence[str], last: str) -> list[str]:
    """Write the answer. `names` are those that were looked up."""
    values = [*completion.values, *((name, "") for name in names if name.startswith(last))]
    directive = ":0" if completion.takes_files else ":4"
    return [*(f"{value}\t{meaning}".rstrip() for value, meaning in values), directive]


def _options(path: str, commands: Mapping[str, CommandData]) -> list[OptionData]:
    command = commands.get(path)
    own = command["options"] if command is not None else []
    if path:
        return own
    # Before the command, the options that every command has are possible.
    shared: dict[str, OptionData] = {}
    for other in commands.values():
        shared |= {option["names"][-1]: option for option in other["options"] if option["is_shared"]}
    return list(shared.values())


def _waiting_option(word: str, path: str, commands: Mapping[str, CommandData]) -> OptionData | None:
    """Return the option whose value comes next. None for a switch, and for one that has its
    value.
    """
    if "=" in word:
        return None
    return next((option for option in _options(path, commands) if word in option["names"] and option["value"]), None)


def _of_option(option: OptionData, path: str) -> Completion:
    if option["choices"]:
        return Completion(values=tuple((choice, "") for choice in option["choices"]))
    if option["value"] == "OUTPUT":
        return Completion(values=tuple((output_format, "") for output_format in _FORMATS))
    if "--context" in option["names"] and path != "up":
        return Completion(names="contexts")
    return Completion(
        names=_NAMED.get(option["value"], ""), takes_files=option["value"] in ("PATH", "FILE", "DIR", "MACHINE")
    )


def _of_argument(path: str, positions: Sequence[str], commands: Mapping[str, CommandData]) -> Completion:
    command = commands.get(path)
    if command is None or not command["arguments"]:
        return Completion()
    if path in ("get", "describe", "delete"):
        return (
            Completion(names=f"objects {positions[0]}")
            if positions
            else Completion(values=tuple((kind, "") for kind in KINDS))
        )
    if path.startswith("device "):
        return Completion(names="devices")
    if path.startswith("context ") and path != "context add":
        return Completion(names="contexts")
    if path == "release pod":
        return Completion(names="holders")
    if path == "explain":
        return Completion(names="decisions")
    arguments = command["arguments"]
    if len(positions) >= len(arguments) and not arguments[-1]["is_many"]:
        return Completion()
    argument = arguments[min(len(positions), len(arguments) - 1)]
    if argument["choices"]:
        return Completion(values=tuple((choice, "") for choice in argument["choices"]))
    if argument["value"] in _NAMED:
        return Completion(names=_NAMED[argument["value"]])
    return Completion(takes_files=argument["value"] == "PATH")


def _below(path: str, commands: Mapping[str, CommandData]) -> tuple[tuple[str, str], ...]:
    start = f"{path} ".lstrip()
    return tuple(
        (words[len(start) :], command["help"])
        for words, command in commands.items()
        if words and words.startswith(start) and words != path and " " not in words[len(start) :]
    )


def _begin(completion: Completion, last: str) -> Completion:
    return completion._replace(
        values=tuple((value, meaning) for value, meaning in completion.values if value.startswith(last))
    )
