"""Completion: what may stand at the end of a command line, in each shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from topobus.cli.application import run
from topobus.cli.contexts import Context, ContextFolder
from topobus.cli.help.command_data import read_commands
from topobus.cli.help.completing import complete
from topobus.cli.help.value_names import options_of

_DATA = read_commands()


def _text(value: object) -> str:
    """Name a case by its words."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["pla"], ["place"]),
        (["keys", "secrets", "re"], ["renew"]),
        (["place", "--dr"], ["--dry-run"]),
        (["get", "cl"], ["claims"]),
        (["get", "claims", "-o", "y"], ["yaml"]),
        (["get", "claims", "--output=w"], ["--output=wide"]),
        (["completion", "z"], ["zsh"]),
        (["help", "mov"], ["move-ledger"]),
        (["--nats", "nats://a:1", "inven"], ["inventory"]),
        (["--con"], ["--context", "--config"]),
    ],
    ids=_text,
)
def test_line_is_completed_from_what_the_program_knows_of_itself(words: list[str], values: list[str]) -> None:
    """Commands, options, and values of which there is a list."""
    assert [value for value, _ in complete(words, _DATA).values] == values


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["machine", "--node", ""], "nodes"),
        (["inventory", "--context", ""], "contexts"),
        (["context", "use", ""], "contexts"),
        (["inventory", ""], "classes"),
        (["health", "--class", ""], "classes"),
        (["device", "reset", "gpu"], "devices"),
        (["describe", "claim", "fa"], "objects claim"),
        (["explain", ""], "decisions"),
        (["simulate", "--machine", ""], "machines"),
        (["topo", "--machine=d"], "machines"),
        (["release", "pod", ""], "holders"),
        (["up", "--context", ""], ""),
        (["context", "add", ""], ""),
        (["place", ""], ""),
    ],
    ids=_text,
)
def test_names_are_asked_for_where_the_system_has_them(words: list[str], names: str) -> None:
    """Nodes, classes, devices, objects and decisions of the system; contexts of the user."""
    assert complete(words, _DATA).names == names


@pytest.mark.parametrize(
    ("words", "takes_files"),
    [
        (["place", ""], True),
        (["migrate", ""], True),
        (["apply", "-f", ""], True),
        (["record", ""], True),
        (["up", "--dir", ""], True),
        (["simulate", "--machine", ""], True),
        (["get", ""], False),
        (["demo", ""], False),
    ],
    ids=_text,
)
def test_files_are_offered_where_a_path_is_wanted(words: list[str], takes_files: bool) -> None:
    """And nowhere else."""
    assert complete(words, _DATA).takes_files is takes_files


def test_names_are_those_of_the_system_that_the_line_itself_names() -> None:
    """An unfinished line says already which system it is about."""
    options = options_of(["--context=lab", "machine", "--nats", "nats://a:1", "--node", ""])

    assert (options.context, options.nats) == ("lab", "nats://a:1")


def test_nothing_is_said_when_the_system_cannot_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """A shell that waits for a key gets no errors: nobody listens at this port."""
    code = run(["__complete", "machine", "--nats", "nats://127.0.0.1:1", "--node", ""])

    said = capsys.readouterr()
    assert (code, said.out, said.err) == (0, ":4\n", "")


def test_names_of_contexts_are_completed_without_any_server(capsys: pytest.CaptureFixture[str]) -> None:
    """They are the user's own files."""
    for name in ("lab", "prod"):
        ContextFolder().put(Context(name=name, nats="nats://127.0.0.1:1"))

    run(["__complete", "--context", "l"])

    assert capsys.readouterr().out == "lab\n:4\n"


def test_names_of_recorded_machines_are_completed_without_any_server(capsys: pytest.CaptureFixture[str]) -> None:
    """They come with the program; a folder or a file may stand there, too."""
    run(["__complete", "simulate", "--machine", "dg"])

    assert capsys.readouterr().out == "dgx\ndgx-flaky\n:0\n"


_BASH = 'source "$1"; COMP_WORDS=(topobus keys secrets re); COMP_CWORD=3; _topobus; printf "%s\\n" "${COMPREPLY[@]}"'
# zsh's own display of matches needs a terminal: the function that it calls with them is ours here.
_ZSH = '_describe() { print -l ${(P)2} }; words=(topobus keys secrets re); CURRENT=4; source "$1"; _topobus'
_FISH = 'source $argv[1]; complete -C "topobus keys secrets re"'


@pytest.mark.parametrize(
    ("shell", "flags", "program"),
    [("bash", ["--norc", "-c"], _BASH), ("zsh", ["-f", "-c"], _ZSH), ("fish", ["--no-config", "-c"], _FISH)],
    ids=["bash", "zsh", "fish"],
)
def test_shell_completes_by_its_script(
    shell: str, flags: list[str], program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shell itself reads the script, and comes to the program and back."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    run(["completion", shell])
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    topobus = tmp_path / "topobus"
    topobus.write_text(f'#!/bin/sh\nexec {sys.executable} -m topobus.cli.main "$@"\n')
    topobus.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "TERM": "dumb"}
    name = [] if shell == "fish" else [shell]

    done = subprocess.run(
        [shell, *flags, program, *name, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        stdin=subprocess.DEVNULL,
    )

    first = [line.replace(":", "\t", 1).partition("\t")[0] for line in done.stdout.splitlines()]
    assert first == ["renew"], done.stderr
