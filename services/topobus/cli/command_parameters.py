"""The parameters of a command: a function's annotated parameters, as arguments and options of a command line.

Flows in: a function. Flows out: its parameters, with the names by which a line gives them, and texts read as values. A parameter before `*` is an argument, `*args` and a
list take all words that are left, one behind `*` is an option, a `bool` among them a switch; the fields of a dataclass are options, too.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from topobus.cli.exits import UsageError

__all__ = ["CommandParameter", "Parameter", "parameters_of"]

_YES, _NO = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What an annotation says of a parameter: `Annotated[int, Parameter(help="…")]`."""

    name: str | tuple[str, ...] = ()
    """Names of an option with their dashes, or how an argument is shown; empty: as the function calls it."""
    help: str = ""
    negative: str | None = None
    """What switches off; None: `--no-NAME`, empty: nothing."""
    within: tuple[float, float] | None = None
    """The least and the most that a number may be."""


@dataclass(frozen=True, kw_only=True)
class CommandParameter:
    """One argument or option of a command."""

    target: str
    """The function's parameter."""
    field: str = ""
    """The field of a dataclass, where it is one."""
    owner: Any = None
    """That dataclass."""
    names: tuple[str, ...]
    """Names of an option; of an argument the one that is shown."""
    negatives: tuple[str, ...] = ()
    help: str
    kind: Any
    """The type of one value."""
    is_argument: bool
    is_rest: bool = False
    """It is `*args`."""
    container: type | None = None
    """What several values are gathered in; None: there is one."""
    default: Any = MISSING
    within: tuple[float, float] | None = None

    @property
    def is_required(self) -> bool:
        """Whether a line must give it."""
        return self.default is MISSING and not self.is_rest

    @property
    def is_many(self) -> bool:
        """Whether there may be several values."""
        return self.container is not None

    @property
    def is_switch(self) -> bool:
        """Whether its name alone says all."""
        return self.kind is bool and not self.is_argument

    @property
    def choices(self) -> tuple[str, ...]:
        """What it may be, where that is one of a few words."""
        if get_origin(self.kind) is Literal:
            return tuple(str(word) for word in get_args(self.kind))
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            return tuple(_word(member) for member in self.kind)
        return ()

    def read(self, text: str) -> Any:
        """Read one value.

        Errors: raises UsageError that says what is wanted.
        """
        if self.choices:
            return self._choice(text)
        if self.kind is bool:
            word = text.lower()
            if word not in (*_YES, *_NO):
                raise self._refusal(text, "true or false")
            return word in _YES
        try:
            value = self.kind(text)
        except ValueError:
            raise self._refusal(text, "a whole number" if self.kind is int else "a number") from None
        # Written so that what is no number (nan) is refused, too.
        if self.within is not None and not self.within[0] <= value <= self.within[1]:
            raise self._refusal(text, f"{self.within[0]:g} to {self.within[1]:g}")
        return value

    def _choice(self, text: str) -> Any:
        if get_origin(self.kind) is Literal:
            chosen = [word for word in get_args(self.kind) if str(word) == text]
        else:
            chosen = [member for member in self.kind if _word(member) == text.lower().replace("_", "-")]
        if not chosen:
            raise self._refusal(text, f"one of {', '.join(self.choices)}")
        return chosen[0]

    def _refusal(self, text: str, wanted: str) -> UsageError:
        return UsageError(f"{self.names[0]}: got {text!r}, wanted {wanted}")


def parameters_of(function: Callable[..., Any]) -> list[CommandParameter]:
    """Read a function's parameters, in their order."""
    hints = get_type_hints(function, include_extras=True)
    read: list[CommandParameter] = []
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint):
            read += _fields(parameter.name, hint)
        else:
            default = MISSING if parameter.default is inspect.Parameter.empty else parameter.default
            read.append(_parameter(parameter.name, parameter.name, hint, default, parameter.kind))
    return read


def _fields(target: str, kind: Any) -> Iterator[CommandParameter]:
    """Read the fields of a dataclass as options; none is required, for the dataclass has a default."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        parameter = _parameter(target, field.name, hints[field.name], field.default, inspect.Parameter.KEYWORD_ONLY)
        yield replace(parameter, field=field.name, owner=kind)


def _parameter(target: str, name: str, hint: Any, default: Any, place: Any) -> CommandParameter:
    hint, said = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, Parameter())
    kind, container = _kind(hint)
    is_rest = place is inspect.Parameter.VAR_POSITIONAL
    is_argument = place is not inspect.Parameter.KEYWORD_ONLY
    names = (said.name,) if isinstance(said.name, str) else said.name
    if not names:
        names = (name.upper(),) if is_argument else (f"--{name.replace('_', '-')}",)
    negatives: tuple[str, ...] = ()
    if kind is bool and not is_argument and container is None and said.negative != "":
        negatives = (said.negative or f"--no-{names[0].removeprefix('--')}",)
    return CommandParameter(
        target=target,
        names=names,
        negatives=negatives,
        help=" ".join(said.help.split()),
        kind=kind,
        is_argument=is_argument,
        is_rest=is_rest,
        container=tuple if is_rest else container,
        default=default,
        within=said.within,
    )


def _kind(hint: Any) -> tuple[Any, type | None]:
    """Give the type of one value, and what several are gathered in."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (choice for choice in get_args(hint) if choice is not type(None))
    container = get_origin(hint)
    return (get_args(hint)[0], container) if container in (list, tuple) else (hint, None)


def _word(member: Enum) -> str:
    """Write a member of an enumeration as a command line does."""
    return member.name.lower().replace("_", "-")
