"""Reads from the program's parser what help and completion say of each command. It imports every command: run by `tools/render-docs`, and where a command is not in its data yet."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from topobus.cli.command_groups import CommandGroup
from topobus.cli.command_parameters import CommandParameter, parameters_of
from topobus.cli.help.command_data import ArgumentData, CommandData, OptionData

__all__ = ["specify", "specify_all"]

# Options of `topobus.cli.options`, which many commands share.
_SHARED = {"--json", "--nats", "--context", "--config"}
_VALUES = {
    "--nats": "URL",
    "--to": "URL",
    "--dir": "DIR",
    "--context": "NAME",
    "--kube-context": "NAME",
    "--operation": "ID",
    "--listen": "ADDRESS",
    "--name": "HOST",
    "--reserved-cpus": "CPUS",
    "--where": "FIELD=VALUE",
    "--why": "TEXT",
    "--parameters": "JSON",
    "--pod": "NAMESPACE/NAME",
    "--claim": "NAMESPACE/NAME",
}


def specify_all(program: CommandGroup) -> list[CommandData]:
    """Describe the program and all its commands."""
    return [specify(command, words) for words, command in _walk(program, ())]


def specify(command: CommandGroup, words: tuple[str, ...]) -> CommandData:
    """Describe one command."""
    parameters = parameters_of(command.own) if command.own is not None else []
    return CommandData(
        words=" ".join(words),
        help=" ".join(command.help.split()),
        is_command=command.own is not None,
        arguments=[_argument(parameter) for parameter in parameters if parameter.is_argument],
        options=[_option(parameter, words) for parameter in parameters if not parameter.is_argument],
    )


def _walk(group: CommandGroup, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], CommandGroup]]:
    yield words, group
    for name in group:
        yield from _walk(group[name], (*words, name))


def _argument(parameter: CommandParameter) -> ArgumentData:
    name = parameter.names[0]
    return ArgumentData(
        name=name,
        help=parameter.help,
        is_required=parameter.is_required,
        is_many=parameter.is_many,
        value="PATH" if parameter.kind is Path and not parameter.is_many else name,
        choices=list(parameter.choices),
    )


def _option(parameter: CommandParameter, words: tuple[str, ...]) -> OptionData:
    names = [*parameter.names, *parameter.negatives]
    default = parameter.default
    shown = default.value if isinstance(default, Enum) else default
    return OptionData(
        # Short names first, as everybody writes them; of a switch that is on by default, what switches it off says more.
        names=sorted(names, key=lambda name: (name.startswith("--"), names.index(name))),
        value="" if parameter.is_switch else _value(parameter),
        help=parameter.help,
        choices=list(parameter.choices),
        default=str(shown) if isinstance(shown, str | int | float) and not isinstance(shown, bool) and shown != "" else "",
        is_required=parameter.is_required,
        is_many=parameter.is_many,
        is_shared=set(names) <= _SHARED and words[:1] not in (("up",), ("context",)),
    )


def _value(parameter: CommandParameter) -> str:
    name = parameter.names[0]
    if name in _VALUES:
        return _VALUES[name]
    if parameter.kind is Path:
        return "PATH"
    return "NUMBER" if parameter.kind in (int, float) else name.lstrip("-").rpartition("-")[2].upper()
