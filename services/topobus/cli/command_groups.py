"""Commands by their words, and a command line read as the call of one of them.

Flows in: functions, as commands of groups; the words of a line. Flows out: a call, or a UsageError that names every fault of the line. A command may be named by its import path:
then only the one that runs is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, TypeVar

from topobus.cli.command_parameters import CommandParameter, parameters_of
from topobus.cli.exits import UsageError

__all__ = ["CommandCall", "CommandGroup"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class CommandCall:
    """A function with what a line gives it."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> Any:
        """Run the command."""
        return self.function(*self.arguments, **self.options)


class CommandGroup:
    """Commands below one word, or below none: the program's own. It may be a command itself."""

    def __init__(self, name: str = "", help: str = "") -> None:  # noqa: A002 - what it is for everybody else
        self.name = name
        self.help = help
        self.own: Callable[..., Any] | None = None
        """What the group's word alone runs."""
        self._commands: dict[str, Callable[..., Any] | CommandGroup | str] = {}
        self._helps: dict[str, str] = {}

    def add(self, command: Callable[..., Any] | CommandGroup | str, name: str, help: str = "") -> None:  # noqa: A002 - as above
        """Add a function, a group, or the import path `module:name` of one."""
        self._commands[name] = command
        self._helps[name] = help

    def command(self, name: str) -> Callable[[F], F]:
        """Add the function below."""

        def added(function: F) -> F:
            self.add(function, name)
            return function

        return added

    def default(self, function: F) -> F:
        """Have the group's word alone run the function below."""
        self.own = function
        return function

    def __iter__(self) -> Iterator[str]:
        return iter(self._commands)

    def __contains__(self, word: str) -> bool:
        return word in self._commands

    def __getitem__(self, word: str) -> CommandGroup:
        """Load a command; one that is a function is a group without others."""
        command = self._commands[word]
        if isinstance(command, str):
            module, _, attribute = command.partition(":")
            command = getattr(import_module(module), attribute)
        if not isinstance(command, CommandGroup):
            alone = CommandGroup(word, " ".join((command.__doc__ or "").partition("\n\n")[0].split()))
            alone.own = command
            command = alone
        if self._helps[word]:
            command.help = self._helps[word]
        return command

    def words_of(self, words: Sequence[str]) -> list[str]:
        """Take the leading words that name a command: for `place --nod x` the help that is meant is place's."""
        if not words or words[0] not in self:
            return []
        return [words[0], *self[words[0]].words_of(words[1:])]

    def read(self, words: Sequence[str]) -> CommandCall:
        """Read a line.

        Errors: raises UsageError that names what is unknown, missing, said twice, or left over.
        """
        if words and words[0] in self:
            return self[words[0]].read(words[1:])
        if self.own is None:
            raise self._unknown(words)
        return _Line(self.own, words).call()

    def _unknown(self, words: Sequence[str]) -> UsageError:
        commands = ", ".join(self)
        if not words or words[0].startswith("-"):
            return UsageError(f"say which command: {commands}")
        near = get_close_matches(words[0], list(self), n=1)
        return UsageError(
            f"there is no command {words[0]!r}{f'; did you mean {near[0]}?' if near else ''}", next_step=f"the commands are {commands}"
        )


class _Line:
    """One command's words, as they are read."""

    def __init__(self, function: Callable[..., Any], words: Sequence[str]) -> None:
        self._function = function
        self._words = list(words)
        self._parameters = parameters_of(function)
        self._options = {name: each for each in self._parameters if not each.is_argument for name in (*each.names, *each.negatives)}
        self._given: dict[tuple[str, str], list[Any]] = {}
        self._loose: list[str] = []
        self._unknown: list[str] = []

    def call(self) -> CommandCall:
        """Read all words."""
        while self._words:
            word = self._words.pop(0)
            if word == "--":
                self._loose += self._words
                break
            if not _is_option(word):
                self._loose.append(word)
            elif word.startswith("--"):
                name, equals, value = word.partition("=")
                self._read_option(name.replace("_", "-"), value if equals else None)
            else:
                self._read_letters(word)
        self._share_out()
        self._check()
        return self._made()

    def _read_option(self, name: str, value: str | None) -> None:
        parameter = self._options.get(name)
        if parameter is None:
            self._unknown.append(name)
        elif parameter.is_switch:
            is_on = name not in parameter.negatives
            self._give(parameter, is_on if value is None else parameter.read(value) is is_on, name)
        elif value is not None:
            self._give(parameter, parameter.read(value), name)
        elif self._words and not _is_option(self._words[0]):
            self._give(parameter, parameter.read(self._words.pop(0)), name)
        else:
            raise UsageError(f"{name} requires an argument")

    def _read_letters(self, word: str) -> None:
        """Read `-n x`, `-nx`, `-n=x`, and several at once: `-Aw`."""
        for place, letter in enumerate(word[1:], 2):
            parameter = self._options.get(f"-{letter}")
            if parameter is None or not parameter.is_switch:
                rest = word[place:]
                self._read_option(f"-{letter}" if parameter is not None else word, rest.removeprefix("=") if rest else None)
                return
            self._read_option(f"-{letter}", None)

    def _give(self, parameter: CommandParameter, value: Any, name: str) -> None:
        values = self._given.setdefault((parameter.target, parameter.field), [])
        if values and not parameter.is_many:
            raise UsageError(f"{name} is given more than once")
        values.append(value)

    def _share_out(self) -> None:
        """Give the words without a name to the arguments, in their order."""
        for parameter in self._parameters:
            if parameter.is_argument:
                count = len(self._loose) if parameter.is_many else 1
                taken, self._loose = self._loose[:count], self._loose[count:]
                for word in taken:
                    self._give(parameter, parameter.read(word), parameter.names[0])

    def _check(self) -> None:
        faults = []
        for name in dict.fromkeys(self._unknown):
            near = get_close_matches(name, [option for option in self._options if option.startswith("--")], n=1)
            faults.append(f"there is no option {name}{f'; did you mean {near[0]}?' if near else ''}")
        lacking = [each for each in self._parameters if each.is_required and (each.target, each.field) not in self._given]
        if arguments := [each.names[0] for each in lacking if each.is_argument]:
            faults.append(f"parameter {arguments[0]} requires an argument")
        if options := [next(name for name in each.names if name.startswith("--")) for each in lacking if not each.is_argument]:
            faults.append(f"missing: {', '.join(options)}")
        # The value of an option that there is not is no mistake of its own.
        if self._loose and not faults:
            faults.append(f"nothing takes {' '.join(map(repr, self._loose))}")
        if faults:
            raise UsageError("; ".join(faults))

    def _made(self) -> CommandCall:
        arguments: list[Any] = []
        options: dict[str, Any] = {}
        fields: dict[tuple[str, Any], dict[str, Any]] = {}
        for parameter in self._parameters:
            values = self._given.get((parameter.target, parameter.field), [])
            value = parameter.container(values) if parameter.container is not None else next(iter(values), parameter.default)
            if parameter.is_rest:
                arguments += values
            elif parameter.is_argument:
                arguments.append(value if values else parameter.default)
            elif values and parameter.owner is not None:
                fields.setdefault((parameter.target, parameter.owner), {})[parameter.field] = value
            elif values:
                options[parameter.target] = value
        for (target, owner), given in fields.items():
            options[target] = owner(**given)
        return CommandCall(self._function, tuple(arguments), options)


def _is_option(word: str) -> bool:
    """Tell options from what is none: standard input, `-`, and numbers below zero.

    >>> [_is_option(word) for word in ("--json", "-n", "-", "-1.5", "a-b")]
    [True, True, False, False, False]
    """
    return word.startswith("-") and word != "-" and not word[1:].replace(".", "", 1).isdecimal()
