"""Command lines as calls: how words become the arguments and options of a command, and what is said of those that do not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from topobus.cli.command_groups import CommandGroup
from topobus.cli.command_parameters import Parameter
from topobus.cli.exits import UsageError


class Place(Enum):
    """An enumeration whose words are its names."""

    CENTRAL = "c"
    NEAR_BY = "n"


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Options that commands share."""

    json: Annotated[bool, Parameter(name="--json", negative="")] = False
    nats: Annotated[str | None, Parameter(name=("--nats", "-s"))] = None


_SHARED = Shared()


def listed(
    kind: Annotated[str, Parameter(name="KIND")],
    names: Annotated[list[Path] | None, Parameter(name="NAME")] = None,
    /,
    *,
    file: Annotated[tuple[Path, ...], Parameter(name=("--file", "-f"))] = (),
    namespace: Annotated[str, Parameter(name=("--namespace", "-n"))] = "default",
    is_all: Annotated[bool, Parameter(name=("--all", "-A"), negative="")] = False,
    watch: Annotated[bool, Parameter(name=("--watch", "-w"))] = True,
    limit: Annotated[int, Parameter(within=(1, 9))] = 3,
    ratio: float | None = None,
    form: Literal["text", "yaml"] = "text",
    place: Place = Place.CENTRAL,
    options: Shared = _SHARED,
) -> None:
    """List things.

    More of it.
    """


def counted(*words: Annotated[str, Parameter(name="WORD")], why: str) -> None:
    """Count words."""


def _program() -> CommandGroup:
    program = CommandGroup("program", "A program.")
    inner = CommandGroup("inner", "A group.")
    inner.command("counted")(counted)
    program.add(listed, "list")
    program.add(inner, "inner", "What the program says of the group.")
    program.add("topobus.cli.commands.completion:completion", "completion")
    return program


def _given(line: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    call = _program().read(line.split())
    return call.arguments, call.options


@pytest.mark.parametrize(
    ("line", "arguments", "options"),
    [
        ("list k", ("k", None), {}),
        ("list k a b", ("k", [Path("a"), Path("b")]), {}),
        ("list k a --all b", ("k", [Path("a"), Path("b")]), {"is_all": True}),
        ("list k -", ("k", [Path("-")]), {}),
        ("list k -1.5", ("k", [Path("-1.5")]), {}),
        ("list -- --all -x", ("--all", [Path("-x")]), {}),
        ("list k --namespace x", ("k", None), {"namespace": "x"}),
        ("list k --namespace=x=y", ("k", None), {"namespace": "x=y"}),
        ("list k -n x -f a -f - --file=--b", ("k", None), {"namespace": "x", "file": (Path("a"), Path("-"), Path("--b"))}),
        ("list k -nx", ("k", None), {"namespace": "x"}),
        ("list k -n=x", ("k", None), {"namespace": "x"}),
        ("list k -Awn x", ("k", None), {"is_all": True, "watch": True, "namespace": "x"}),
        ("list k --no-watch", ("k", None), {"watch": False}),
        ("list k --watch=false --all=yes", ("k", None), {"watch": False, "is_all": True}),
        ("list k --no-watch=false", ("k", None), {"watch": True}),
        ("list k --limit 9 --ratio -0.5", ("k", None), {"limit": 9, "ratio": -0.5}),
        ("list k --form yaml --place near-by", ("k", None), {"form": "yaml", "place": Place.NEAR_BY}),
        ("list k --json -s nats://a", ("k", None), {"options": Shared(json=True, nats="nats://a")}),
        ("inner counted --why x a -- -b --why", ("a", "-b", "--why"), {"why": "x"}),
        ("inner counted --why because", (), {"why": "because"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_line_gives_a_command_what_it_says_when_it_is_read(line: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Arguments by their place, options by their names in each way of writing them, values by their types; what is not said keeps its default."""
    given = _given(line)

    assert given == (arguments, options)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lst k", "there is no command 'lst'; did you mean list?"),
        ("inner", "say which command: counted"),
        ("inner conted", "did you mean counted?"),
        ("list", "parameter KIND requires an argument"),
        ("list k --namespace", "--namespace requires an argument"),
        ("list k --namespace --all", "--namespace requires an argument"),
        ("list k -n", "-n requires an argument"),
        ("list k --namespce x", "there is no option --namespce; did you mean --namespace?"),
        ("list k -Ax", "there is no option -Ax"),
        ("list k --no-all", "there is no option --no-all"),
        ("list k --limit 0", "--limit: got '0', wanted 1 to 9"),
        ("list k --limit many", "--limit: got 'many', wanted a whole number"),
        ("list k --ratio half", "--ratio: got 'half', wanted a number"),
        ("list k --all=maybe", "--all: got 'maybe', wanted true or false"),
        ("list k --form json", "--form: got 'json', wanted one of text, yaml"),
        ("list k --place far", "--place: got 'far', wanted one of central, near-by"),
        ("list k --all -A", "-A is given more than once"),
        ("list k -n x --namespace y", "--namespace is given more than once"),
        ("inner counted a --wy b --for c", "there is no option --wy; did you mean --why?; there is no option --for; missing: --why"),
        ("completion bash zsh", "nothing takes 'zsh'"),
    ],
)
def test_line_is_refused_by_name_when_it_has_a_fault(line: str, said: str) -> None:
    """What is unknown, missing, of the wrong kind, said twice or left over stands in the error, with what was wanted."""
    with pytest.raises(UsageError) as refused:
        _program().read(line.split())

    assert said in refused.value.message


def test_command_is_loaded_when_it_is_named() -> None:
    """A group knows its commands' names without them; the help of one is what the group says of it, else the first paragraph of its function."""
    program = _program()

    assert list(program) == ["list", "inner", "completion"]
    assert program["list"].help == "List things."
    assert program["inner"].help == "What the program says of the group."
    assert program["completion"].own is not None
    assert program.words_of(["inner", "counted", "x"]) == ["inner", "counted"]
