"""Reads the data of help and completion from the program's parser.

It imports every command: it is run by `tools/render-docs`, and where a command is not in its data
yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

from cyclopts import App, Parameter
from cyclopts.argument import Argument

from topobus.cli.help.command_data import ArgumentData, CommandData, OptionData

__all__ = ["specify_all"]

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


def specify_all(app: App) -> list[CommandData]:
    """Describe the program and all its commands."""
    return [_specify(command, words, app.default_parameter) for words, command in _walk(app, ())]


def _specify(app: App, words: tuple[str, ...], default: Parameter | None) -> CommandData:
    """Describe one command. A command taken alone does not know the program's `default`."""
    arguments: list[ArgumentData] = []
    options: list[OptionData] = []
    if app.default_command is not None:
        for argument in app.assemble_argument_collection(default_parameter=default):
            if not argument.show or argument.names == ("*",):
                continue
            if argument.index is not None or argument.field_info.kind is argument.field_info.VAR_POSITIONAL:
                arguments.append(_argument(argument))
            else:
                options.append(_option(argument, words))
    return CommandData(
        words=" ".join(words),
        help=" ".join((app.help or "").split()),
        is_command=app.default_command is not None,
        arguments=arguments,
        options=options,
    )


def _walk(app: App, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], App]]:
    yield words, app
    for name in app:
        if not name.startswith("-"):
            yield from _walk(app[name], (*words, name))


def _argument(argument: Argument) -> ArgumentData:
    name = argument.names[0].lstrip("-")
    is_many = argument.field_info.kind is argument.field_info.VAR_POSITIONAL or _is_list(argument)
    return ArgumentData(
        name=name if not name.islower() else name.upper(),
        help=_text(argument),
        is_required=bool(argument.required),
        is_many=is_many,
        value="PATH" if "Path" in str(argument.hint) else name.upper(),
        choices=list(argument.get_choices() or ()),
    )


def _option(argument: Argument, words: tuple[str, ...]) -> OptionData:
    names = argument.names
    is_switch = bool(argument.negatives) or argument.hint is bool
    default = argument.field_info.default
    shown = default.value if isinstance(default, Enum) else default
    return OptionData(
        # Short names first, as usual. For a switch that is on by default, the name that switches it
        # off is more important.
        names=sorted(names, key=lambda name: (name.startswith("--"), names.index(name))),
        value="" if is_switch else _value(argument, names[0]),
        help=_text(argument),
        choices=[] if is_switch else list(argument.get_choices() or ()),
        default=str(shown)
        if isinstance(shown, str | int | float) and not isinstance(shown, bool) and shown != ""
        else "",
        is_required=bool(argument.required),
        is_many=_is_list(argument),
        is_shared=set(names) <= _SHARED and words[:1] not in (("up",), ("context",)),
    )


def _value(argument: Argument, name: str) -> str:
    if name in _VALUES:
        return _VALUES[name]
    if "Path" in str(argument.hint):
        return "PATH"
    if argument.hint in (int, float) or str(argument.hint) in ("float | None", "int | None"):
        return "NUMBER"
    return name.lstrip("-").rpartition("-")[2].upper()


def _is_list(argument: Argument) -> bool:
    hint: Any = argument.hint
    return any(word in str(hint) for word in ("list[", "tuple["))


def _text(argument: Argument) -> str:
    return " ".join((argument.parameter.help or "").split())
